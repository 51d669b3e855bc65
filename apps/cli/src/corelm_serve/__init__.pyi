from .app import ServingApp as ServingApp
from .options import ServerOptions as ServerOptions
from .server import ServerThread as ServerThread
from .sessions import SessionStore as SessionStore
from .sessions import Turn as Turn
