from .backend import CassetteBackend as CassetteBackend
from .errors import CassetteError as CassetteError
from .errors import NotRecordedError as NotRecordedError
from .recorder import RECORD_MODES as RECORD_MODES
from .recorder import CassetteRecorder as CassetteRecorder
