"""Programs that ask for squares, with a read and on a loop, and how batches of them are run."""

from __future__ import annotations

import asyncio
from typing import Any

import umbel as ub


@ub.function
def reader(s: ub.State, x: int) -> int:
    s += f"{x} squared is " + ub.gen("y", schema=int)
    return int(s["y"])


@ub.function
async def areader(s: ub.State, x: int) -> int:
    s += f"{x} squared is " + ub.gen("y", schema=int)
    return int(await s.get("y"))


def run(way: str, program: Any, rows: Any, **options: Any) -> list[Any]:
    """Run a batch from a thread ("sync") or on an event loop."""
    if way == "sync":
        found: list[Any] = program.run_batch(rows, **options)
        return found
    return asyncio.run(program.arun_batch(rows, **options))
