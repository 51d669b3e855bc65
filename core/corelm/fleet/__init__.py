"""The canary of an engine, and many engines as one: what happens to them, and which rows each gets.

- `corelm.fleet.canary`: finds out by asking an engine whether it answers as its weights should.
- `FleetState` in `corelm.fleet.state`: what happens to rows, replicas and weights. It has no threads and no clock.
- `corelm.fleet.routing`: chooses a replica for each prompt.
- `FleetEngine` in `corelm.fleet.fleet`: the engine on top, which carries out what the state machine decides.
"""
