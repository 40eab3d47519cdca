"""Waits end when they are called back, from wherever, and say so when that is late."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from umbel.interpreter.waiting import Register, block, wait

Waits = Callable[[Register, float | None, Callable[[], None]], None]


def on_a_loop(register: Register, deadline: float | None, on_late: Callable[[], None]) -> None:
    asyncio.run(wait(register, deadline, on_late))


ways = pytest.mark.parametrize("waits", [block, on_a_loop])


def unexpected() -> None:
    raise AssertionError("it was not late")


@ways
@pytest.mark.parametrize("seconds", [None, 3600])
def test_a_wait_ends_whether_the_call_comes_at_once_or_from_another_thread(
    waits: Waits, seconds: float | None
) -> None:
    deadline = None if seconds is None else time.monotonic() + seconds
    waits(lambda call: call(), deadline, unexpected)
    waits(lambda call: threading.Thread(target=call).start(), deadline, unexpected)


@ways
def test_a_late_wait_is_told_once_and_ends_with_the_call(waits: Waits) -> None:
    calls: list[Callable[[], None]] = []
    late: list[str] = []

    def on_late() -> None:
        late.append("late")
        calls[0]()

    waits(calls.append, time.monotonic() - 1, on_late)
    assert late == ["late"]


def test_a_wait_on_a_loop_takes_a_second_call_and_one_after_the_loop_for_nothing() -> None:
    calls: list[Callable[[], None]] = []
    raised: list[object] = []

    def twice(call: Callable[[], None]) -> None:
        calls.append(call)
        call()
        call()

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
        await wait(twice, None, unexpected)

    asyncio.run(main())
    calls[0]()
    assert raised == []


def test_a_wait_that_is_cancelled_leaves_no_timer() -> None:
    async def main() -> None:
        waiting = asyncio.ensure_future(wait(lambda _: None, time.monotonic() + 0.02, unexpected))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        raised: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
        await asyncio.sleep(0.05)
        assert raised == []

    asyncio.run(main())
