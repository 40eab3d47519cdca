"""Text to token ids and back, special tokens from trusted text only; knows no model weights."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers.normalizers import NFC

from umbel.lang.errors import ModelLoadError, ProgramError

from .chat_template import ChatTemplate
from .model_store import ModelFiles
from .models.gguf_file import GGUFFile
from .text_pieces import PIECE_LENGTH, PieceCache, TextPieces
from .tokenizer_files import (
    SpecialToken,
    TokenizerParts,
    byte_level_parts,
    read_dummy,
    read_folder,
    read_gguf,
)
from .vocabulary import Vocabulary

# A tokenizer that changes one of these would break token healing, stops and constraints.
_ROUND_TRIPS = ("a", " a", "a ", "  a\n\n b\t", "1234 5.6", "naïve 漢字 🙂", "x\r\n")

# What is kept of the ids of literal text: 64 MiB at most, at 36 bytes each. Short texts, of which
# no end of different ones may come, are bounded by their number.
_MAX_CACHED_PIECES = 4096
_MAX_CACHED_IDS = 1_800_000

# A text of so many characters is encoded without the interpreter's lock, which the tokenizer would
# hold for tens of microseconds: a burst of prompts kept the engine's thread from its launches.
_MIN_UNLOCKED = 256

# Below these, encoding everything anew costs less than looking for a place to cut.
_MIN_CUT = 64
_MIN_THENS = 4


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a literal run. Only trusted text (a template's) may spell special tokens."""

    text: str
    trusted: bool


