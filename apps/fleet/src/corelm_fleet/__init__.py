"""The canary of an engine, and many engines as one: what happens to them, and which rows each gets.

- `corelm_fleet.canary`: finds out by asking an engine whether it answers as its weights should.
- `FleetState` in `corelm_fleet.state`: what happens to rows, replicas and weights. It has no threads and no clock.
- `corelm_fleet.routing`: chooses a replica for each prompt.
- `FleetEngine` in `corelm_fleet.fleet`: the engine on top, which carries out what the state machine decides.

`Canary`, `FleetEngine`, `FleetLimits`, `Member`, `ReplicaStatus` and `Throughput` are public: a plugin can open its
engines as a fleet. They are imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
