"""A pool that remembers which token path was written to each slot, and a loop that samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from umbel.runtime.kv_cache import PageAllocator, RadixCache, RadixNode
from umbel.runtime.request import Request
from umbel.runtime.scheduler import Batch, Scheduler, SchedulerLimits


class SequenceInputs(NamedTuple):
    """One sequence of a step: rows from `start` on are new."""

    start: int
    slots: list[int]
    path: list[int]  # a hash of each row's path


class SlotTruth:
    """Stands for the KV pool: computing a row writes a hash of its whole path to its slot."""

    def __init__(self) -> None:
        self.pool: dict[int, int] = {}
        self.num_rows = 0

    def forward(self, batch: Batch) -> None:
        """Compute a whole step: `run` right after the slots are known."""
        self.run(step_inputs(batch))

    def run(self, inputs: list[SequenceInputs]) -> None:
        """Write every new row, then read every row that the new ones see."""
        for start, slots, path in inputs:
            self.pool.update(zip(slots[start:], path[start:], strict=True))
            self.num_rows += len(slots) - start
        for _, slots, path in inputs:
            read = [self.pool.get(slot) for slot in slots]
            assert read == path, "a slot holds another row than the one it is read for"

    def break_down(self, inputs: list[SequenceInputs]) -> None:
        """Fail halfway: the slots of the step hold nothing that can be used."""
        for start, slots, _ in inputs:
            self.pool.update(dict.fromkeys(slots[start:], 0))


def step_inputs(batch: Batch) -> list[SequenceInputs]:
    """Copy what a step reads and writes, as a device has it while the host goes on."""
    return [
        SequenceInputs(s.start, s.request.slots[: s.end].tolist(), row_hashes(s.request, s.end))
        for s in batch.requests
    ]


def row_hashes(request: Request, end: int) -> list[int]:
    """Return a hash of the path (namespace, ancestors, own token) of each of the first rows."""
    root = hash((request.namespace,)) | 1
    hashes: list[int] = []
    for row in range(end):
        parent = row - 1
        if request.tree_parents and row >= request.num_context:
            parent = request.tree_parents[row - request.num_context]
        above = hashes[parent] if parent >= 0 else root
        hashes.append(hash((above, request.token_ids[row])) | 1)
    return hashes


def make_scheduler(num_slots: int = 4096, page_size: int = 1, **options: Any) -> Scheduler:
    """A scheduler on a fresh pool, with room for what a test does not look at."""
    bounds: dict[str, Any] = {"max_step_tokens": 64, "max_running": 16}
    bounds |= {f.name: options.pop(f.name) for f in fields(SchedulerLimits) if f.name in options}
    pool = PageAllocator(num_slots, page_size)
    return Scheduler(RadixCache(page_size), pool, SchedulerLimits(**bounds), **options)


def gen(request_id: int, token_ids: list[int], num_new: int = 2, **fields: Any) -> Request:
    """A gen of `num_new` tokens."""
    node: dict[str, Any] = {"program_id": request_id, "node_id": 0, "arrival": request_id}
    return Request(
        request_id=request_id,
        token_ids=list(token_ids),
        limit=len(token_ids) + num_new,
        **(node | fields),
    )


def run_step(
    scheduler: Scheduler,
    truth: SlotTruth,
    pins: Sequence[RadixNode] = (),
) -> Batch | None:
    """One step: what reaches its end gets token 7, or finishes at its limit."""
    batch = scheduler.schedule()
    scheduler.check(pins)
    if batch is None:
        return None
    truth.forward(batch)
    scheduler.complete(batch)
    scheduler.check(pins)
    for scheduled in batch.requests:
        request = scheduled.request
        if scheduled.reaches_end:
            if request.tree_parents:
                scheduler.finish(request, [])
                continue
            request.token_ids.append(7)
            if len(request.token_ids) >= request.limit:
                scheduler.finish(request, list(range(len(request.token_ids) - 1)))
    scheduler.check(pins)
    return batch


def run_all(scheduler: Scheduler, truth: SlotTruth, max_steps: int = 10_000) -> list[Batch]:
    """Step until nothing waits or runs."""
    batches: list[Batch] = []
    for _ in range(max_steps):
        batch = run_step(scheduler, truth)
        if batch is None:
            assert scheduler.num_running == scheduler.num_waiting == 0, (
                "work is left and nothing runs"
            )
            return batches
        batches.append(batch)
    raise AssertionError(f"work is left after {max_steps} steps")
