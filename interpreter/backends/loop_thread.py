"""One thread with one asyncio loop, for all runs of a backend that talks over a network.

Knows no protocol and no session: who owns it says how to fail what is open and to close a client.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from umbel.lang.errors import BackendError

from .own_process import OwnProcess


class LoopThread:
    """Runs commands on its loop until it is closed; started when it is made.

    `backend` is the name for errors. `closed_error` makes the error of a command that comes too
    late. When it is closed, `fail_open` is called on the loop to fail what has not ended; then all
    tasks are cancelled and awaited, and `close_client` is. The loop's helper threads come from
    `executor`, if one is given.
    """

    def __init__(
        self,
        name: str,
        *,
        backend: str,
        closed_error: Callable[[], BackendError],
        fail_open: Callable[[], None],
        close_client: Callable[[], Awaitable[None]],
        executor: ThreadPoolExecutor | None = None,
    ) -> None:
        self._process = OwnProcess(backend)
        self._closed_error = closed_error
        self._fail_open = fail_open
        self._close_client = close_client
        self._is_closed = False
        self._lock = threading.Lock()  # a command is queued before the last one, or refused
        self.loop = asyncio.new_event_loop()
        if executor is not None:
            self.loop.set_default_executor(executor)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, command: Callable[[], object]) -> None:
        """Run a command on the loop, from any thread; raises `closed_error` once closed.

        Raises BackendError in a fork of the loop's process.
        """
        self._process.check()
        with self._lock:
            if self._is_closed:
                raise self._closed_error()
            self.loop.call_soon_threadsafe(command)

    def close(self) -> None:
        """End all that runs, and wait for it unless called on the loop itself. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self.loop.call_soon_threadsafe(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def _stop(self) -> None:
        self._fail_open()
        self._stopping = self.loop.create_task(self._finish())  # the loop holds tasks weakly

    async def _finish(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._close_client()
        await self.loop.shutdown_asyncgens()
        await self.loop.shutdown_default_executor()
        self.loop.stop()
