from __future__ import annotations

import math
from typing import Any

import pytest

from umbel.lang.sampling_params import MAX_SHIFT, SamplingParams


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e31, -1e300])
@pytest.mark.parametrize(
    "name", ["frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"]
)
def test_what_would_leave_32_bits_is_refused_by_name(name: str, value: float) -> None:
    options: dict[str, Any] = {name: ((3, value),) if name == "logit_bias" else value}
    with pytest.raises(ValueError, match=name):
        SamplingParams(**options)


def test_a_token_id_is_a_place_in_a_vocabulary() -> None:
    with pytest.raises(ValueError, match="by token id, from 0 on"):
        SamplingParams(logit_bias=((-1, 1.0),))


def test_of_a_table_of_biases_the_entry_out_of_bounds_alone_is_named() -> None:
    table = (*((token_id, 0.5) for token_id in range(1000)), (1000, 1e31))
    with pytest.raises(ValueError, match=r"from 0 on, not 1000: 1e\+31$"):
        SamplingParams(logit_bias=table)


def test_the_widest_shifts_are_taken() -> None:
    SamplingParams(
        logit_bias=((0, -MAX_SHIFT), (1, MAX_SHIFT)),
        frequency_penalty=MAX_SHIFT,
        presence_penalty=-MAX_SHIFT,
        repetition_penalty=MAX_SHIFT,
    )
    SamplingParams(repetition_penalty=1 / MAX_SHIFT)
