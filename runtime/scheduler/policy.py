"""In which order waiting requests run: one key per request on a heap; knows no pages.

A policy only prefers. Whatever it prefers, a request that has waited `max_wait_steps` goes first,
oldest first, so that nothing starves.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from umbel.lang.errors import EngineConfigError

from ..kv_cache import PrefixProbe, RadixNode
from ..request import Request

#: what the queue is ordered by, least first; tuples of one policy compare with each other
Key = tuple[Any, ...]


class QueueView(Protocol):
    """What a policy may ask about a request beside its own fields."""

    def waited(self, request: Request) -> int:
        """Return the steps since the request was queued."""

    def probe(self, request: Request) -> PrefixProbe:
        """Return how much of the request's row is in the cache now."""


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """An order of requests; `keys` maps some of them at once, as the best may depend on the rest.

    A dynamic policy's keys change while requests wait (with the cache or with time); the queue
    computes them anew from time to time. One that preempts has running requests make way for a
    waiting one of higher `priority`. One by program starts a fork's siblings together, and under
    pressure takes back all that a program runs.
    """

    name: str
    keys: Callable[[Sequence[Request], QueueView], list[Key]]
    is_dynamic: bool = False
    preempts: bool = False
    by_program: bool = False


def _static(
    name: str, key: Callable[[Request], Key], *, preempts: bool = False, by_program: bool = False
) -> SchedulingPolicy:
    return SchedulingPolicy(
        name,
        lambda requests, _: [key(r) for r in requests],
        preempts=preempts,
        by_program=by_program,
    )


def _longest_prefix_match(requests: Sequence[Request], view: QueueView) -> list[Key]:
    return [(-view.probe(r).num_tokens, r.request_id) for r in requests]


def _depth_first_by_weight(requests: Sequence[Request], view: QueueView) -> list[Key]:
    """Walk the cache's tree depth first, at each node into the child most requests wait under.

    Of equal ones it takes the one used last, and so finishes a subtree before the next.
    """
    paths: list[list[RadixNode]] = []
    for request in requests:
        node = view.probe(request).node
        paths.append([] if node is None else node.path())
    weights = Counter(node for path in paths for node in path)
    order = {node: i for i, node in enumerate(weights)}  # keeps the rest apart
    return [
        (tuple((-weights[n], -n.last_used, order[n]) for n in path), request.request_id)
        for path, request in zip(paths, requests, strict=True)
    ]


def _highest_response_ratio(requests: Sequence[Request], view: QueueView) -> list[Key]:
    keys: list[Key] = []
    for request in requests:
        service = 1 + max(0, request.limit - request.num_prompt)  # steps it may take
        keys.append((-(view.waited(request) + service) / service, request.request_id))
    return keys


