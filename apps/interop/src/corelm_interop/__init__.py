"""Other people's libraries: adapters, one module each, wrappers that measure calls, and how results are shown.

- `torchrl`, `trl`, `lm_eval`, `inspect_ai`: policies, rollouts, models and providers of these libraries.
- `summary`: what a result holds, on a screen; `show_results`: the same in the notebook that runs.
- `Timing`: how long calls take and what they yield, in bounded memory.
- `Telemetry`: the same as spans and metrics of OpenTelemetry; needs the extra `telemetry`.
- `Observer`: the class of both, for an observer of your own.
- `current_call`: who made the call that a wrapper is in.

The names are imported on first use, and each adapter imports its library.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
