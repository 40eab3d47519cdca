"""Waits until somebody calls back, from any thread, and says when that takes too long.

In a thread or on an event loop; knows nothing of what is waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

Callback = Callable[[], None]
Register = Callable[[Callback], None]


def block(register: Register, deadline: float | None, on_late: Callback) -> None:
    """Block this thread until the callback that `register` is given is called.

    `on_late` is called once if it has not been by `deadline`, on the monotonic clock; it has to
    bring the call about.
    """
    signal = threading.Lock()
    signal.acquire()
    register(signal.release)
    if deadline is None:
        signal.acquire()
    elif not signal.acquire(timeout=max(0.0, deadline - time.monotonic())):
        on_late()
        signal.acquire()


async def wait(register: Register, deadline: float | None, on_late: Callback) -> None:
    """Do the same without blocking the running loop, on which `on_late` is called."""
    import asyncio

    loop = asyncio.get_running_loop()
    called: asyncio.Future[None] = loop.create_future()

    def resolve() -> None:
        if not called.done():
            called.set_result(None)

    def wake() -> None:
        try:
            loop.call_soon_threadsafe(resolve)
        except RuntimeError:  # the loop was closed with the wait still going: nobody waits
            return

    register(wake)
    if deadline is None:
        await called
        return
    timer = loop.call_later(max(0.0, deadline - time.monotonic()), on_late)
    try:
        await called
    finally:
        timer.cancel()
