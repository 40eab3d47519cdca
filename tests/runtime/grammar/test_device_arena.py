"""Automata in one table: they keep apart, make way for each other, and step as on the host."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from umbel.kernels import RowMasks
from umbel.kernels.triton import dfa_step, greedy
from umbel.lang.constraints import Regex
from umbel.runtime.grammar import GrammarCompiler
from umbel.runtime.grammar.byte_dfa import START
from umbel.runtime.grammar.device_arena import FREE, DeviceArena
from umbel.runtime.grammar.token_dfa import TokenDFA

from .vocabularies import EOS, abc_vocabulary
from .walks import mask

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PATTERNS = ["a+", "(ab|c)*", "[abc]{2,5}", "abc|cab|b", "(a?b?c?){3}", "c{1,9}", "ab(c|ab)*"]


@pytest.fixture(scope="module")
def grammars() -> Iterator[list[TokenDFA]]:
    compiler = GrammarCompiler(abc_vocabulary())
    yield [_compiled(compiler, pattern) for pattern in PATTERNS]
    compiler.close()


def _compiled(compiler: GrammarCompiler, pattern: str) -> TokenDFA:
    grammar = compiler.compile(Regex(pattern), "umbel-dfa")
    assert isinstance(grammar, TokenDFA)
    return grammar


def stepped(
    arena: DeviceArena, places: Sequence[int], last: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Return the states of rows that go on from these places."""
    sources = -1 - torch.tensor(places, dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(sources)
    dfa_step(sources, last, ids, arena.transitions, arena.tokens, out)
    return out


def test_rows_follow_the_host_matchers_token_by_token(grammars: list[TokenDFA]) -> None:
    rng = random.Random(1)
    vocabulary = grammars[0].vocabulary
    arena = DeviceArena(vocabulary, DEVICE, 200)
    matchers = [grammar.matcher() for grammar in grammars]
    bases = [arena.hold(grammar) for grammar in grammars]
    starts = [base + m.state for base, m in zip(bases, matchers, strict=True) if base is not None]
    assert len(starts) == len(grammars)
    states = torch.tensor([*starts, FREE], dtype=torch.int32, device=DEVICE)
    for _ in range(12):
        drawn = []
        for matcher in matchers:
            token_id = rng.choice(sorted(mask(matcher, vocabulary)))
            if token_id not in vocabulary.eos_ids:
                assert matcher.accept(token_id)
            drawn.append(token_id)
        ids = torch.tensor([*drawn, 5], device=DEVICE)
        states = stepped(arena, range(len(ids)), states, ids)
        for matcher, base, state in zip(matchers, bases, states.tolist(), strict=False):
            assert base is not None
            assert state == base + matcher.state
            row = arena.rows[state].cpu().numpy().copy()
            expected = row.copy()
            matcher.fill(expected)
            assert (row == expected).all()
        assert states[-1] == FREE


def test_rows_go_on_from_any_place_or_from_the_state_given(grammars: list[TokenDFA]) -> None:
    vocabulary = grammars[0].vocabulary
    arena = DeviceArena(vocabulary, DEVICE, 50)
    base = arena.hold(grammars[3])  # abc|cab|b
    assert base is not None
    grammar = grammars[3]
    a, b = (vocabulary.encode(text)[0] for text in "ab")
    last = torch.tensor([base + START, FREE, base + START], dtype=torch.int32, device=DEVICE)
    states = stepped(arena, [2, 0, 1], last, torch.tensor([a, a, b], device=DEVICE))
    assert states.tolist() == [base + grammar.step(START, b), base + grammar.step(START, a), FREE]
    sources = torch.tensor([base + 3, -1, FREE], dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(sources)
    ids = torch.tensor([EOS], device=DEVICE)  # a token without bytes
    dfa_step(sources, last, ids, arena.transitions, arena.tokens, out)
    assert out.tolist() == [base + 3, base + START, FREE]


def test_sampling_reads_the_masks_by_state(grammars: list[TokenDFA]) -> None:
    vocabulary = grammars[0].vocabulary
    arena = DeviceArena(vocabulary, DEVICE, 50)
    base = arena.hold(grammars[0])  # a+
    assert base is not None
    logits = torch.zeros(2, vocabulary.size, device=DEVICE)
    logits[:, vocabulary.encode("b")[0]] = 2.0
    logits[:, vocabulary.encode("aa")[0]] = 1.0
    states = torch.tensor([base + 1, FREE], dtype=torch.int32, device=DEVICE)
    ids = greedy(logits, arena.masks(states))
    assert ids.tolist() == [vocabulary.encode("aa")[0], vocabulary.encode("b")[0]]


def test_masks_are_those_of_the_table_given(grammars: list[TokenDFA]) -> None:
    table = torch.tensor([[0b0110], [-1]], dtype=torch.int32, device=DEVICE)
    logits = torch.tensor([[9.0, 1.0, 2.0, 8.0]] * 2, device=DEVICE)
    states = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    assert greedy(logits, RowMasks(table, states)).tolist() == [2, 0]


def test_a_grammar_that_is_larger_than_the_table_has_no_room(grammars: list[TokenDFA]) -> None:
    arena = DeviceArena(grammars[0].vocabulary, DEVICE, 3)
    assert arena.hold(grammars[5]) is None
    arena.check()


SIZE = 30


class ArenaMachine(RuleBasedStateMachine):
    """Holds and releases at random, against a plain record of who holds what."""

    compiled: list[TokenDFA]

    def __init__(self) -> None:
        super().__init__()
        self.arena = DeviceArena(self.compiled[0].vocabulary, DEVICE, SIZE)
        self.held: list[tuple[TokenDFA, int]] = []

    @rule(index=st.integers(0, len(PATTERNS) - 1))
    def hold(self, index: int) -> None:
        grammar = self.compiled[index]
        base = self.arena.hold(grammar)
        if base is not None:
            self.held.append((grammar, base))
            return
        distinct = {id(g): len(g.transitions) for g, _ in self.held}
        assert id(grammar) not in distinct, "what is held has room already"
        # held spans may lie so that no gap is long enough, but an empty table always has one
        assert distinct or len(grammar.transitions) > SIZE

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        grammar, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.arena.release(grammar)

    @invariant()
    def what_is_held_is_there_and_has_not_moved(self) -> None:
        self.arena.check()
        assert 0 <= self.arena.num_free <= SIZE
        assert self.arena.num_held == len(self.held)
        for grammar, base in self.held:
            rows = self.arena.rows[base : base + len(grammar.rows)].cpu().numpy()
            assert (rows == grammar.rows).all()
            moved = self.arena.transitions[base : base + len(grammar.transitions)].cpu().numpy()
            assert (moved - base == grammar.transitions).all()


def test_holding_and_releasing_keeps_grammars_apart(grammars: list[TokenDFA]) -> None:
    machine = type("Machine", (ArenaMachine,), {"compiled": grammars})
    case = machine.TestCase  # type: ignore[attr-defined]
    case.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
    case().runTest()
