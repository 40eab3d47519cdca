from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from umbel.lang.regex_syntax import NEVER
from umbel.runtime.grammar.byte_dfa import Budget, build_dfa
from umbel.runtime.grammar.number_ranges import integer_range

bounds = st.none() | st.integers(-1200, 1200) | st.integers(-(10**25), 10**25)


@given(bounds, bounds, st.lists(st.integers(-(10**25), 10**25), max_size=20))
def test_exactly_the_integers_between_the_bounds_match(
    low: int | None, high: int | None, samples: list[int]
) -> None:
    node = integer_range(low, high)
    near = [n + d for n in (low, high, 0) if n is not None for d in (-11, -10, -2, -1, 0, 1, 2, 10)]
    wide = [n * 10**k + d for n in (low, high) if n is not None for k in (1, 2) for d in (-1, 0, 9)]
    if node == NEVER:
        assert low is not None
        assert high is not None
        assert low > high
        return
    dfa = build_dfa(node, Budget())
    for number in {*near, *wide, *samples}:
        inside = (low is None or low <= number) and (high is None or number <= high)
        assert dfa.matches(str(number).encode()) == inside, number
        assert not dfa.matches(f"0{number}".encode())
        assert not dfa.matches(f"+{number}".encode())
    zero = (low is None or low <= 0) and (high is None or high >= 0)
    assert dfa.matches(b"-0") == zero
    for text in (b"", b"-", b"-00", b"1.0", b"1e2", b" 1"):
        assert not dfa.matches(text)
