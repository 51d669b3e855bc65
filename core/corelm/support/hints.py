"""Hints for error messages of plugins, the same as core's."""

# Plugins take it from `corelm.support`.
from corelm.validate import did_you_mean as did_you_mean
