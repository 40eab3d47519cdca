"""What a script says, and the sample a gen makes of it; knows no threads and no clock."""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from umbel.lang.choice_scoring import draw, score_choices
from umbel.lang.constraints import Choices, Constraint, JsonSchema, Regex
from umbel.lang.errors import BackendError
from umbel.lang.graph import node_seed
from umbel.lang.ir import Gen, Select
from umbel.lang.results import FinishReason, NodeResult, Sample, Thinking, TokenLogprob, Usage
from umbel.lang.transcript import Message

from ..minimal_instances import minimal_instance
from ..stop_filter import StopFilter


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """One answer with all that can be scripted about it.

    `tokens` replaces `text` and says how it is split; bytes may cut a character. `latency` passes
    before the first token and `token_latency` before each further one (seconds). An `error` comes
    after the tokens; a reply that stalls never ends. `thinking` is what a gen with `thinking=True`
    thinks first. `scores` holds, for a select, each choice's log-probabilities by token.
    """

    text: str = ""
    thinking: str = ""
    tokens: tuple[str | bytes, ...] = ()
    latency: float = 0.0
    token_latency: float = 0.0
    error: Exception | None = None
    stalls: bool = False
    accepting: bool | None = None  # None: as the constraint says
    scores: Mapping[str, Sequence[float]] = {}


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """What a callable in a script is told about the node it answers."""

    name: str
    address: str
    op: Gen | Select
    row: int
    seed: int
    sample: int
    _text: Callable[[], str]
    _messages: Callable[[], list[Message]]

    @property
    def prompt(self) -> str:
        """The text that the node continues."""
        return self._text()

    @property
    def messages(self) -> list[Message]:
        """The turns that the node continues."""
        return self._messages()


Answer = str | Reply
Script = Mapping[str, "Answer | Sequence[Answer] | Callable[[ScriptedCall], Answer]"]


class Chunks(NamedTuple):
    """A gen's sample as it arrives: text by token, and the sample at the end."""

    deltas: tuple[str, ...]
    sample: Sample


#: a word or a mark, with the blanks before it
_TOKEN = re.compile(r"\s*(?:\w+|[^\w\s])|\s+")


def split_tokens(text: str) -> tuple[str, ...]:
    """Split text as the scripted backend counts tokens; the parts concatenate to the text."""
    return tuple(_TOKEN.findall(text))


def play(gen: Gen, reply: Reply, address: str) -> Chunks:
    """Return what a gen makes of a reply: stops, max_tokens and the constraint honoured.

    Raises BackendError for an answer that its constraint could not have produced.
    """
    sampling = gen.sampling
    tokens: Sequence[str | bytes] = reply.tokens or split_tokens(reply.text)
    kept = tokens[: sampling.max_tokens]
    reason: FinishReason = "length" if len(kept) < len(tokens) else "stop"
    matched: str | None = None
    used = len(kept)
    if not sampling.stop and not sampling.stop_regex and not reply.tokens:
        deltas: list[str] = list(kept)  # type: ignore[arg-type]  # split_tokens gives strings
    else:
        deltas, matched, used = _stopped(kept, sampling.stop, sampling.stop_regex)
        if matched is not None:
            reason = "stop"
    text = "".join(deltas)
    is_accepting = reply.accepting
    if reply.error is not None or reply.stalls:
        is_accepting = True  # the sample will not be used
    if is_accepting is None:
        is_accepting = gen.constraint is None or satisfies(text, gen.constraint)
        if not is_accepting and reason != "length":
            raise BackendError(
                f"{address}: the scripted answer {text!r} does not satisfy {gen.constraint!r}",
                backend="scripted",
            )
    ids = tuple(
        [zlib.crc32(t if isinstance(t, bytes) else t.encode()) & 0xFFFF for t in kept[:used]]
    )
    thinking = _thinking(gen, reply.thinking) if gen.thinking else None
    if thinking is not None:
        ids = (zlib.crc32(b"</think>") & 0xFFFF,) * thinking.num_tokens + ids
    return Chunks(
        tuple(deltas),
        Sample(
            text=text,
            thinking=thinking,
            token_ids=ids,
            num_kept=len(ids),
            finish_reason=reason,
            matched_stop=matched,
            accepting=is_accepting,
            logprobs=_logprobs(ids, kept) if sampling.logprobs else (),
        ),
    )


