"""Adapters to other libraries, one module each. Core itself does not need those libraries."""
