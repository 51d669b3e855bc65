"""Hosting: an engine that is open in another process, perhaps of another interpreter, and answers as if it were here.

- `HostedEngine`: the engine as this process sees it. It implements the hooks and asks the host.
- `open_in_process`: starts a host with a given interpreter, and opens an engine in it.
- `EngineServer`, `open_server`: the engine as the host sees it. It calls the plugin's hooks for what arrives.

A plugin can bring another kind of host. It implements `Host` and `Transport` on its side, passes a `Connection` frames,
and has a `Session` serve them where the engine is. Public for that, and imported on first use:

- `HostedEngine`, `Opened`, `Host`, `Transport`, `Callbacks`, `Call`, `Connection`;
- `EngineServer`, `open_server`, `Session`;
- `Frame`, `Kind`, `Packed`, `pack`, `unpack`, `Failure`: what crosses, as plain data;
- `portable_model`, `check_option`, `find_interpreter`, `ask_interpreter`: checks before anything is opened.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
