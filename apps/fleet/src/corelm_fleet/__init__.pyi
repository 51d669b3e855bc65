from .canary import Canary as Canary
from .fleet import FleetEngine as FleetEngine
from .probes import probe_scores as probe_scores
from .records import FleetLimits as FleetLimits
from .replica import Member as Member
from .status import ReplicaStatus as ReplicaStatus
from .status import Throughput as Throughput
