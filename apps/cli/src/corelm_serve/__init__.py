"""Serve any engine over HTTP in the OpenAI protocol, and record what clients said and were told, token for token.

- `ServerThread`: a server on a thread of this process; ``corelm serve`` is one in a separate process.
- `ServingApp`: the ASGI application, for a server of yours.
- `ServerOptions`: what is answered, whom, and how much at a time.
- `SessionStore`: recorded sessions. It needs no HTTP.

All but `SessionStore` need Starlette and uvicorn: the extra ``serve``. The names are listed in ``__init__.pyi`` and are
imported on first use.

A request takes these steps: `app.py` checks the key and finds the endpoint, `exchange.py` reads the body and ends the
calls of a client that hangs up, `requests.py` checks every field, `chat.py` and `completions.py` ask the engine
(`generation.py`) and send what it answers (`connection.py`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
