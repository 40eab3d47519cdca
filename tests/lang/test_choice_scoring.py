import math
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.lang.choice_scoring import draw, score_choices, softmax
from umbel.lang.ir import SelectMethod

Rows = list[list[float]]

CHOICES = ["A", "B", "C"]
CONDITIONAL = [
    [-0.10],
    [-0.10, -0.30],
    [-0.40, -0.10, -0.03, -0.01, -0.01, -0.01, -0.01, -0.01],
]
UNCONDITIONAL = [[0.0], [0.0, -1.40], [0.0, -0.10, -0.03, -0.01, -0.01, -0.01, -0.01, -0.01]]
IDS = [[0] * len(row) for row in CONDITIONAL]

METHODS: list[SelectMethod] = [
    "token_length_normalized",
    "greedy_token_selection",
    "unconditional_likelihood_normalized",
    "sum",
    "byte_normalized",
]

logprob = st.floats(-20, 0)
tables = st.lists(st.lists(logprob, min_size=1, max_size=6), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("method", "winner", "scores"),
    [
        ("token_length_normalized", 2, [-0.10, -0.20, -0.0725]),
        ("greedy_token_selection", 0, [0.0, -0.20, -0.30]),
        ("unconditional_likelihood_normalized", 1, [-0.10, 0.50, -0.05]),
        ("sum", 0, [-0.10, -0.40, -0.58]),
        ("byte_normalized", 0, [-0.10, -0.40, -0.58]),
    ],
)
def test_case_19_the_worked_table(method: SelectMethod, winner: int, scores: list[float]) -> None:
    best, table = score_choices(CHOICES, IDS, CONDITIONAL, method, UNCONDITIONAL)
    assert best == winner
    assert [row.score for row in table] == pytest.approx(scores)
    assert [row.mean for row in table] == pytest.approx([-0.100, -0.200, -0.0725])
    assert [row.choice for row in table] == CHOICES


def test_rule_11_the_first_unconditional_logprob_counts_as_zero() -> None:
    shifted = [[-9.0, *row[1:]] for row in UNCONDITIONAL]
    method: SelectMethod = "unconditional_likelihood_normalized"
    plain = score_choices(CHOICES, IDS, CONDITIONAL, method, UNCONDITIONAL)[1]
    other = score_choices(CHOICES, IDS, CONDITIONAL, method, shifted)[1]
    assert [row.score for row in other] == [row.score for row in plain]


def test_case_20_a_logprob_of_zero_is_counted_in_the_mean() -> None:
    best, table = score_choices(
        ["x", "y"], [[1, 2], [1]], [[-0.3, 0.0], [-0.2]], "token_length_normalized"
    )
    assert best == 0
    assert table[0].mean == pytest.approx(-0.15)


def test_rule_11_bytes_are_those_after_the_scored_context() -> None:
    rows = [[-1.0], [-1.0]]
    best, table = score_choices(["ab", "abcd"], [[1], [2]], rows, "byte_normalized")
    assert (best, [row.per_byte for row in table]) == (1, [-0.5, -0.25])
    best, table = score_choices(
        ["ab", "abcd"], [[1], [2]], rows, "byte_normalized", num_bytes=[4, 2]
    )
    assert (best, [row.per_byte for row in table]) == (0, [-0.25, -0.5])


@given(tables, st.sampled_from(METHODS))
def test_the_winner_has_the_highest_score_and_probabilities_are_its_softmax(
    rows: Rows, method: SelectMethod
) -> None:
    names = [str(i) for i in range(len(rows))]
    ids = [[0] * len(row) for row in rows]
    best, table = score_choices(names, ids, rows, method, rows)
    scores = [row.score for row in table]
    assert best == scores.index(max(scores))
    assert math.fsum(row.probability for row in table) == pytest.approx(1.0)
    assert [row.probability for row in table] == softmax(scores)


@given(tables, st.sampled_from(METHODS), st.randoms(use_true_random=False))
def test_the_order_of_choices_changes_no_score(
    rows: Rows, method: SelectMethod, random: Random
) -> None:
    names = [str(i) for i in range(len(rows))]
    order = list(range(len(rows)))
    random.shuffle(order)

    def scores(indices: Sequence[int]) -> dict[str, float]:
        chosen = [rows[i] for i in indices]
        ids = [[0] * len(row) for row in chosen]
        table = score_choices([names[i] for i in indices], ids, chosen, method, chosen)[1]
        return {row.choice: row.score for row in table}

    assert scores(order) == scores(range(len(rows)))


@given(tables, st.floats(0, 1, exclude_max=True), st.floats(0.1, 5))
def test_draw_is_the_inverse_of_the_cumulative_softmax(
    rows: Rows, u: float, temperature: float
) -> None:
    names = [str(i) for i in range(len(rows))]
    table = score_choices(names, [[0] * len(r) for r in rows], rows, "sum")[1]
    picked = draw(table, temperature, u)
    weights = softmax([row.score for row in table], temperature)
    assert math.fsum(weights[:picked]) <= u + 1e-9
    assert u < math.fsum(weights[: picked + 1]) + 1e-9
    assert draw(table, 0.0, u) == max(range(len(rows)), key=lambda i: (table[i].score, -i))


def test_impossible_choices_stay_impossible_and_never_make_nan() -> None:
    rows = [[-math.inf], [-1.0]]
    for method in METHODS:
        best, table = score_choices(["a", "b"], [[1], [2]], rows, method, [[0.0], [-math.inf]])
        assert best == 1
        assert table[1].probability == 1.0
    both = score_choices(["a", "b"], [[1], [2]], [[-math.inf], [-math.inf]], "sum")[1]
    assert [row.probability for row in both] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("choices", "ids", "rows", "says"),
    [
        ([], [], [], "no choices"),
        (["a"], [[1], [2]], [[0.0]], "as many rows"),
        (["a"], [[1, 2]], [[0.0]], "unequal length"),
        (["a"], [[1]], [[math.nan]], "not a number"),
    ],
)
def test_a_table_that_has_no_meaning_is_refused(
    choices: list[str], ids: list[list[int]], rows: Rows, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        score_choices(choices, ids, rows, "sum")


def test_a_method_without_what_it_needs_is_refused() -> None:
    with pytest.raises(ValueError, match="without context"):
        score_choices(["a"], [[1]], [[0.0]], "unconditional_likelihood_normalized")
    with pytest.raises(ValueError, match="unknown select method 'best'"):
        score_choices(["a"], [[1]], [[0.0]], "best")  # type: ignore[arg-type]
