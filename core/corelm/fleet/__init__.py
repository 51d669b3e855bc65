"""Many engines answer as one: the states of replicas, where rows go, and the canary that asks them after changes."""
