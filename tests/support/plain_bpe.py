"""Byte-pair encoding as its definition says, and texts that are hard for it: an oracle."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import regex
from hypothesis import strategies as st

from umbel.runtime.tokenizer_files import byte_alphabet

SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]

# Text that likes digits, white space, merges, and whole and broken spellings of special tokens.
# SmolLM2 has no tokens for six control characters and for bytes that only far planes have.
known = st.characters(
    max_codepoint=0x3FFFF,
    exclude_categories=["Cs"],
    exclude_characters="\x04\x06\x13\x14\x16\x1d",
)
fragments = st.one_of(
    st.text(known, max_size=4),
    st.sampled_from([*SPECIALS, "<|im_", "end|>", "the", " the", "in", "12", "  \n", "é\n", "🙂"]),
    st.integers().map(str),
)
texts = st.lists(fragments, max_size=8).map("".join)

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace("{1,3}", "")
SPLITS = {
    "smollm": [r"\p{N}", GPT2_WORDS],
    "gpt-2": [GPT2_WORDS],
    "llama-bpe": [LLAMA3_WORDS],
    "qwen2": [QWEN2_WORDS],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"],
}
HARD_TEXT = "In 2024, 1234567 x 3.14159 = ½ Ⅷ ٣٤\r\n\t  x's I'LL <=>12345 +1$2\n\n  end  "


def visible(text: str) -> str:
    chars = {byte: char for char, byte in byte_alphabet().items()}
    return "".join(chars[byte] for byte in text.encode())


def plain_bpe(text: str, patterns: Sequence[str], ranks: dict[tuple[str, ...], int]) -> list[str]:
    """Split by each pattern in turn, then merge the best pair of a word until there is none."""
    never = 1 << 60
    words = [text]
    for pattern in patterns:
        words = [piece for word in words for piece in regex.split(f"({pattern})", word) if piece]
    found: list[str] = []
    for word in words:
        parts = list(visible(word))
        while True:
            pairs = [(ranks.get(pair, never), i) for i, pair in enumerate(pairwise(parts))]
            rank, i = min(pairs, default=(never, 0))
            if rank == never:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        found += parts
    return found
