"""What a refusal advises is true."""

from __future__ import annotations

import pytest

import umbel as ub
from umbel.interpreter.backends.base import Capabilities
from umbel.interpreter.backends.local import LocalBackend
from umbel.interpreter.capability_check import check_op
from umbel.lang.ir import Gen

NOTHING = Capabilities(roles=False, n_samples=False, join_append=False)
WANTS = {
    "regex": ub.gen(regex="a+"),
    "schema": ub.gen(schema=list[int]),
    "grammar": ub.gen(grammar='start: "a"'),
    "choices": ub.gen(choices=["a", "b"]),
    "n > 1": ub.gen(n=2),
    "heal": ub.gen(heal=True),
    "thinking": ub.gen(thinking=True),
    "logprobs": ub.gen(logprobs=True),
    "prompt_logprobs": ub.gen(prompt_logprobs=True),
    "seed": ub.gen(seed=1),
    "stop_regex": ub.gen(stop_regex="a"),
}


def refusal(op: Gen, capabilities: Capabilities) -> ub.UnsupportedFeatureError | None:
    try:
        check_op(op, "some", capabilities)
    except ub.UnsupportedFeatureError as error:
        return error
    return None


@pytest.mark.parametrize("feature", WANTS)
def test_a_local_model_is_advised_for_exactly_what_it_honours(feature: str) -> None:
    op = WANTS[feature].op(None)
    refused = refusal(op, NOTHING)
    assert refused is not None
    assert refused.feature == feature
    is_honoured = refusal(op, LocalBackend.capabilities) is None
    assert ("local model" in refused.hint) == is_honoured
    assert ("no backend" in refused.hint) != is_honoured
