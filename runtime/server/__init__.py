"""The engine over HTTP."""

from .app import create_app
from .background import BackgroundServer, bind, url_of

__all__ = ["BackgroundServer", "bind", "create_app", "url_of"]