def _logprobs(ids: Sequence[int], tokens: Sequence[str | bytes]) -> tuple[TokenLogprob, ...]:
    texts = (t.decode("utf-8", "replace") if isinstance(t, bytes) else t for t in tokens)
    return tuple(TokenLogprob(i, 0.0, text=text) for i, text in zip(ids, texts, strict=False))


def _thinking(gen: Gen, text: str) -> Thinking:
    """Return the block of a gen that thinks, ended where it has used its tokens."""
    tokens = split_tokens(text)
    kept = tokens[: gen.max_thinking_tokens - 1]  # the end is one token
    reason: FinishReason = "length" if len(kept) < len(tokens) else "stop"
    return Thinking("".join(kept), len(kept) + 1, reason)


def _stopped(
    tokens: Sequence[str | bytes], stops: Sequence[str], patterns: Sequence[str]
) -> tuple[list[str], str | None, int]:
    """Return the deltas up to the first stop, the stop, and how many tokens were used."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    stop_filter = StopFilter(stops)
    deltas: list[str] = []
    text = ""
    for count, token in enumerate(tokens, 1):
        piece = decoder.decode(token if isinstance(token, bytes) else token.encode())
        text += piece
        found = _first_match(patterns, text)
        if found is not None:
            # what a pattern will match can't be known before, so nothing was let through
            return [text[: found.start()]], found[0], count
        deltas.append(stop_filter.feed(piece))
        if stop_filter.matched is not None:
            break
    else:
        # an unfinished character is dropped: the text ends cleanly before it
        deltas.append(stop_filter.finish())
        count = len(tokens)
    if patterns:
        deltas = ["".join(deltas)]
    return deltas, stop_filter.matched, count


def _first_match(patterns: Sequence[str], text: str) -> re.Match[str] | None:
    matches = [found for pattern in patterns if (found := re.search(pattern, text)) is not None]
    return min(matches, key=lambda m: (m.end(), m.start()), default=None)


def satisfies(text: str, constraint: Constraint) -> bool:
    """Say whether a text is a complete value, as far as that is checked without a grammar engine.

    JSON schemas are checked for being JSON only, grammars not at all.
    """
    match constraint:
        case Regex(pattern=pattern):
            return re.fullmatch(pattern, text) is not None
        case Choices(choices=choices):
            return text in choices
        case JsonSchema():
            try:
                json.loads(text)
            except ValueError:
                return False
            return True
        case _:
            return True


def unscripted(op: Gen, address: str) -> Reply:
    """Return what a gen answers that has no script: its name, or a value of its constraint."""
    if op.constraint is None:
        return Reply(text=op.name or "text")
    try:
        return Reply(text=minimal_instance(op.constraint))
    except ValueError as error:
        raise BackendError(f"{op.name or address}: {error}", backend="scripted") from error


def choose(op: Select, reply: Reply, seed: int, row: int, address: str) -> NodeResult:
    """Return a select's result: by the scripted scores, or the choice that the reply names."""
    if reply.scores:
        missing = [choice for choice in op.choices if choice not in reply.scores]
        if missing:
            raise BackendError(f"{address}: no scripted scores for {missing}", backend="scripted")
        logprobs = [list(reply.scores[choice]) for choice in op.choices]
    else:
        wanted = reply.text or op.choices[0]
        if wanted not in op.choices:
            raise BackendError(
                f"{address}: the scripted answer {wanted!r} is not one of {op.choices}",
                backend="scripted",
            )
        logprobs = [[0.0] if c == wanted else [-1.0 - i] for i, c in enumerate(op.choices)]
    ids = [
        [zlib.crc32(c.encode()) & 0xFFFF] * len(p)
        for c, p in zip(op.choices, logprobs, strict=True)
    ]
    without = [[0.0] * len(p) for p in logprobs]
    winner, table = score_choices(op.choices, ids, logprobs, op.method, without)
    if op.temperature > 0:
        u = node_seed(seed, row, address) / 2**64
        winner = draw(table, op.temperature, u)
    num_tokens = sum(map(len, logprobs))
    return NodeResult(text=op.choices[winner], scores=table, usage=Usage(tree_tokens=num_tokens))
