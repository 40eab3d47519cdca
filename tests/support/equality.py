"""Equal outputs with real arithmetic: the same ids, but where the model itself was undecided."""

from __future__ import annotations

from tests.support.engine_harness import Collector

from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Gen, Select
from umbel.lang.results import ChoiceScore, NodeResult, Sample, TokenLogprob

MARGIN = 1e-4  # rule 16: below it, the order of two logits is the order of rounding errors


def assert_same_outcome(graph: RequestGraph, a: Collector, b: Collector) -> bool:
    """Compare two greedy runs node by node; return whether they agree to the end.

    Gens must ask for the two best log-probabilities. The first difference must be a tie within
    `MARGIN`; what follows it may differ and is not compared.
    """
    assert a.errors == b.errors
    for node in graph.nodes:
        if node.id in a.errors:
            continue
        one, two = a.results[node.id], b.results[node.id]
        if isinstance(node.op, Gen):
            if not _same_samples(node.address, one, two):
                return False
        elif isinstance(node.op, Select):
            if one.text != two.text:
                gap = _gap(one.scores, one.text, two.text)
                assert gap < MARGIN, f"{node.address} chose apart by {gap}"
                return False
        else:
            assert one.text == two.text, node.address
    return True


def _same_samples(address: str, one: NodeResult, two: NodeResult) -> bool:
    for left, right in zip(one.samples, two.samples, strict=True):
        _assert_same_scores(address, left.prompt_logprobs, right.prompt_logprobs)
        if left.token_ids == right.token_ids:
            assert (left.text, left.finish_reason, left.num_kept) == (
                right.text,
                right.finish_reason,
                right.num_kept,
            )
            continue
        at = _first_difference(left, right)
        top = left.logprobs[at].top
        gap = top[0][1] - top[1][1]
        assert gap < MARGIN, f"{address} differs at token {at}, decided by {gap}"
        return False
    return True


def _assert_same_scores(
    address: str, left: tuple[TokenLogprob, ...], right: tuple[TokenLogprob, ...]
) -> None:
    """Compare two scores of one prompt; alternatives must agree in their log-probabilities."""
    assert [t.token_id for t in left] == [t.token_id for t in right], address
    for one, two in zip(left, right, strict=True):
        assert abs(one.logprob - two.logprob) < MARGIN, address
        tops = zip(one.top, two.top, strict=True)
        assert all(abs(a - b) < MARGIN for (_, a), (_, b) in tops), address


def _first_difference(left: Sample, right: Sample) -> int:
    pairs = zip(left.token_ids, right.token_ids, strict=False)
    return next(i for i, (x, y) in enumerate(pairs) if x != y)


def _gap(table: tuple[ChoiceScore, ...], one: str, two: str) -> float:
    scores = {row.choice: row.score for row in table}
    return abs(scores[one] - scores[two])
