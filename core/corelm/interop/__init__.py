"""Adapters to other libraries, one module each. Core itself needs none of them."""
