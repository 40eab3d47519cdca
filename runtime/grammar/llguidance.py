"""Grammars run by llguidance: JSON schema, context-free grammars, large regexes.

Takes what the front door let through; doesn't choose engines and doesn't cache grammars.
What llguidance does that a caller must not see is handled here: an illegal token never reaches
`consume_token` (it would break the matcher for good), a limit error drops the shared prototype
(later copies would inherit it) and replays the one request on a fresh one, and EOS is never fed.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Literal

import llguidance
import numpy as np

from umbel.lang.errors import ConstraintError

from ..vocabulary import Vocabulary
from .byte_spelling import ByteSpelling
from .llguidance_words import UnsatisfiableError, first_line, grammar_error
from .matcher import BitmaskRow

GrammarKind = Literal["json_schema", "regex", "lark"]

# Bounded, so that a small model can't print blanks until max_tokens.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,8}"

# A schema with 1,000 optional keys has rows of 20,000 items. The rows of an ambiguous grammar grow
# with the text, and the time of each step with them: there they end it, before a step takes longer
# than others can wait for.
_MAX_ROW_ITEMS: dict[GrammarKind, int] = {"json_schema": 30_000, "regex": 600, "lark": 600}


def limits_of(kind: GrammarKind) -> llguidance.LLParserLimits:
    """Return how much a kind of grammar may take.

    Larger than llguidance's defaults where a plain constraint meets them; but a lexer stays under
    about 100 MB, and its part of a step under about 15 ms (fuel: about 14,000 per ms).
    """
    return llguidance.LLParserLimits(
        max_items_in_row=_MAX_ROW_ITEMS[kind],
        initial_lexer_fuel=5_000_000,
        step_lexer_fuel=200_000,
        step_max_items=200_000,
        max_lexer_states=60_000,
        max_grammar_size=1_000_000,
        verbose_errors=False,
    )


# Off JSON, words in lower case and string bodies are the tokens a lexer meets in bulk; these
# slices let it settle them at once (arithmetic: 153 us a mask without, 37 us with).
_WIDE_SLICES = [
    r"[^\"\\'\x00-\x1F\x7F]{1,10}",
    r"[^\"\\'\x00-\x1F\x7F]+",
    r"[a-z]{1,8}",
    r"[a-z]+",
]

# The library's slices of string bodies go up to 30 characters, then without end. Runs of blanks and
# dashes are longer: in strings of bounded length they were walked for each mask, which at a real
# tokenizer's 151,936 ids was a third of the walk.
_LONG_TEXT_SLICE = r"[^\"\\\x00-\x1F\x7F]{1,128}"

_KEPT_ENCODINGS = 8192  # of forced texts, each of at most so many characters:
_LONGEST_KEPT = 256

# llguidance works out how all text that is forced is encoded, at each mask before and in it: that
# takes 12 us a character. Past so many tokens it is told not to; what is forced is sampled then.
_MOST_FORCED = 2_000
NO_LOOKING_AHEAD = '\n%llguidance {"no_forcing": true}'  # at the end: the lines stay the user's

_DEAD_END = "no token of the model continues the constraint from here"


class _TokenizerAdapter:
    """What llguidance asks of a tokenizer, over a Vocabulary.

    It asks how forced text is encoded at each mask and each step before and in such text, which
    took longer than the mask; the rows of a batch, and requests that come again, ask the same.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        padding = vocabulary.size - len(vocabulary.token_bytes)
        self.eos_token_id = vocabulary.eos_ids[0]
        self.tokens = [*vocabulary.token_bytes, *[b""] * padding]
        self.special_token_ids = sorted(vocabulary.special_ids.union(vocabulary.eos_ids))
        self._encode = vocabulary.encode
        self._encode_again = lru_cache(_KEPT_ENCODINGS)(self._encode_once)

    def __call__(self, text: str | bytes) -> list[int]:
        if len(text) > _LONGEST_KEPT:
            return self._encode_once(text)
        return self._encode_again(text)

    def _encode_once(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


class LLGuidanceTokenizers:
    """llguidance's view of one vocabulary: built once, holds the GIL while it is."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if not vocabulary.eos_ids:
            raise ConstraintError("the model has no end-of-sequence token; constraints need one")
        self.vocabulary = vocabulary
        self._lock = threading.Lock()

    @cached_property
    def json(self) -> llguidance.LLTokenizer:
        """The tokenizer with the slices that suit JSON."""
        return llguidance.LLTokenizer(
            _TokenizerAdapter(self.vocabulary),  # type: ignore[arg-type]
            eos_token=list(self.vocabulary.eos_ids),
            slices=[*llguidance.LLTokenizer.json_slices(), _LONG_TEXT_SLICE],
        )

    @cached_property
    def wide(self) -> llguidance.LLTokenizer:
        """The tokenizer with slices for regexes and grammars."""
        general = llguidance.LLTokenizer.general_slices()
        slices = [*_WIDE_SLICES[:2], *general, _LONG_TEXT_SLICE, *_WIDE_SLICES[2:]]
        return self.json.with_slices(slices)

    def for_kind(self, kind: GrammarKind) -> llguidance.LLTokenizer:
        """Return the tokenizer for a kind of grammar, building it on first use."""
        with self._lock:
            return self.json if kind == "json_schema" else self.wide


def compile_llguidance(
    tokenizers: LLGuidanceTokenizers,
    kind: GrammarKind,
    text: str,
    *,
    lenient: bool = False,
    limits: llguidance.LLParserLimits | None = None,
) -> LLGuidanceGrammar:
    """Compile a JSON schema (JSON text), a regex (Rust syntax) or a Lark grammar.

    With `lenient`, keywords that llguidance lacks are ignored: the caller validates afterwards.
    Raises ConstraintError for what llguidance refuses, and for what nothing can satisfy.
    """
    if kind == "json_schema":
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                text,
                overrides={
                    "whitespace_pattern": WHITESPACE,
                    "json_allow_general_unicode_escapes": True,
                    "lenient": lenient,
                    "coerce_one_of": lenient,
                },
            )
        except ValueError as error:  # numbers that no float holds, in keywords that say nothing
            raise ConstraintError(f"llguidance can't read the schema: {error}") from error
    elif kind == "regex":
        grammar = llguidance.LLMatcher.grammar_from_regex(text)
    else:
        grammar = llguidance.LLMatcher.grammar_from_lark(text)
    tokenizer = tokenizers.for_kind(kind)
    limits = limits or limits_of(kind)
    compiled = LLGuidanceGrammar(tokenizers.vocabulary, tokenizer, grammar, limits)
    if kind == "lark" and "<[" in text:
        compiled.text_ids = _text_ids(tokenizers.vocabulary)
    if len(compiled.matcher().forced()) > _MOST_FORCED:
        compiled = compiled.near
    compiled.check_satisfiable(allow_empty=kind != "json_schema")
    return compiled


class LLGuidanceGrammar:
    """A compiled grammar: the prototype that every request's matcher is copied from."""

    engine = "llguidance"

    def __init__(
        self,
        vocabulary: Vocabulary,
        tokenizer: llguidance.LLTokenizer,
        grammar: str,
        limits: llguidance.LLParserLimits,
    ) -> None:
        self.vocabulary = vocabulary
        # A prototype's lexer grows as it is used; this is what was seen for schemas in MaskBench.
        self.num_bytes = 4_000_000 + 16 * len(grammar)
        self._tokenizer = tokenizer
        self._grammar = grammar
        self._limits = limits
        self.eos_bits = [  # where EOS stands in a mask: word, bit of a signed word
            (eos_id >> 5, 1 << bit if (bit := eos_id & 31) < 31 else -(1 << 31))
            for eos_id in vocabulary.eos_ids
        ]
        #: the ids with text, where a grammar that names ids (`<[7]>`) lets through others, too
        self.text_ids: BitmaskRow | None = None
        self._lock = threading.Lock()
        self._prototype: llguidance.LLMatcher | None = self._build()

    def _build(self) -> llguidance.LLMatcher:
        prototype = llguidance.LLMatcher(
            self._tokenizer, self._grammar, log_level=0, limits=self._limits
        )
        if prototype.is_error():
            raise grammar_error(prototype.get_error())
        return prototype

    def copy(self) -> tuple[llguidance.LLMatcher, llguidance.LLMatcher]:
        """Return (a fresh matcher, the prototype it shares its lexer with)."""
        with self._lock:
            if self._prototype is None:
                self._prototype = self._build()
            return self._prototype.deep_copy(), self._prototype

    def drop(self, prototype: llguidance.LLMatcher) -> None:
        """Forget a prototype whose lexer met a limit: every copy of it would fail too."""
        with self._lock:
            if self._prototype is prototype:
                self._prototype = None

    @cached_property
    def near(self) -> LLGuidanceGrammar:
        """The same grammar, which does not look ahead through forced text."""
        grammar = _without_looking_ahead(self._grammar)
        near = LLGuidanceGrammar(self.vocabulary, self._tokenizer, grammar, self._limits)
        near.text_ids = self.text_ids
        return near

    @cached_property
    def spelling(self) -> ByteSpelling:
        """The tokens that the end of a token is spelled with."""
        return ByteSpelling(self.vocabulary)

    def matcher(self) -> LLGuidanceMatcher:
        """Return a matcher at the start."""
        return LLGuidanceMatcher(self, *self.copy())

    def check_satisfiable(self, *, allow_empty: bool) -> None:
        """Compute the first mask: raise ConstraintError if it fails or allows nothing."""
        matcher = self.matcher()
        row = np.zeros((self.vocabulary.size + 31) // 32, np.int32)
        matcher.fill_unchecked(row)
        if matcher.is_accepting and allow_empty:
            return
        for eos_id in self.vocabulary.eos_ids:
            row[eos_id >> 5] &= ~(np.int32(1) << np.int32(eos_id & 31))
        if not row.any():
            raise UnsatisfiableError("nothing can satisfy the constraint: no token is possible")


def _without_looking_ahead(grammar: str) -> str:
    try:
        spec = json.loads(grammar)["grammars"][0]
    except ValueError:  # Lark as it is
        return grammar + NO_LOOKING_AHEAD
    body = spec["lark_grammar"] or f"start: %json {json.dumps(spec['json_schema'])}"
    return llguidance.LLMatcher.grammar_from_lark(body + NO_LOOKING_AHEAD)


def _text_ids(vocabulary: Vocabulary) -> BitmaskRow:
    bits = np.zeros((vocabulary.size + 31) // 32 * 32, np.uint8)
    bits[[i for i, data in enumerate(vocabulary.token_bytes) if data]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class _Target:
    """A row that masks are written to: for llguidance an address, for single words plain Python.

    To find these takes as long as all else that Python does for a mask, so they are kept.
    """

    def __init__(self, row: BitmaskRow) -> None:
        if not row.flags.c_contiguous:
            raise ValueError("a bitmask row must be contiguous")
        self.row = row
        self.words = memoryview(row)  # type: ignore[arg-type]
        self.num_bytes = row.nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(row.data))  # beats `row.ctypes`


class LLGuidanceMatcher:
    """One request's place in a grammar; see `GrammarMatcher` for the contract."""

    def __init__(
        self,
        compiled: LLGuidanceGrammar,
        matcher: llguidance.LLMatcher,
        prototype: llguidance.LLMatcher,
    ) -> None:
        self._compiled = compiled
        self._matcher = matcher
        self._prototype = prototype
        self._target: _Target | None = None  # of the last mask: most often the next one's too
        self._tokens: list[int] = []  # fed so far, to replay on a fresh prototype
        self._sizes: list[int] = []  # how many were fed for each accepted token

    def fill(self, row: BitmaskRow) -> None:
        """Overwrite `row` with the allowed ids; padding bits are 0. Raises ConstraintError."""
        if self.fill_unchecked(row) and not row.any():
            raise ConstraintError(_DEAD_END)

    def fill_unchecked(self, row: BitmaskRow) -> bool:
        """Fill `row` as `fill` does, also where nothing is allowed; return whether that may be.

        A mask that llguidance computes is never empty: it ends with an error instead.
        """
        target = self._target
        if target is None or target.row is not row:
            target = self._target = _Target(row)
        matcher, words = self._matcher, target.words
        may_be_empty = matcher.is_stopped()
        if may_be_empty:
            self._raise_if_broken()
            row.fill(0)
        else:
            matcher.unsafe_compute_mask_ptr(target.address, target.num_bytes)
            if matcher.is_error():
                self._raise_at_dead_end()
                self._recover()
                matcher = self._matcher
                matcher.unsafe_compute_mask_ptr(target.address, target.num_bytes)
                self._raise_if_broken()
        if self._compiled.text_ids is not None:
            np.bitwise_and(row, self._compiled.text_ids, out=row)
            may_be_empty = True
        accepting = matcher.is_accepting()
        for word, bit in self._compiled.eos_bits:
            if accepting:
                words[word] |= bit
            elif words[word] & bit:
                words[word] &= ~bit
                may_be_empty = True
        return may_be_empty

    def accept(self, token_id: int) -> bool:
        """Step over a token; False (and no change) if it is not allowed."""
        if not self._is_text(token_id) or self._matcher.is_stopped():
            self._raise_if_broken()
            return False
        taken = self._matcher.try_consume_tokens([token_id])
        if self._matcher.is_error():
            self._recover()
            taken = self._matcher.try_consume_tokens([token_id])
            self._raise_if_broken()
        if taken:
            self._tokens.append(token_id)
            self._sizes.append(1)
        return bool(taken)

    def accept_bytes(self, data: bytes) -> bool:
        """Step over the end of a token that began before; False (and no change) if illegal."""
        spelled = self._compiled.spelling.spell(data)
        if len(spelled) < len(data) or self.validate(spelled) < len(data):
            return False
        for token_id in spelled:
            taken = self.accept(token_id)
            assert taken, "these tokens were found to be valid"
        del self._sizes[len(self._sizes) - len(spelled) :]
        self._sizes.append(len(spelled))
        return True

    def viable(self, texts: Sequence[bytes]) -> list[bool]:
        """Return which byte strings `accept_bytes` would take, without moving."""
        return self._compiled.spelling.viable(texts, self.validate)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens; any number up to all accepted so far."""
        if not 0 <= num_tokens <= len(self._sizes):
            raise ValueError(f"can't take back {num_tokens} of {len(self._sizes)} tokens")
        first = len(self._sizes) - num_tokens
        num_fed = sum(self._sizes[first:])
        del self._sizes[first:]
        if not num_fed:
            return
        del self._tokens[len(self._tokens) - num_fed :]
        if not self._matcher.rollback(num_fed):
            self._recover()

    def validate(self, token_ids: Sequence[int]) -> int:
        """Return how many leading tokens would be accepted, without moving."""
        draft = list(token_ids)
        for i, token_id in enumerate(draft):
            if not self._is_text(token_id):
                draft = draft[:i]
                break
        if not draft or self._matcher.is_stopped():
            self._raise_if_broken()
            return 0
        num_valid = self._matcher.validate_tokens(draft)
        if self._matcher.is_error():
            self._recover()
            num_valid = self._matcher.validate_tokens(draft)
            self._raise_if_broken()
        return num_valid

    def forced(self) -> list[int]:
        """Return tokens that must come next, canonically tokenised; [] if there is a choice."""
        if self._matcher.is_stopped():
            return []
        forced = self._matcher.compute_ff_tokens()
        if len(forced) > _MOST_FORCED:
            self._compiled = self._compiled.near
            self._start_over()
        return forced

    def fork(self) -> LLGuidanceMatcher:
        """Return an independent matcher in the same state."""
        other = LLGuidanceMatcher(self._compiled, self._matcher.deep_copy(), self._prototype)
        other._tokens = self._tokens.copy()
        other._sizes = self._sizes.copy()
        return other

    @property
    def inner(self) -> llguidance.LLMatcher:
        """The library's own matcher, for calls that take many: not to be stepped."""
        return self._matcher

    @property
    def is_accepting(self) -> bool:
        """Whether the text so far is a complete value."""
        return self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and nothing can be added."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _is_text(self, token_id: int) -> bool:
        tokens = self._compiled.vocabulary.token_bytes
        return 0 <= token_id < len(tokens) and tokens[token_id] != b""

    def _recover(self) -> None:
        """Start over on a fresh prototype: the limit may have been another request's."""
        self._compiled.drop(self._prototype)
        self._start_over()

    def _start_over(self) -> None:
        self._matcher, self._prototype = self._compiled.copy()
        if self._matcher.try_consume_tokens(self._tokens) != len(self._tokens):
            self._raise_if_broken()
            raise ConstraintError("llguidance gave a different answer to the same tokens")

    def _raise_at_dead_end(self) -> None:
        if self._matcher.get_error().startswith("NoExtensionBias"):
            raise ConstraintError(_DEAD_END)

    def _raise_if_broken(self) -> None:
        if self._matcher.is_error():
            self._raise_at_dead_end()
            error = self._matcher.get_error()
            self._compiled.drop(self._prototype)
            raise ConstraintError(
                f"the constraint is too complex to follow: {first_line(error)}; simplify it "
                "(nested counters and long alternatives cost most)"
            )
