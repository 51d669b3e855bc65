from .telemetry import Telemetry as Telemetry
from .timing import Timing as Timing
