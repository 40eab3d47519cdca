"""The least prefill of a set of runs, from their texts and kept ids alone: nodes of a trie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tests.support.engine_harness import Collector

from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Branch, Gen, Join, RoleEnd, RoleStart, Select, Text
from umbel.runtime.token_row import RowBuilder, TokenRow
from umbel.runtime.tokenizer import Tokenizer

Prefix = tuple[int, ...]


class Bound(NamedTuple):
    """What has to be prefilled. `repeats` counts prompts that lie whole in another row."""

    least: int
    repeats: int  # each may need its last row again, for its logits


def least_prefill(
    tokenizer: Tokenizer, graphs: Sequence[RequestGraph], runs: Sequence[Collector]
) -> Bound:
    """Return the trie's nodes over all rows, without those that decoding computes anyway.

    The rows are rebuilt from results: a gen's prompt and what it sampled but for the last token
    (whose KV nothing needs until something follows), a select's scored context.
    """
    builder = RowBuilder(tokenizer)
    prompts: set[Prefix] = set()
    decoded: set[Prefix] = set()
    whole: list[Prefix] = []
    for graph, run in zip(graphs, runs, strict=True):
        rows: dict[int | None, TokenRow] = {None: TokenRow()}
        for node in graph.nodes:
            row, result = rows[node.parent], run.results[node.id]
            match node.op:
                case Gen():
                    prompt = builder.encode(row)
                    sample = result.samples[0]
                    _add(prompts, prompt, 0)
                    whole.append(tuple(prompt))
                    _add(decoded, [*prompt, *sample.token_ids[:-1]], len(prompt))
                    row = builder.append_sample(row, sample)
                case Select(choices=choices):
                    encoded = [builder.encode(row, then=choice) for choice in choices]
                    context = _common_prefix(encoded)
                    _add(prompts, context, 0)
                    whole.append(tuple(context))
                    winner = builder.encode(row, then=result.text)
                    _add(decoded, winner, len(context))  # its tree rows, counted apart
                    row = builder.freeze(row, winner, result.text)
                case RoleStart(role=role):
                    row = builder.start_role(row, role)
                case RoleEnd():
                    row = builder.end_role(row)
                case Text() | Join():
                    row = builder.append_text(row, result.text)
                case Branch():
                    pass
            rows[node.id] = row
    inner = decoded.union(*({row[:end] for end in range(len(row))} for row in whole))
    ends = Counter(whole)
    repeats = sum(n if row in inner else n - 1 for row, n in ends.items())
    return Bound(len(prompts - decoded), repeats)


def _add(prefixes: set[Prefix], row: Sequence[int], start: int) -> None:
    prefixes.update(tuple(row[: end + 1]) for end in range(start, len(row)))


def _common_prefix(rows: Sequence[Sequence[int]]) -> list[int]:
    common: list[int] = []
    for column in zip(*rows, strict=False):
        if len(set(column)) > 1:
            break
        common.append(column[0])
    return common
