"""Runs programs: records what they write as request graphs and hands these to a backend."""

from .backends.base import Backend, Capabilities, Session
from .connect import connect, record, replay
from .current import set_default_backend, use_backend
from .interpreter import Interpreter

__all__ = [
    "Backend",
    "Capabilities",
    "Interpreter",
    "Session",
    "connect",
    "record",
    "replay",
    "set_default_backend",
    "use_backend",
]
