"""Where a gen's samples begin: their prompt, what they write before the value, their tasks.

Knows rows and one node at a time; nothing of runs, of the queue or of what comes out.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from umbel.lang.constraints import Constraint
from umbel.lang.errors import ProgramError, UmbelError, UnsupportedFeatureError
from umbel.lang.ir import Gen

from .detokenizer import IncrementalDetokenizer
from .gen_task import GenTask, Opening, end_ids
from .grammar.matcher import CompiledGrammar
from .healing import HealedOpening, Healing, TokenPrefixes
from .program_run import NodeTask
from .prompt_scores import PromptScores
from .request import check_length
from .sampling import SamplingRow
from .stop_matcher import StopMatcher
from .thinking import ThinkingOpening
from .token_row import RowBuilder, TokenRow
from .tokenizer import Segment, Tokenizer

_MAX_HEALING_BYTES = 16 * 2**20  # a row of bits for each place in the removed bytes
_HealingKey = tuple[tuple[int, ...], Constraint | None]


@dataclass(frozen=True, slots=True)
class _Start:
    """The prompt of a node's samples, and how they come to where their values begin."""

    prompt: list[int]
    open: Callable[[], Opening | None] = lambda: None
    max_before: int = 0  # tokens that hold nothing of the value
    num_replaced: int = 0  # of the row's last tokens: healing samples their text again


class GenStarter:
    """Makes the samples of gens that may run."""

    def __init__(self, tokenizer: Tokenizer, rows: RowBuilder, max_seq_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = tokenizer.vocabulary()
        self._eos_ids = frozenset(tokenizer.eos_ids)
        self._rows = rows
        self._max_seq_len = max_seq_len
        self._lock = threading.Lock()
        self._healings: OrderedDict[_HealingKey, Healing] = OrderedDict()

    @cached_property
    def _prefixes(self) -> TokenPrefixes:
        return TokenPrefixes(self._vocabulary)

    def begin(self, task: NodeTask, request_ids: Iterable[int]) -> Iterator[GenTask]:
        """Yield one GenTask per sample, with its request; the caller queues them.

        Raises RequestRejectedError for a prompt that leaves no room for a token.
        """
        op = task.node.op
        assert isinstance(op, Gen)
        start = self._start(op, task)
        task.prompt_tokens = len(start.prompt)
        most = len(start.prompt) + start.max_before + op.sampling.max_tokens
        limit = min(most, self._max_seq_len)
        penalised = start.prompt if op.sampling.repetition_penalty != 1.0 else []
        prompt_ids = np.unique(np.asarray(penalised, np.int64))
        ending = end_ids(op, self._eos_ids)
        for index, request_id in zip(range(op.n), request_ids, strict=False):
            yield GenTask(
                gen=op,
                request=task.new_request(request_id, list(start.prompt), limit),
                row=SamplingRow(
                    params=op.sampling,
                    seed=task.seed(op.sampling.seed, index),
                    end_ids=sorted(ending),
                    prompt_ids=prompt_ids,
                ),
                detokenizer=IncrementalDetokenizer(self._vocabulary.token_bytes),
                stops=StopMatcher(op.sampling.stop, op.sampling.stop_regex),
                end_ids=ending,
                encode=self._vocabulary.encode,
                matcher=None if task.grammar is None else task.grammar.matcher(),
                sample_index=index,
                opening=start.open(),
                num_replaced=start.num_replaced,
            )

    def scores_of(
        self, gen: GenTask, done: Callable[[], None], failed: Callable[[UmbelError], None]
    ) -> PromptScores | None:
        """Return where the scores of a gen's prompt go, if it asks for them and there are any."""
        sampling, prompt = gen.gen.sampling, list(gen.request.token_ids)
        if not sampling.prompt_logprobs or len(prompt) < 2:
            return None
        num_top = min(sampling.top_logprobs, self._vocabulary.size)
        return PromptScores(prompt, num_top, done, failed)

    def healing_of(self, task: NodeTask) -> Callable[[], Healing | None] | None:
        """Return the work, for any thread, that gives `task.healing`; None where there is none."""
        op = task.node.op
        assert isinstance(op, Gen)
        if not op.heal:
            return None
        literal = self._rows.literal_end(task.row).encode()
        own = self._rows.encode(task.row)[len(task.row.ids) :]
        grammar = task.grammar

        def heal() -> Healing | None:
            count = self._prefixes.num_to_back_off(own, literal)
            return self._healed(tuple(own[-count:]), op.constraint, grammar) if count else None

        return heal

    def _healed(
        self, ids: tuple[int, ...], constraint: Constraint | None, grammar: CompiledGrammar | None
    ) -> Healing:
        """Return a healing that is kept: the rows of a batch end alike."""
        key = (ids, constraint)
        with self._lock:
            if (found := self._healings.get(key)) is not None:
                self._healings.move_to_end(key)
                return found
        start = None if grammar is None else grammar.matcher()
        made = Healing(self._prefixes, ids, start)
        with self._lock:
            self._healings[key] = made
            while sum(kept.num_bytes for kept in self._healings.values()) > _MAX_HEALING_BYTES:
                self._healings.popitem(last=False)
        return made

    def _start(self, op: Gen, task: NodeTask) -> _Start:
        if op.thinking:
            return self._thinking(op, task.row)
        prompt = self._encode(task.row)
        healing = task.healing
        if healing is None:
            return _Start(prompt)
        count = len(healing.backed_off)
        return _Start(
            self._rows.back_off(prompt, count),
            lambda: HealedOpening(healing, self._vocabulary.token_bytes),
            max_before=len(healing.removed),  # each token has a byte at least
            num_replaced=count,
        )

    def _thinking(self, op: Gen, row: TokenRow) -> _Start:
        thinking, form = self._rows.start_thinking(row)
        close = self._tokenizer.encode_run([Segment(form.close, True)])
        if len(close) != 1:
            raise UnsupportedFeatureError(
                backend="local",
                feature="thinking=True",
                hint=f"the model's vocabulary has no token for {form.close!r}, so it can't be told "
                "where a think block ends",
            )
        ending = (*close, *self._tokenizer.encode_run([Segment(form.after, True)]))
        if op.max_thinking_tokens < len(ending):
            raise ProgramError(
                f"gen {op.name!r}: max_thinking_tokens={op.max_thinking_tokens} leaves no room for "
                f"the end of the block, which takes {len(ending)} tokens: raise it"
            )
        prompt = self._encode(thinking)
        room = self._max_seq_len - len(prompt) - op.sampling.max_tokens  # the value comes first
        most = max(min(op.max_thinking_tokens, room), len(ending))
        return _Start(
            prompt, lambda: ThinkingOpening(self._vocabulary, ending, most), max_before=most
        )

    def _encode(self, row: TokenRow) -> list[int]:
        prompt = self._rows.encode(row)
        check_length(len(prompt) + 1, self._max_seq_len)
        return prompt
