"""Is a log-probability of the `transformers` backend that of the model? Asked of every model type, on tiny random models.

``make test-families`` runs everything, ``python -m tests.families --only llama mamba`` a few types. Each row of the table
is one model type, or one special case of `special.py`, checked in a process of its own:

========================  =============================================================================================
`small.py`                the tiny sizes, in general and for single types
`configs.py`              a model of a type, built from a tiny configuration
`weights.py`              weights that make an error visible
`special.py`              special cases: adapters, hooks, odd settings, folders
`oracle.py`               the truth: the model's plain forward, one row at a time
`checks.py`               scoring and generating, compared with the oracle
`running.py`              one process per row, several at a time
`table.py`                the table and the verdict
`right.json`              what was right when the file was written; a refusal of it is a failure
========================  =============================================================================================
"""
