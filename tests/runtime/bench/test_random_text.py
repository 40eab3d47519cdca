from __future__ import annotations

import pytest
from tests.support.engine_harness import TOKENIZER

from umbel.lang.errors import EngineConfigError
from umbel.runtime.bench.random_text import RandomText
from umbel.runtime.tokenizer import Tokenizer

LETTERS = "abcdefghijklmnopqrst"
BYTES = Tokenizer.byte_level(512)


@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_a_text_has_as_many_tokens_as_asked_for(num_tokens: int) -> None:
    text = RandomText(BYTES, 0).draw(num_tokens)
    assert len(BYTES.encode_text(text)) == num_tokens


def test_the_same_seed_gives_the_same_text() -> None:
    first, again, other = (RandomText(BYTES, seed).draw(50) for seed in (3, 3, 4))
    assert first == again != other


def test_words_are_drawn_where_the_tokenizer_has_them() -> None:
    pairs = [(" ", a) for a in LETTERS] + [("x", "y")] + [(" " + a, "xy") for a in LETTERS]
    tokenizer = Tokenizer.byte_level(512, merges=pairs)
    text = RandomText(tokenizer, 0).draw(200)
    assert set(text.split()) <= {a + "xy" for a in LETTERS}
    assert len(tokenizer.encode_text(text)) == 200


def test_a_tokenizer_that_merges_letters_is_refused() -> None:
    with pytest.raises(EngineConfigError, match="benchmark with another model"):
        RandomText(TOKENIZER, 0)
