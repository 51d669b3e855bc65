from .event_loop import EventLoopThread as EventLoopThread
from .http import ABORTED as ABORTED
from .http import Aborted as Aborted
from .http import HttpClient as HttpClient
from .http_errors import TransientError as TransientError
