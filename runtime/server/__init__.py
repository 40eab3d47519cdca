"""The engine over HTTP."""

from .app import create_app
from .background import BackgroundServer

__all__ = ["BackgroundServer", "create_app"]
