"""Finds what of the running requests can go on, and who makes way where not all of them fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..request import Request
from .admission import Admission
from .policy import Key, WaitingQueue
from .room import Room


class Work(NamedTuple):
    """What runs and has rows to compute."""

    decodes: list[Request]  # one sampled row each, in the order of their turns
    prefills: list[Request]  # what else has rows left, in the policy's order


class Pressure:
    """Names who has to make way; takes nothing from anyone itself.

    The greatest of `keys` goes first: the first request of a policy's order makes way for none.
    """

    def __init__(
        self,
        room: Room,
        queue: WaitingQueue,
        admission: Admission,
        running: Mapping[int, Request],
        keys: Mapping[int, Key],
        budget: int,
    ) -> None:
        self._room = room
        self._queue = queue
        self._admission = admission
        self._running = running
        self._keys = keys
        self._budget = budget

    def work(self) -> Work | None:
        """Return what can go on; None if some must make way first.

        Every decode of the next step needs a slot; without one, some prefill must have room.
        """
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self._running.values():
            computed = request.num_computed
            pending = len(request.token_ids) - computed
            if pending == 1 and computed >= request.num_context and not request.has_private_rows:
                decodes.append(request)
            elif pending > 0:
                prefills.append(request)
        growing = decodes[: self._budget]
        pages = len(growing)
        if self._room.page_size > 1:
            pages = sum(not self._room.num_left(request) for request in growing)
        if not growing and prefills:
            pages = min(not self._room.num_left(request) for request in prefills)
        if pages * self._room.page_size > self._room.available_to(len(self._running)):
            return None
        prefills.sort(key=lambda r: self._keys[r.request_id])
        return Work(decodes, prefills)

    def tail(self) -> Request:
        """Return the running request that is the first to make way."""
        return max(self._running.values(), key=lambda r: self._keys[r.request_id])

    def takes_programs(self) -> bool:
        """Whether a whole program makes way: where the policy knows programs, and others run."""
        programs = {request.program_id for request in self._running.values()}
        return self._queue.policy.by_program and len(programs) > 1

    def preempted(self) -> Request | None:
        """Return who makes way for a waiting request of higher priority that does not fit."""
        head = self._queue.head() if self._queue.policy.preempts else None
        if head is None or not self._running:
            return None
        victim = self.tail()
        if victim.priority >= head.priority or self._admission.may_start(head):
            return None
        return victim
