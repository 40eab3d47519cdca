"""The token row of a prefix path: ids that are fixed, and the literal run after them.

Knows tokens and templates; nothing of requests, pages or the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from umbel.lang.choice_scoring import beginning_choice
from umbel.lang.errors import ProgramError, RequestRejectedError
from umbel.lang.ir import Select
from umbel.lang.results import Sample

from .chat_template import ThinkFormat
from .tokenizer import Segment, Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class LiteralRun:
    """Literal text, its last segment first: rows of one path share all but their ends."""

    segment: Segment
    before: LiteralRun | None
    num_chars: int  # up to here, but for what templates wrote

    def __iter__(self) -> Iterator[Segment]:
        """Yield the segments, the last one first."""
        at: LiteralRun | None = self
        while at is not None:
            yield at.segment
            at = at.before


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Where a path of nodes ends, in tokens. Immutable: branches share their stem's row.

    `ids` reach to the last generated token. `run` is the literal text since then; it is encoded
    whole, so that the grouping of appends and forks never changes token ids (rule 6).
    """

    ids: tuple[int, ...] = ()
    run: LiteralRun | None = None
    turns: tuple[str, ...] = ()  # the roles of closed turns
    role: str | None = None  # of the open turn
    has_content: bool = False  # whether the open turn has

    @property
    def segments(self) -> list[Segment]:
        """The literal run in order."""
        return [] if self.run is None else list(self.run)[::-1]

    def then(self, text: str, *, trusted: bool) -> TokenRow:
        """Return the row with more literal text."""
        return replace(self, run=_appended(self.run, Segment(text, trusted))) if text else self


def _appended(run: LiteralRun | None, segment: Segment) -> LiteralRun:
    num_chars = 0 if run is None else run.num_chars
    return LiteralRun(segment, run, num_chars + (0 if segment.trusted else len(segment.text)))