class Tokenizer:
    """A byte-exact tokenizer: the bytes of the ids of a text are the text.

    `template` replaces the model's own chat template; an empty one switches chat off. Raises
    ModelLoadError where a part is missing or can't be honoured.
    """

    def __init__(self, parts: TokenizerParts, template: str | None = None) -> None:
        self._backend = parts.backend
        self._pieces = TextPieces(parts.backend)
        # a row is encoded by its client, at its gen's start and at its end, by every branch of a
        # fork, and its beginning by every row of a batch: what they share is then known
        self._encode = PieceCache(
            self._encode_anew, max_pieces=_MAX_CACHED_PIECES, max_ids=_MAX_CACHED_IDS
        ).encode
        self.token_bytes: tuple[bytes, ...] = parts.token_bytes
        self._most_chars = _most_chars(parts)
        self.vocab_size = parts.vocab_size
        self.bos_id = parts.bos_id
        self.add_bos = parts.add_bos
        self.special_ids = frozenset(token.id for token in parts.special_tokens)
        self._special = {token.content: token.id for token in parts.special_tokens}
        self._special_pattern = _special_pattern(parts.special_tokens)
        single = {token for token in parts.token_bytes if len(token) == 1}
        self._known_bytes = b"".join(single)
        self._knows_all_bytes = len(single) == 256
        for text in _ROUND_TRIPS:
            if self.decode(self.encode_text(text)) != text:
                raise ModelLoadError(
                    f"the tokenizer gives {self.decode(self.encode_text(text))!r} back for "
                    f"{text!r}: umbel needs one that keeps every byte"
                )
        source = parts.template_source if template is None else template
        self.chat_template = (
            ChatTemplate(source, parts.template_variables) if source and source.strip() else None
        )
        self.end_of_turn_id = self._find_end_of_turn()
        self.eos_ids: tuple[int, ...] = parts.eos_ids
        if self.end_of_turn_id is not None and self.end_of_turn_id not in self.eos_ids:
            self.eos_ids += (self.end_of_turn_id,)
        if not self.eos_ids:
            raise ModelLoadError(
                "the model names no token that ends a text (eos_token_id in its metadata or in "
                "generation_config.json)"
            )
        self._vocabulary = Vocabulary(
            token_bytes=self.token_bytes,
            special_ids=self.special_ids,
            eos_ids=self.eos_ids,
            size=self.vocab_size,
            encode=self.encode_text,
        )

    @classmethod
    def from_model(cls, files: ModelFiles, template: str | None = None) -> Tokenizer:
        """Load the tokenizer of a resolved model, whatever its kind."""
        match files.kind:
            case "gguf":
                return cls.from_gguf(GGUFFile(files.path), template)
            case "folder":
                return cls.from_folder(files.path, template)
            case "dummy":
                return cls(read_dummy(files.path), template)

    @classmethod
    def from_gguf(cls, file: GGUFFile, template: str | None = None) -> Tokenizer:
        """Load the tokenizer in a GGUF file's metadata."""
        return cls(read_gguf(file), template)

    @classmethod
    def from_folder(cls, folder: str | Path, template: str | None = None) -> Tokenizer:
        """Load tokenizer.json from a folder in Hugging Face form."""
        return cls(read_folder(Path(folder)), template)

    @classmethod
    def byte_level(
        cls,
        vocab_size: int,
        merges: Sequence[tuple[str, str]] = (),
        *,
        add_bos: bool = False,
        template: str | None = None,
    ) -> Tokenizer:
        """Make a tokenizer without files: ids 0 to 255 are bytes, then come three special tokens.

        These are <|endoftext|> (256: BOS and EOS), <|im_start|> and <|im_end|>, with a ChatML
        template. Each merge, such as ("t", "he"), adds a token; there are no words, so merges
        reach over spaces. Ids from there to `vocab_size` are padding.
        """
        return cls(byte_level_parts(vocab_size, merges, add_bos), template)

    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary as bytes; always the same object."""
        return self._vocabulary

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of plain text; text that spells a special token stays text.

        Raises ProgramError for text that the vocabulary has no tokens for.
        """
        if len(text) <= 2 * PIECE_LENGTH:
            return list(self._encode(text))
        ids: list[int] = []
        for piece in self._pieces.split(text):
            ids += self._encode(piece)
        return ids

    def fewest_ids(self, num_chars: int) -> int:
        """Return a number of ids that no text of so many characters has less than."""
        return 0 if self._most_chars is None else num_chars // self._most_chars

    def _encode_anew(self, text: str) -> tuple[int, ...]:
        try:
            ids = self._backend_ids(text)
        except TypeError as error:  # the only str that tokenizers can't take
            raise ProgramError(
                f"text holds a lone surrogate, which is no character: {text[:40]!r}"
            ) from error
        if not self._knows_all_bytes:  # the encoder would drop such bytes without a word
            unknown = text.encode().translate(None, self._known_bytes)
            if unknown:
                raise ProgramError(
                    f"the model's vocabulary has no token for the byte 0x{unknown[0]:02x} of "
                    f"{_spell(text, unknown[0])}: leave the character out"
                )
        return tuple(ids)

    def _backend_ids(self, text: str) -> list[int]:
        if len(text) < _MIN_UNLOCKED:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        else:  # a batch of one lets other threads run meanwhile
            ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode_run(self, segments: Iterable[Segment]) -> list[int]:
        """Return the ids of a literal run, the same for every grouping of the same text.

        Trusted text is split at special tokens; between them all text, trusted or not, is encoded
        as a whole. A special token that spans trusted and untrusted text is text.
        """
        ids: list[int] = []
        for stretch in self._stretches(segments):
            if isinstance(stretch, str):
                ids.extend(self.encode_text(stretch))
            else:
                ids.append(stretch)
        return ids

    def encode_run_then(self, segments: Iterable[Segment], thens: Sequence[str]) -> list[list[int]]:
        """Return the ids of a literal run with each of many texts after it, which no one trusts.

        The same ids as `encode_run` gives for each, but the run's beginning is encoded once.
        """
        stretches = self._stretches(segments)
        tail = stretches.pop() if stretches and isinstance(stretches[-1], str) else ""
        assert isinstance(tail, str)
        head: list[int] = []
        for stretch in stretches:
            head += self.encode_text(stretch) if isinstance(stretch, str) else [stretch]
        cut = self._safe_cut(tail, thens)
        head += self.encode_text(tail[:cut]) if cut else []
        end = tail[cut:]
        return [head + (self.encode_text(end + then) if end or then else []) for then in thens]

    def _stretches(self, segments: Iterable[Segment]) -> list[int | str]:
        """Split a run at the special tokens of its trusted text; between them is text."""
        stretches: list[int | str] = []
        texts: list[str] = []

        def flush() -> None:
            if text := "".join(texts):
                stretches.append(text)
            texts.clear()

        for text, trusted in _merge(segments):
            if not trusted or self._special_pattern is None:
                texts.append(text)
                continue
            at = 0
            for found in self._special_pattern.finditer(text):
                texts.append(text[at : found.start()])
                flush()
                spelled = found.group()
                token_id = self._special.get(spelled)
                stretches.append(self._special[spelled.strip()] if token_id is None else token_id)
                at = found.end()
            texts.append(text[at:])
        flush()
        return stretches

    def _safe_cut(self, text: str, thens: Sequence[str]) -> int:
        """Return where `text` can be cut so that what follows can't change the ids before; or 0.

        Where the tokenizer splits text into words, ids never reach over a border of two words,
        and what a word is depends on little of what follows: here on less than two changes of
        the kind of character. So the last border with that much text behind it is safe. The
        first and the longest text are encoded whole to make sure.
        """
        words, normalizer = self._backend.pre_tokenizer, self._backend.normalizer
        if words is None or len(text) < _MIN_CUT or len(thens) < _MIN_THENS:
            return 0
        # composing changes nothing of composed text but its very end
        composes = isinstance(normalizer, NFC) and unicodedata.is_normalized("NFC", text)
        if normalizer is not None and not composes:
            return 0
        self.encode_text(text)  # refuses what has no tokens
        borders = {start for _, (start, _) in words.pre_tokenize_str(text)}
        num_changes = 0
        for at in range(len(text) - 1, 0, -1):
            if _kind(text[at - 1]) == _kind(text[at]):
                continue
            if num_changes >= 2 and at in borders:
                break
            num_changes += 1
        else:
            return 0
        for added in self._backend.get_added_tokens_decoder().values():
            # such a token is found before the words are: it may begin here and end in what follows
            starts = range(max(0, len(text) - len(added.content)), at)
            if any(added.content.startswith(text[start:]) for start in starts):
                return 0
        head = self.encode_text(text[:at])
        probes = (thens[0], max(thens, key=len))
        is_safe = all(
            self.encode_text(text + then) == head + self.encode_text(text[at:] + then)
            for then in probes
        )
        return at if is_safe else 0

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; special and padding ids have none, broken UTF-8 is U+FFFD."""
        size = len(self.token_bytes)
        return b"".join([self.token_bytes[i] for i in ids if i < size]).decode("utf-8", "replace")

    def special_id(self, content: str) -> int | None:
        """Return the id of the special token with this spelling; None if there is none."""
        return self._special.get(content)

    def _find_end_of_turn(self) -> int | None:
        """Return the first special token that the template closes an assistant's turn with."""
        if self.chat_template is None or self._special_pattern is None:
            return None
        closing = self.chat_template.end(("user",), "assistant")
        ids = self.encode_run([Segment(closing, True)])
        return next((i for i in ids if i in self.special_ids), None)


