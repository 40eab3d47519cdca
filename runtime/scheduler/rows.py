"""Which rows of a request may be needed, matched, and left in the cache; changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from ..request import Request


def max_rows(request: Request) -> int:
    """Return how many rows may need KV; the last sampled token needs none."""
    rows = len(request.token_ids)
    return rows if request.tree_parents else max(rows, request.limit - 1)


def max_match(request: Request) -> int:
    """Return how many rows may come from the cache: those that give logits may not."""
    if request.is_prefetch:
        return len(request.token_ids)
    return (request.num_context if request.has_private_rows else len(request.token_ids)) - 1


def computed_rows(request: Request) -> range:
    """Return the computed rows beside the cache that another request could use."""
    end = request.num_computed
    if request.tree_parents:
        end = min(end, request.num_context)
    return range(request.num_shared, end)


def rows_to_keep(request: Request, keep: Sequence[int]) -> Sequence[int]:
    """Return the rows of `keep` beside the cache, after a select's own context rows.

    Each must be computed and follow the one before it. A gen's are best given as a range: that is
    not walked.
    """
    shared, context = request.num_shared, request.num_context
    if isinstance(keep, range) and keep.step == 1 and not request.tree_parents:
        run = keep[max(0, shared - keep.start) :]
        assert not run or run.start == shared, "a row is kept without the row before it"
        assert not run or run.stop <= request.num_computed, "a row is kept but was never computed"
        return run
    rows = [row for row in keep if row >= shared]
    if not request.tree_parents:
        end = shared + len(rows)
        assert rows == list(range(shared, end)), "a row is kept without the row before it"
        assert end <= request.num_computed or not rows, "a row is kept but was never computed"
        return rows
    if rows:
        computed = min(context, request.num_computed)
        rows = [*range(shared, computed), *(row for row in rows if row >= context)]
    above = shared - 1
    for row in rows:
        parent = request.tree_parents[row - context] if row >= context else row - 1
        assert parent == above, f"row {row} is kept without the row before it"
        assert row < request.num_computed, f"row {row} is kept but was never computed"
        above = row
    return rows
