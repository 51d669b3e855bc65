from .base import ConformanceBase as ConformanceBase
from .base import needs as needs
from .base import not_applicable as not_applicable
from .cassette.fixture import Cassettes as Cassettes
from .plain_oracle import PlainOracle as PlainOracle
from .suite import BackendConformance as BackendConformance
from .wide_models import wide_model as wide_model

THEMES: tuple[str, ...]