def _most_chars(parts: TokenizerParts) -> int | None:
    """Return how many characters of text one token may stand for; None where that is not known."""
    longest = max(map(len, parts.token_bytes), default=1)  # a character has a byte at least
    normalizer = parts.backend.normalizer
    if normalizer is None:
        return longest
    # a character is composed of four at most (Unicode Standard Annex #15, canonical forms)
    return 4 * longest if isinstance(normalizer, NFC) else None


def _kind(char: str) -> int:
    """Return which kind of character this is, as splitters into words tell them apart."""
    if char.isalpha():
        return 0
    if char.isnumeric():
        return 1
    return 2 if char.isspace() else 3


def _spell(text: str, byte: int) -> str:
    char = next(char for char in text if byte in char.encode())
    return f"{char!r} (U+{ord(char):04X})"


def _merge(segments: Iterable[Segment]) -> list[tuple[str, bool]]:
    """Join neighbours of one trust, so that where they were cut plays no part."""
    merged: list[tuple[list[str], bool]] = []
    for segment in segments:
        if not segment.text:
            continue
        if merged and merged[-1][1] == segment.trusted:
            merged[-1][0].append(segment.text)
        else:
            merged.append(([segment.text], segment.trusted))
    return [("".join(texts), trusted) for texts, trusted in merged]


def _special_pattern(tokens: Sequence[SpecialToken]) -> re.Pattern[str] | None:
    """Return a pattern for the leftmost, longest special token."""
    if not tokens:
        return None
    longest_first = sorted(tokens, key=lambda token: -len(token.content))
    return re.compile(
        "|".join(
            r"\s*" * token.lstrip + re.escape(token.content) + r"\s*" * token.rstrip
            for token in longest_first
        )
    )
