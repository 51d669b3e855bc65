from .cassette_backend import CassetteBackend as CassetteBackend
from .cassette_recorder import RECORD_MODES as RECORD_MODES
from .cassette_recorder import CassetteRecorder as CassetteRecorder
