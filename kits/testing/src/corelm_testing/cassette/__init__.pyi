from .backend import CassetteBackend as CassetteBackend
from .file import CassetteError as CassetteError
from .file import NotRecordedError as NotRecordedError
from .recorder import RECORD_MODES as RECORD_MODES
from .recorder import CassetteRecorder as CassetteRecorder
