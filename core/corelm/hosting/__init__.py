"""Hosting: an engine that is open in another process, perhaps of another interpreter, and answers as if it were here.

- `HostedEngine`: the engine as this process sees it. It implements the hooks and asks the host.
- `open_in_process`: starts a host with a given interpreter, and opens an engine in it.
- `EngineServer`: the engine as the host sees it. It calls the plugin's hooks for what arrives.
"""
