"""The scheduler's decision for one forward pass, frozen."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ..request import Request


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Rows [start, end) of one request are computed in this pass; their slots are allocated.

    One is made for each request in each step: a Struct takes a tenth of a frozen dataclass's time.
    """

    request: Request
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Rows computed for this request."""
        return self.end - self.start

    @property
    def reaches_end(self) -> bool:
        """Whether the pass gives logits to sample from."""
        return self.end == len(self.request.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """What runs in one pass. Rows with one pending token that were sampled before come first."""

    requests: tuple[ScheduledRequest, ...]
    num_decodes: int  # the first so many requests compute one sampled token each

    @property
    def num_tokens(self) -> int:
        """Rows computed in the pass."""
        return self.num_decodes + sum(r.num_tokens for r in self.requests[self.num_decodes :])
