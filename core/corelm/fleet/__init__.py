"""Let many engines answer as one.

- `records.py`: the states of a replica, the limits, and the decisions of the state machine.
- `state.py`: `FleetState`, the machine that says what happens to rows, replicas and weights. It has no threads and no
  clock. `steps.py`: what follows from its events. `rows.py`: where each row is.
- `routing.py`: which replica gets which rows.
"""
