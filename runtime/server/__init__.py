"""The engine over HTTP."""

from .app import create_app
from .background import BackgroundServer, bind, server_config, url_of
from .limits import SocketLimits

__all__ = ["BackgroundServer", "SocketLimits", "bind", "create_app", "server_config", "url_of"]
