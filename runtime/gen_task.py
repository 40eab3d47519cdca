"""One sample of one gen: turns sampled ids into text, and decides when and where it ends.

Knows one request's tokens, text, stops and grammar; nothing of batches or pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from umbel.lang.constraints import JsonSchema
from umbel.lang.errors import ProgramError
from umbel.lang.ir import Gen, Op
from umbel.lang.results import FinishReason, Sample, Thinking, TokenLogprob

from .detokenizer import IncrementalDetokenizer
from .grammar import validate_after
from .grammar.matcher import BitmaskRow, GrammarMatcher
from .prompt_scores import PromptScores
from .request import Request
from .sampling import SamplingRow
from .stop_matcher import StopMatcher


def check_gen(gen: Gen, vocab_size: int) -> None:
    """Raise ProgramError for what this vocabulary, or nobody, can honour."""
    named = {
        "logit_bias": [token_id for token_id, _ in gen.sampling.logit_bias],
        "stop_token_ids": gen.sampling.stop_token_ids,
    }
    for option, ids in named.items():
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise ProgramError(
                    f"gen {gen.name!r}: {option} names token id {token_id}; the model's "
                    f"vocabulary has {vocab_size} ids, from 0 on"
                )


def check_samples(gen: Op, samples: Sequence[Sample]) -> None:
    """Raise ConstraintError for a complete value that a schema with `strict=False` forbids.

    What its grammar could not enforce is checked here; a strict schema needs no second look, and
    a value that was cut is reported as such when it is read.
    """
    if not isinstance(gen, Gen) or not isinstance(gen.constraint, JsonSchema):
        return
    if not gen.constraint.strict:
        for sample in samples:
            if sample.accepting:
                validate_after(gen.constraint, sample.text)


def end_ids(gen: Gen, eos_ids: frozenset[int]) -> frozenset[int]:
    """Return the ids that end a gen when drawn."""
    own = frozenset(gen.sampling.stop_token_ids)
    if gen.sampling.ignore_eos and gen.constraint is None:
        return own
    return own | eos_ids  # a constrained value that can't go on has nothing else left


class Opening(Protocol):
    """What a sample writes before its text begins."""

    def fill(self, row: BitmaskRow) -> None:
        """Overwrite `row` with the ids that may come next; only they are accepted."""
        ...

    def accept(self, token_id: int) -> bytes | None:
        """Take a sampled id: None, or, when it is the last one, the bytes of the text it holds."""
        ...

    @property
    def thinking(self) -> Thinking | None:
        """What was thought so far, where this is a think block."""
        ...


@dataclass(slots=True)
class GenTask:
    """The state of one running sample.

    `accept` takes one sampled id and returns the text it released; `sample` is set when it ended.
    `boundaries[i]` is the length of the text after i sampled tokens, or -1 where token i ends
    inside a character, or before the text: only elsewhere may the row be cut (rule 9).

    What `opening` takes comes before the text: stops, the constraint and the counts of tokens begin
    behind it.
    """

    gen: Gen
    request: Request
    detokenizer: IncrementalDetokenizer
    stops: StopMatcher
    row: SamplingRow
    end_ids: frozenset[int]  # ids that end the sample when drawn
    encode: Callable[[str], list[int]]
    matcher: GrammarMatcher | None = None
    sample_index: int = 0
    opening: Opening | None = None
    num_replaced: int = 0  # of the prompt's last tokens, by those that the opening takes
    num_before: int = 0  # tokens that the opening took, and that hold nothing of the text
    scores: PromptScores | None = None  # of the prompt, one for all samples; None: not wanted
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    sample: Sample | None = None
    most_tokens: int = field(init=False)  # sampled, with which it surely ends
    _thinking: Thinking | None = None
    _pieces: list[str] = field(default_factory=list)  # everything decoded so far
    _length: int = 0  # characters of it
    _released: int = 0  # of these, those that were shown
    _stop_base: int = 0  # where the text that `stops` has seen begins
    _boundaries: list[int] = field(default_factory=lambda: [0])
    _has_stops: bool = True

    def __post_init__(self) -> None:
        """Let ids that would end the text too early be part of what comes before it."""
        self._has_stops = bool(self.gen.sampling.stop or self.gen.sampling.stop_regex)
        if self.opening is not None:
            self.row.end_ids = ()
        self._bound_length()

    def accept(self, token_id: int) -> str:
        """Take a sampled id; return the text that may be shown now.

        In one step a text stop counts first, then a stop token or EOS, then the length (rule 12).
        """
        self.token_ids.append(token_id)
        self.row.append(token_id)
        if self.opening is not None:
            return self._accept_before(self.opening, token_id)
        if token_id in self.end_ids and (self.matcher is None or self.matcher.is_accepting):
            return self._finish("stop", token_id)
        if self.matcher is not None:  # a stop token of an incomplete value is text like any other
            legal = self.matcher.accept(token_id)
            assert legal, f"sampled id {token_id} was masked out"
        return self._take(self.detokenizer.push(token_id))

    def _accept_before(self, opening: Opening, token_id: int) -> str:
        """Take an id of the opening, whose last one may hold the text's first bytes."""
        first = opening.accept(token_id)
        self._thinking = opening.thinking
        if first is not None:
            self.opening = None
            self.row.end_ids = sorted(self.end_ids)
            self._bound_length()
        if first:
            if self.matcher is not None:
                legal = self.matcher.accept_bytes(first)
                assert legal, f"sampled id {token_id} was masked out"
            return self._take(self.detokenizer.push_bytes(first))
        self.num_before += 1
        self.row.num_before = self.num_before
        self._bound_length()
        if first is None:
            self._boundaries.append(-1)
            is_full = len(self.token_ids) >= self.most_tokens
            return self._finish("length", None) if is_full else ""
        return self._take("")

    def _take(self, delta: str) -> str:
        """Take the text of a token; return what may be shown."""
        self._pieces.append(delta)
        self._length += len(delta)
        self._boundaries.append(self._length if self.detokenizer.is_clean else -1)
        if not self._has_stops:  # what is decoded is shown
            if self.matcher is not None and self.matcher.is_finished:
                return self._finish("stop", None)
            if len(self.token_ids) >= self.most_tokens:
                return self._finish("length", None)
            self._released = self._length
            return delta
        self.stops.push(delta)
        match = self.stops.match
        if match is not None:
            if self._may_stop_at(self._stop_base + match.length):
                return self._end_at(self._stop_base + match.length, "stop", match.stop)
            # inside a value that is not complete this is text like any other
            self.stops = StopMatcher(self.gen.sampling.stop, self.gen.sampling.stop_regex)
            self._stop_base = self._length
        if self.matcher is not None and self.matcher.is_finished:
            return self._finish("stop", None)
        if len(self.token_ids) >= self.most_tokens:
            return self._finish("length", None)
        end = self._stop_base + self.stops.num_released
        if end == self._length == self._released + len(delta):  # as most are: nothing is withheld
            self._released = end
            return delta
        return self._release(end)

    def _bound_length(self) -> None:
        """Set `most_tokens`.

        What an opening takes does not count, so while there is one only a full row is sure.
        """
        self.most_tokens = self.request.limit - self.request.num_prompt
        if self.opening is None:
            most = self.num_before + self.gen.sampling.max_tokens
            self.most_tokens = min(self.most_tokens, most)

    def jump(self, least: int) -> str:
        """Take what the grammar forces to come next, in one go; return the text it released.

        The ids join the request's row and are computed in one pass. In forced text a mask holds
        the tokenizer's own tokens alone, so that sampling one by one would give the same ids; it
        is done where there are fewer than `least`, or where each token's log-probabilities are
        wanted.
        """
        released = ""
        if self.matcher is None or self.row.wants_logprobs or self.opening is not None:
            return released
        forced = self.matcher.forced()
        for token_id in forced if len(forced) >= least else ():
            released += self.accept(token_id)
            if self.sample is not None:
                break
            self.request.token_ids.append(token_id)
        return released

    @property
    def num_completion_tokens(self) -> int:
        """Sampled tokens, but for those that only write the end of the prompt again."""
        return len(self.token_ids) - (0 if self._thinking else self.num_before)

    def _finish(self, reason: FinishReason, matched: int | None) -> str:
        """End where the text ends, unless a stop that was waited for turns out to have matched."""
        self.stops.flush()
        match = self.stops.match
        if match is not None and self._may_stop_at(self._stop_base + match.length):
            return self._end_at(self._stop_base + match.length, "stop", match.stop)
        return self._end_at(self._length, reason, matched)

    @property
    def _text(self) -> str:
        """Everything decoded so far, in one piece: a copy of it for each token would add up."""
        if len(self._pieces) != 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def _release(self, end: int) -> str:
        released = self._text[self._released : end]
        self._released = max(self._released, end)
        return released

    def _may_stop_at(self, position: int) -> bool:
        """Whether a constrained value may end where a stop was found (rule 14)."""
        if self.matcher is None:
            return True
        kept = self._num_kept(position)
        probe = self.matcher.fork()
        probe.rollback(len(self._boundaries) - 1 - max(kept, self.num_before))
        rest = self._text[self._boundaries[kept] : position]
        residue = self.encode(rest) if rest else []
        return all(probe.accept(i) for i in residue) and probe.is_accepting

    def _num_kept(self, position: int) -> int:
        """Tokens that lie wholly in the first `position` characters."""
        best = 0
        for i, end in enumerate(self._boundaries):
            if 0 <= end <= position:
                best = i
        return best

    def _end_at(self, position: int, reason: FinishReason, matched: str | int | None) -> str:
        text = self._text[:position]
        kept = self._num_kept(position)
        # a text stop was probed before; any other end leaves the matcher where the text ends
        accepting = self.matcher is None or isinstance(matched, str) or self.matcher.is_accepting
        self.sample = Sample(
            text=text,
            token_ids=tuple(self.token_ids),
            num_kept=kept,
            residue=text[self._boundaries[kept] :],
            num_replaced=self.num_replaced if kept else 0,
            thinking=self._thinking,
            finish_reason=reason,
            matched_stop=matched,
            accepting=accepting,
            logprobs=tuple(self.logprobs),
        )
        return self._release(position)
