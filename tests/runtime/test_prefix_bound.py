from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from umbel.runtime.prefix_bound import PrefixBound

ROWS = st.tuples(
    st.booleans(), st.sampled_from(["", "other"]), st.lists(st.integers(0, 2), max_size=6)
)


@given(st.lists(ROWS, max_size=12))
def test_prompts_cost_the_prefixes_that_no_row_had_before(
    rows: list[tuple[bool, str, list[int]]],
) -> None:
    bound = PrefixBound()
    seen: set[tuple[str, tuple[int, ...]]] = set()
    least = total = 0
    for is_prompt, namespace, tokens in rows:
        prefixes = {(namespace, tuple(tokens[: i + 1])) for i in range(len(tokens))}
        if is_prompt:
            bound.add_prompt(namespace, tokens)
            least += len(prefixes - seen)
            total += len(tokens)
        else:
            bound.add_computed(namespace, tokens)
        seen |= prefixes
    assert (bound.least_prefill, bound.prompt_tokens) == (least, total)


def test_a_long_row_is_as_long_as_it_is() -> None:
    bound = PrefixBound()
    bound.add_prompt("", [49_151] * 20_000)
    bound.add_prompt("", [49_151] * 20_001)
    bound.add_prompt("", [49_150] * 20_000)
    assert bound.least_prefill == 40_001
