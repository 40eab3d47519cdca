"""Who is about to compute what: lets a request wait for the prefill that it would repeat.

A prefill longer than its step registers its prefix chunk by chunk, in whole pages. A waiting
request that matches up to the end of the last chunk and needs the same page next is parked here,
out of the queue, until the prefill has registered all that the two share, or leaves.
"""

from __future__ import annotations

from typing import NamedTuple

from ..kv_cache import PageKey, RadixNode, page_key
from ..request import Request


class Parked(NamedTuple):
    """A request that waits for another's prefill."""

    shared: int  # rows it shares with that prefill
    since: int  # the step it was queued in
    request: Request


class Frontiers:
    """Where the running prefills go on, and who waits for them; knows neither queue nor slots."""

    def __init__(self, page_size: int = 1) -> None:
        self._page_size = page_size
        self._at: dict[tuple[RadixNode, PageKey], Request] = {}  # (node, next page) -> the prefill
        self._keys: dict[int, tuple[RadixNode, PageKey]] = {}
        self._parked: dict[int, list[Parked]] = {}  # by the prefill's request id
        self.num_parked = 0

    def ahead(
        self, request: Request, node: RadixNode | None = None, num_shared: int = 0
    ) -> Request | None:
        """Return the prefill that is to compute the page after what a request shares.

        `node` and `num_shared` say what a request that does not run yet would share.
        """
        if node is None:
            node, num_shared = request.cache_node, request.num_shared
        if node is None or num_shared + self._page_size > len(request.token_ids):
            return None
        return self._at.get((node, page_key(request.token_ids, num_shared, self._page_size)))

    def park(self, request: Request, since: int, ahead: Request, limit: int) -> None:
        """Keep a request until `ahead` has registered what they share of its first `limit` rows."""
        shared = min(limit, ahead.num_context, common_length(request, ahead))
        shared -= shared % self._page_size
        self._parked.setdefault(ahead.request_id, []).append(Parked(shared, since, request))
        self.num_parked += 1

    def advance(self, request: Request) -> list[Parked]:
        """Note how far a prefill has registered its row; return who need not wait any more.

        Where two prefills meet, the first to come stays ahead.
        """
        self._forget(request)
        at, node = request.num_shared, request.cache_node
        if node is None or at + self._page_size > request.num_context or self.ahead(request):
            return self._take(request, at, everyone=True)
        key = (node, page_key(request.token_ids, at, self._page_size))
        self._at[key] = request
        self._keys[request.request_id] = key
        return self._take(request, at)

    def leave(self, request: Request) -> list[Parked]:
        """Forget a request that runs no longer; return who waited for it."""
        self._forget(request)
        return self._take(request, 0, everyone=True)

    def unpark(self, request: Request) -> None:
        """Forget a request that waits here, if it does."""
        for ahead, parked in self._parked.items():
            left = [entry for entry in parked if entry.request is not request]
            if len(left) < len(parked):
                self._set(ahead, left)
                self.num_parked -= 1
                return

    def parked(self) -> list[tuple[int, Request]]:
        """Return (request id of the prefill, the request that waits for it)."""
        return [(a, entry.request) for a, entries in self._parked.items() for entry in entries]

    def check(self, running: dict[int, Request]) -> None:
        """Assert that every frontier is where its request is, and that nobody waits in vain."""
        assert sum(map(len, self._parked.values())) == self.num_parked, "num_parked is wrong"
        assert len(self._at) == len(self._keys), "two frontiers of one request"
        for ahead, parked in self._parked.items():
            assert ahead in self._keys, "a request waits for one that is not prefilling"
            at = running[ahead].num_shared
            assert all(entry.shared > at for entry in parked), "a request waits in vain"
        size = self._page_size
        for (node, key), request in self._at.items():
            at = request.num_shared
            assert running.get(request.request_id) is request, "a frontier of a request that left"
            assert request.cache_node is node, "a frontier is not where its request is"
            assert len(request.slots) < at + size, "a frontier behind pages of its own"
            assert page_key(request.token_ids, at, size) == key, "a frontier goes elsewhere"

    def _forget(self, request: Request) -> None:
        key = self._keys.pop(request.request_id, None)
        if key is not None:
            del self._at[key]

    def _take(self, ahead: Request, at: int, *, everyone: bool = False) -> list[Parked]:
        parked = self._parked.get(ahead.request_id)
        if parked is None:
            return []
        left = [] if everyone else [entry for entry in parked if entry.shared > at]
        self._set(ahead.request_id, left)
        self.num_parked -= len(parked) - len(left)
        return [entry for entry in parked if everyone or entry.shared <= at]

    def _set(self, ahead: int, parked: list[Parked]) -> None:
        if parked:
            self._parked[ahead] = parked
        else:
            del self._parked[ahead]


def common_length(first: Request, second: Request) -> int:
    """Return how many leading tokens two rows share, by comparing ever smaller slices."""
    a, b = first.token_ids, second.token_ids
    high = min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    low = 0  # equal before low; a difference before high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
