"""The engine over HTTP."""

from .app import create_app
from .background import BackgroundServer, bind

__all__ = ["BackgroundServer", "bind", "create_app"]
