"""Many engines answer as one, and the canary that asks an engine whether it answers as its weights should.

- `records.py`: the states of a replica, the limits, and the decisions of the state machine.
- `state.py`: `FleetState`, the machine that says what happens to rows, replicas and weights. It has no threads and no
  clock. `steps.py`: what follows from its events. `rows.py`: where each row is.
- `routing.py`: which replica gets which rows.
- `canary.py`: `watch` puts a canary in front of an engine. `probes.py`, `answers.py`, `fingerprints.py`: what it asks
  and compares.
"""
