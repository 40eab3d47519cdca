"""Large vocabularies to benchmark grammars on: made up, or a tokenizer's own.

A made-up one has the shape of those that models have (lengths, scripts, digits, JSON's marks), not
their words. Knows no grammar.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

from umbel.lang.errors import ModelLoadError

from ..model_store import resolve
from ..models.gguf_file import GGUFFile
from ..tokenizer import Tokenizer
from ..vocabulary import Vocabulary

_MARKS = "{}[]()<>\"':;,.!?+-*/=_&|%$#@~^`\\"
_SYLLABLES = [a + b + c for a in "bcdfglmnprstvw" for b in "aeiou" for c in ("", "n", "r", "s")]
_SCRIPTS = (
    (0x0430, 0x044F),
    (0x03B1, 0x03C9),
    (0x05D0, 0x05EA),
    (0x0627, 0x064A),
    (0x4E00, 0x9000),
)
_LONGEST = 24  # bytes of a word; real vocabularies have few beyond
_LEAST_SIZE = 2048


def load_vocabulary(reference: str) -> Vocabulary:
    """Return a model's vocabulary: a folder with a tokenizer.json, a GGUF file, an alias.

    Raises ModelLoadError.
    """
    if (Path(reference) / "tokenizer.json").is_file():
        return Tokenizer.from_folder(Path(reference)).vocabulary()
    files = resolve(reference)
    if files.kind == "dummy":
        raise ModelLoadError(f"{reference!r} has no tokenizer of its own: name a real model")
    if files.kind == "gguf":
        return Tokenizer.from_gguf(GGUFFile(files.path)).vocabulary()
    return Tokenizer.from_folder(files.path).vocabulary()


def made_up_vocabulary(size: int, seed: int = 0) -> Vocabulary:
    """Return a vocabulary of `size` ids, whose tokenizer takes the longest token that fits.

    Id 0 is EOS. Then come the bytes, JSON's marks and their pairs, digits up to three, blanks; the
    rest are words of made-up syllables, four in five with a blank before them or a capital, and
    pieces of five other scripts, among them cut characters.
    """
    if size < _LEAST_SIZE:
        raise ValueError(f"a made-up vocabulary has at least {_LEAST_SIZE} ids, not {size}")
    tokens: dict[bytes, None] = dict.fromkeys(bytes([i]) for i in range(256))
    for token in itertools.chain(_plain(), _words(random.Random(seed))):
        if len(tokens) == size - 1:
            break
        tokens[token] = None
    token_bytes = (b"", *tokens)
    ids = {data: i for i, data in enumerate(token_bytes) if data}
    longest = max(map(len, ids))

    def encode(text: str) -> list[int]:
        data, at, found = text.encode(), 0, []
        while at < len(data):
            end = next(e for e in range(min(len(data), at + longest), at, -1) if data[at:e] in ids)
            found.append(ids[data[at:end]])
            at = end
        return found

    return Vocabulary(token_bytes, frozenset({0}), (0,), size, encode)


def _plain() -> Iterator[bytes]:
    for pair in itertools.product(_MARKS, repeat=2):
        yield "".join(pair).encode()
    for text in ('": "', '", "', '": ', '",\n', '"},', '"},\n', '": [', '": {', '"]', '":"', '","'):
        yield text.encode()
    for length in (2, 3):
        yield from (
            "".join(digits).encode() for digits in itertools.product("0123456789", repeat=length)
        )
    for length in range(2, 64):
        yield from (b" " * length, b"\n" + b" " * length)
    yield from (b"\t" * length for length in range(1, 16))


def _words(rng: random.Random) -> Iterator[bytes]:
    while True:
        if rng.random() < 0.2:
            first, last = rng.choice(_SCRIPTS)
            data = "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 4))).encode()
            yield data if rng.random() < 0.9 else data[:-1]
            continue
        word = "".join(rng.choices(_SYLLABLES, k=rng.choice((1, 2, 2, 3, 3, 4))))[:_LONGEST]
        form = rng.random()
        if form < 0.3:
            word = word.capitalize()
        elif form < 0.35:
            word = word.upper()
        yield (word if rng.random() < 0.4 else " " + word).encode()