def _shuffled(request: Request) -> Key:
    x = (request.request_id + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF  # splitmix64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ x >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (x ^ x >> 31, request.request_id)


def _by_program(request: Request) -> Key:
    """Finish old programs first; in one, what most depends on first, a fork's branches together."""
    return (request.arrival, request.depth, request.gang, request.node_id, request.request_id)


POLICIES: dict[str, SchedulingPolicy] = {
    policy.name: policy
    for policy in (
        _static("fcfs", lambda r: (r.request_id,)),
        SchedulingPolicy("lpm", _longest_prefix_match, is_dynamic=True),
        SchedulingPolicy("dfs-weight", _depth_first_by_weight, is_dynamic=True),
        _static("lof", lambda r: (r.num_prompt - r.limit, r.request_id)),
        SchedulingPolicy("hrrn", _highest_response_ratio, is_dynamic=True),
        _static("priority", lambda r: (-r.priority, r.request_id), preempts=True),
        _static("random", _shuffled),
        _static("program", _by_program, by_program=True),
    )
}


def get_policy(name: str) -> SchedulingPolicy:
    """Return a policy by name; raises EngineConfigError if there is none of that name."""
    if name not in POLICIES:
        raise EngineConfigError(
            f"scheduling policy {name!r} was asked for; there are {', '.join(sorted(POLICIES))}"
        )
    return POLICIES[name]


class WaitingQueue:
    """Waiting requests, by a policy's key and by age; both heaps skip entries that went stale.

    `now` counts steps and is set by the owner, as is `only`.
    """

    #: keys a dynamic policy may compute anew per step, on average
    REFRESH_PER_STEP = 64

    def __init__(
        self,
        policy: SchedulingPolicy,
        probe: Callable[[Request], PrefixProbe],
        max_wait_steps: int,
    ) -> None:
        self.policy = policy
        self.now = 0
        self.only: Sequence[Request] | None = None  # the head is the first of these that waits
        self.probe = probe
        self._max_wait_steps = max_wait_steps
        self._requests: dict[int, tuple[Request, int, int]] = {}  # id -> request, since, entry
        self._by_key: list[tuple[Key, int, int]] = []  # key, entry, request id
        self._by_age: list[tuple[int, int, int]] = []  # queued in step, entry, request id
        self._gangs: dict[str, dict[int, Request]] = {}
        self._entries = 0
        self._last_refresh = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._requests

    def requests(self) -> list[Request]:
        """Return the waiting requests, in no order that means anything."""
        return [request for request, _, _ in self._requests.values()]

    def gang(self, name: str) -> list[Request]:
        """Return the waiting requests of one fork."""
        return list(self._gangs.get(name, {}).values())

    def waited(self, request: Request) -> int:
        """Return the steps since the request was queued; 0 for one that is not."""
        entry = self._requests.get(request.request_id)
        return 0 if entry is None else self.now - entry[1]

    def push(self, request: Request, since: int | None = None) -> None:
        """Queue a request; `since` is the step it has waited from, if not now."""
        self._entries += 1
        entry, since = self._entries, self.now if since is None else since
        self._requests[request.request_id] = (request, since, entry)
        (key,) = self.policy.keys((request,), self)
        heapq.heappush(self._by_key, (key, entry, request.request_id))
        heapq.heappush(self._by_age, (since, entry, request.request_id))
        if request.gang:
            self._gangs.setdefault(request.gang, {})[request.request_id] = request

    def remove(self, request: Request) -> int:
        """Take a request out of the queue and return the step it was queued in."""
        since = self._requests.pop(request.request_id)[1]
        if request.gang:
            gang = self._gangs[request.gang]
            del gang[request.request_id]
            if not gang:
                del self._gangs[request.gang]
        if len(self._by_age) > 2 * len(self._requests) + 64:  # mostly stale
            self._rebuild()
        return since

    def head(self) -> Request | None:
        """Return the request to run next, without taking it out."""
        if self.only is not None:
            return next((request for request in self.only if request in self), None)
        aged = self._first(self._by_age)
        if aged is not None and self.now - aged[0] >= self._max_wait_steps:
            return self._requests[aged[2]][0]
        first = self._first(self._by_key)
        return None if first is None else self._requests[first[2]][0]

    def refresh(self) -> None:
        """Compute a dynamic policy's keys anew, once enough steps have paid for it."""
        steps = self.now - self._last_refresh
        if self.policy.is_dynamic and steps * self.REFRESH_PER_STEP >= len(self._requests) > 0:
            self._rebuild()

    def _rebuild(self) -> None:
        self._last_refresh = self.now
        waiting = list(self._requests.values())
        keys = self.policy.keys([request for request, _, _ in waiting], self)
        self._by_key = [
            (key, entry, request.request_id)
            for key, (request, _, entry) in zip(keys, waiting, strict=True)
        ]
        self._by_age = [(since, entry, request.request_id) for request, since, entry in waiting]
        heapq.heapify(self._by_key)
        heapq.heapify(self._by_age)

    def _first(self, heap: list[tuple[Any, int, int]]) -> tuple[Any, int, int] | None:
        while heap:
            top = heap[0]
            current = self._requests.get(top[2])
            if current is not None and current[2] == top[1]:
                return top
            heapq.heappop(heap)
        return None