class RowBuilder:
    """Extends rows by what nodes append, and encodes them.

    A row that is surely longer than `max_seq_len` tokens is not encoded, which may take seconds:
    RequestRejectedError is raised instead.
    """

    def __init__(self, tokenizer: Tokenizer, max_seq_len: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._max_seq_len = max_seq_len

    def append_text(self, row: TokenRow, text: str) -> TokenRow:
        """Append literal text, which is never parsed for special tokens."""
        return replace(row.then(text, trusted=False), has_content=row.has_content or bool(text))

    def start_role(self, row: TokenRow, role: str) -> TokenRow:
        """Open a turn with the template's text."""
        template = self._tokenizer.chat_template
        if template is None:
            raise ProgramError(f"this model has no chat template: it can't open a {role!r} turn")
        opened = row.then(template.start(row.turns, role), trusted=True)
        return replace(opened, role=role, has_content=False)

    def start_thinking(self, row: TokenRow) -> tuple[TokenRow, ThinkFormat]:
        """Return a row that opens its turn with a think block instead of without one.

        Raises ProgramError where a turn was not just opened, UnsupportedFeatureError where the
        template has no such block.
        """
        template = self._tokenizer.chat_template
        if template is None:
            raise ProgramError("thinking=True needs a chat template, and this model has none")
        opening = Segment(template.start(row.turns, "assistant"), True)
        before, is_opened = row.run, True
        if opening.text:
            is_opened = before is not None and before.segment == opening
            before = before and before.before
        if row.role != "assistant" or row.has_content or not is_opened:
            raise ProgramError(
                "thinking=True: a think block comes first in an assistant turn: append the gen "
                "right after the turn's beginning"
            )
        form = template.thinking(row.turns)
        return replace(row, run=_appended(before, Segment(form.start, True))), form

    def default_system(self, row: TokenRow, role: str) -> str:
        """Return the system turn that the template adds before a turn of `role`; '' for none."""
        template = self._tokenizer.chat_template
        if template is None or row.turns or role == "system":
            return ""
        added = template.default_system or ""
        return added if added in template.start((), role) else ""

    def end_role(self, row: TokenRow) -> TokenRow:
        """Close the open turn with the template's text."""
        template = self._tokenizer.chat_template
        if template is None or row.role is None:
            raise ProgramError("there is no open turn to end")
        closed = row.then(template.end(row.turns, row.role), trusted=True)
        return replace(closed, turns=(*row.turns, row.role), role=None, has_content=False)

    def append_sample(self, row: TokenRow, sample: Sample) -> TokenRow:
        """Append what a gen made; see `append_generated`."""
        kept = sample.token_ids[: sample.num_kept]
        if kept and sample.thinking is not None:
            row, _ = self.start_thinking(row)
        return self.append_generated(row, kept, sample.text, sample.residue, sample.num_replaced)

    def append_generated(
        self,
        row: TokenRow,
        kept: Sequence[int],
        text: str,
        residue: str,
        num_replaced: int = 0,
    ) -> TokenRow:
        """Append sampled ids that stay as they are (rule 9); `residue` joins the next run.

        They come in place of the row's last `num_replaced` tokens. A generation that keeps no token
        leaves the literal run open.
        """
        has_content = row.has_content or bool(text)
        if not kept:
            return replace(self.append_text(row, residue), has_content=has_content)
        ids = (*self.back_off(self.encode(row), num_replaced), *kept)
        frozen = replace(row, ids=ids, run=None, has_content=has_content)
        return frozen.then(residue, trusted=False)

    def freeze(self, row: TokenRow, ids: Sequence[int], text: str) -> TokenRow:
        """Replace the row's ids by `ids`, which hold everything up to and with `text`."""
        has_content = row.has_content or bool(text)
        return replace(row, ids=tuple(ids), run=None, has_content=has_content)

    def encode(self, row: TokenRow, then: str = "") -> list[int]:
        """Return the ids of the row followed by literal text, with BOS once at the start.

        An empty row is one BOS token (or EOS, where the model has no BOS): a model can't be
        asked for what follows nothing.
        """
        whole = row.then(then, trusted=False)
        self._check_length(whole)
        encoded = self._tokenizer.encode_run(whole.segments)
        return [*row.ids, *encoded] if row.ids else self._started(encoded)

    def back_off(self, ids: list[int], num_tokens: int) -> list[int]:
        """Return a row's ids without the last ones; a row that loses all is an empty one."""
        return self._started(ids[:-num_tokens]) if num_tokens else ids

    def literal_end(self, row: TokenRow) -> str:
        """Return the text at the row's end that no template and no generation wrote."""
        literal = takewhile(lambda segment: not segment.trusted, row.run or ())
        return "".join(reversed([segment.text for segment in literal]))

    def encode_each(self, row: TokenRow, thens: Sequence[str]) -> list[list[int]]:
        """Return what `encode` does for each of many continuations, at the cost of their ends.

        Only the end of the literal run, which a continuation can change, is encoded again.
        """
        self._check_length(row)
        tails = self._tokenizer.encode_run_then(row.segments, thens)
        if row.ids:
            return [[*row.ids, *ids] for ids in tails]
        return [self._started(ids) for ids in tails]

    def with_terminator(self, op: Select, row: TokenRow, rows: list[list[int]]) -> list[list[int]]:
        """Return the rows to score: with a terminator where a choice begins another (rule 11).

        `rows` are the row with each choice. Raises ProgramError where a terminator is missing.
        """
        if op.terminator is not None:
            return self.encode_each(row, [choice + op.terminator for choice in op.choices])
        if beginning_choice(op.choices) is None:
            return rows
        end = self._tokenizer.end_of_turn_id
        if row.role is None or end is None:
            raise ProgramError(
                f"select {op.name!r}: a choice is empty or begins another one, so the end of a "
                "choice has to be scored: select inside a role, or give terminator="
            )
        return [[*ids, end] for ids in rows]

    def _check_length(self, row: TokenRow) -> None:
        num_chars = 0 if row.run is None else row.run.num_chars
        least = len(row.ids) + self._tokenizer.fewest_ids(num_chars)
        if self._max_seq_len is not None and least > self._max_seq_len:
            raise RequestRejectedError(
                f"prompt has {num_chars:,} characters of text, which are {least:,} tokens at "
                f"least; this engine takes {self._max_seq_len - 1:,} and one more: "
                "shorten it, or raise max_seq_len, by default the most that the model takes",
                reason="too_long",
            )

    def _started(self, encoded: list[int]) -> list[int]:
        """Put BOS before a row that starts here."""
        bos = self._tokenizer.bos_id
        if self._tokenizer.add_bos and bos is not None and encoded[:1] != [bos]:
            encoded = [bos, *encoded]
        return encoded or [self.first_id]

    @property
    def first_id(self) -> int:
        """The id that an otherwise empty row starts with."""
        bos = self._tokenizer.bos_id
        return bos if bos is not None else min(self._tokenizer.eos_ids)
