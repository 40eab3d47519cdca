"""What a server takes from its clients; data only."""

from __future__ import annotations

from dataclasses import dataclass

from umbel.lang.errors import EngineConfigError

MAX_BODY_BYTES = 16 << 20
KEEP_ALIVE_S = 10.0


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """The limits of sockets. Raises EngineConfigError for one that is not above 0."""

    max_sockets: int = 1024  # open at once; more are refused with status 503
    max_run_bytes: int = 256 << 20  # of all messages of one run together
    max_pending_events: int = 4096  # unsent; while there are more, no message is read
    open_timeout_s: float = 10.0  # for a client to send its first message
    send_timeout_s: float = 30.0  # for a client to take one message

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise EngineConfigError(f"{name} is a limit above 0, not {getattr(self, name)}")
