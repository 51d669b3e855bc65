"""Does the `transformers` backend return a model's own log-probabilities? Asked of every model type, on tiny models.

``make test-families`` runs everything, ``python -m tests.families --only llama mamba`` some rows. Each row of the table
is one model type, or one special case of `special.py`, and is checked in a separate process:

========================  =============================================================================================
`small.py`                the tiny sizes, in general and for single types
`configs.py`              builds a model of a type from a tiny configuration
`weights.py`              weights that make an error visible
`special.py`              the special cases: adapters, hooks, odd settings, folders
`oracle.py`               the truth: the model's plain forward, one row at a time
`checks.py`               scoring and generating, compared with the oracle
`cases.py`                one row: build, open, check
`running.py`              one process per row, several at a time
`table.py`                the table and the verdict
`right.json`              what was right when the file was written; a refusal of it now is a failure
========================  =============================================================================================
"""
