"""A regex tree as a minimal automaton over UTF-8 bytes; knows no tokens.

Thompson's construction, then subsets, then Moore's refinement on hashed signatures (checked
exactly at the end). Sizes and time are bounded: what doesn't fit raises TooManyStatesError, and
the caller takes an engine that needs no automaton.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, assert_never

import numpy as np
import numpy.typing as npt

from umbel.lang.regex_syntax import (
    Alternate,
    Anchor,
    Both,
    Chars,
    Concat,
    Node,
    Ranges,
    Repeat,
    Without,
)

DEAD = 0
START = 1

ByteRange = tuple[int, int]


class TooManyStatesError(ValueError):
    """The automaton passes its budget of states: on any machine, however busy it is."""


class BuildTimeoutError(ValueError):
    """The construction passes its deadline; another time the same one may not."""


@dataclass(slots=True)
class Budget:
    """How far one construction may go; used up by it.

    States before minimising, and work: a unit is about what following one NFA edge takes (some
    2 million are a few seconds). The clock is a last resort, for a machine that is far too slow.
    """

    max_states: int = 8_192
    max_nfa_states: int = 64_000
    work: int = 2_000_000
    deadline: float = float("inf")  # time.monotonic()

    def spend(self, work: int) -> None:
        """Take work off what is left. Raises TooManyStatesError when there is none."""
        self.work -= work
        if self.work < 0:
            raise TooManyStatesError("the automaton takes too much work")

    def check_time(self) -> None:
        """Raise BuildTimeoutError when the deadline has passed."""
        if time.monotonic() > self.deadline:
            raise BuildTimeoutError("building the automaton")


@dataclass(frozen=True, slots=True, eq=False)
class ByteDFA:
    """States are 0 (dead: nothing can match any more), 1 (start), and so on.

    Every state but 0 can still reach an accepting one, unless the language is empty: then only
    the dead state and a start without transitions are left.
    """

    transitions: npt.NDArray[np.int32]  # [num_states, 256]
    accepting: npt.NDArray[np.bool_]  # [num_states]

    @property
    def num_states(self) -> int:
        """States, the dead one included."""
        return len(self.accepting)

    @property
    def is_empty(self) -> bool:
        """Whether no text matches."""
        return not self.accepting.any()

    def step(self, state: int, data: bytes) -> int:
        """Return the state after `data`; DEAD if it can't follow."""
        for byte in data:
            state = int(self.transitions[state, byte])
        return state

    def matches(self, data: bytes) -> bool:
        """Whether the whole of `data` matches."""
        return bool(self.accepting[self.step(START, data)])


def build_dfa(node: Node, budget: Budget) -> ByteDFA:
    """Return the minimal automaton of a regex. Raises TooManyStatesError."""
    return _determinise(_Nfa(budget).build(node), budget)


def without_bytes(dfa: ByteDFA, usable: npt.NDArray[np.bool_], budget: Budget) -> ByteDFA:
    """Return the automaton of the texts that hold usable bytes [256] only."""
    if usable[(dfa.transitions != DEAD).any(axis=0)].all():
        return dfa
    transitions = np.where(usable[None, :], dfa.transitions, DEAD).astype(np.int32)
    return _minimise(_trim(transitions, dfa.accepting), budget)


def utf8_ranges(ranges: Ranges) -> list[tuple[ByteRange, ...]]:
    """Return the code point ranges as sequences of byte ranges.

    Each sequence stands for the product of its ranges; together they cover exactly the encodings.
    """
    result: list[tuple[ByteRange, ...]] = []
    for low, high in ranges:
        for floor, ceiling in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, 0x10FFFF)):
            if max(low, floor) <= min(high, ceiling):
                first = chr(max(low, floor)).encode()
                last = chr(min(high, ceiling)).encode()
                result += _byte_sequences(first, last)
    return result


def _byte_sequences(first: bytes, last: bytes) -> list[tuple[ByteRange, ...]]:
    """Split [first, last], encodings of one length, into products of byte ranges."""
    if len(first) == 1:
        return [((first[0], last[0]),)]
    low_tail, high_tail = b"\x80" * (len(first) - 1), b"\xbf" * (len(first) - 1)
    if first[0] == last[0]:
        head = ((first[0], first[0]),)
        return [head + tail for tail in _byte_sequences(first[1:], last[1:])]
    result: list[tuple[ByteRange, ...]] = []
    start, end = first[0], last[0]
    if first[1:] != low_tail:
        result += [((start, start), *t) for t in _byte_sequences(first[1:], high_tail)]
        start += 1
    ending: list[tuple[ByteRange, ...]] = []
    if last[1:] != high_tail:
        ending = [((end, end), *t) for t in _byte_sequences(low_tail, last[1:])]
        end -= 1
    if start <= end:
        result.append(((start, end), *[(0x80, 0xBF)] * len(low_tail)))
    return result + ending


class _Nfa:
    """An automaton with empty moves, built from the end: each fragment is given its exit."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.empty: list[list[int]] = []
        self.edges: list[list[tuple[int, int, int]]] = []  # (low byte, high byte, target)
        self._sequences: dict[Ranges, list[tuple[ByteRange, ...]]] = {}
        self._products: dict[int, ByteDFA] = {}
        self._fragments: dict[tuple[int, int], int] = {}  # (part by identity, exit): its start
        self.final = self._state()
        self.start = self.final

    def build(self, node: Node) -> _Nfa:
        self.start = self._fragment(node, self.final)
        return self

    def _state(self, *empty: int) -> int:
        if len(self.empty) >= self.budget.max_nfa_states:
            raise TooManyStatesError(f"more than {self.budget.max_nfa_states} states before sets")
        if not len(self.empty) % 4096:
            self.budget.check_time()
        self.empty.append(list(empty))
        self.edges.append([])
        return len(self.empty) - 1

    def _fragment(self, node: Node, exit_state: int) -> int:
        """Return the start of states that match `node` and go on to `exit_state`.

        Parts that the tree shares and that end alike are the same states: the tails of an object
        with optional keys are built once.
        """
        key = id(node), exit_state
        if key not in self._fragments:
            self._fragments[key] = self._new_fragment(node, exit_state)
        return self._fragments[key]

    def _new_fragment(self, node: Node, exit_state: int) -> int:
        match node:
            case Chars(ranges):
                return self._chars(ranges, exit_state)
            case Concat(parts):
                for part in reversed(parts):
                    exit_state = self._fragment(part, exit_state)
                return exit_state
            case Alternate(options):
                return self._state(*[self._fragment(o, exit_state) for o in options])
            case Repeat(body, low, high):
                return self._repeat(body, low, high, exit_state)
            case Both(left, right) | Without(left, right):
                return self._product(node, left, right, exit_state)
            case Anchor():
                raise AssertionError("anchors are resolved by the parser")
            case _:
                assert_never(node)

    def _chars(self, ranges: Ranges, exit_state: int) -> int:
        if ranges not in self._sequences:
            self._sequences[ranges] = utf8_ranges(ranges)
        start = self._state()
        tails: dict[tuple[ByteRange, ...], int] = {(): exit_state}
        for sequence in self._sequences[ranges]:
            for i in range(len(sequence) - 1, 0, -1):
                tail = sequence[i:]
                if tail not in tails:
                    tails[tail] = self._state()
                    self.edges[tails[tail]].append((*sequence[i], tails[sequence[i + 1 :]]))
            self.edges[start].append((*sequence[0], tails[sequence[1:]]))
        return start

    def _repeat(self, body: Node, low: int, high: int | None, exit_state: int) -> int:
        after = exit_state
        if high is None:
            loop = self._state(exit_state)
            self.empty[loop].append(self._fragment(body, loop))
            after = loop
        else:
            for _ in range(high - low):
                after = self._state(exit_state, self._fragment(body, after))
        for _ in range(low):
            after = self._fragment(body, after)
        return after

    def _product(self, node: Both | Without, left: Node, right: Node, exit_state: int) -> int:
        if id(node) not in self._products:
            sides = (build_dfa(left, self.budget), build_dfa(right, self.budget))
            self._products[id(node)] = _product(*sides, isinstance(node, Both), self.budget)
        dfa = self._products[id(node)]
        states = [self._state() for _ in range(dfa.num_states)]
        for state in range(1, dfa.num_states):
            if dfa.accepting[state]:
                self.empty[states[state]].append(exit_state)
            for low, high, target in _runs(dfa.transitions[state]):
                self.edges[states[state]].append((low, high, states[target]))
        return states[START]


def _runs(row: npt.NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """Return a row of transitions as (low byte, high byte, target), without the dead ones."""
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    ends = np.append(starts[1:], 256) - 1
    return [
        (low, high, target)
        for low, high, target in zip(
            starts.tolist(), ends.tolist(), row[starts].tolist(), strict=True
        )
        if target != DEAD
    ]


def _determinise(nfa: _Nfa, budget: Budget) -> ByteDFA:
    closures: dict[int, frozenset[int]] = {}

    def closure(state: int) -> frozenset[int]:
        """Return the states with edges (and the final one) that empty moves reach."""
        if state not in closures:
            seen, todo = {state}, [state]
            while todo:
                for after in nfa.empty[todo.pop()]:
                    if after not in seen:
                        seen.add(after)
                        todo.append(after)
            budget.spend(len(seen))
            closures[state] = frozenset(s for s in seen if nfa.edges[s] or s == nfa.final)
        return closures[state]

    def subset(targets: Iterable[int]) -> frozenset[int]:
        return frozenset().union(*[closure(t) for t in targets])

    first = closure(nfa.start)
    numbers = {frozenset[int](): DEAD, first: START}
    if not first:  # nothing can match
        numbers = {first: START}
    subsets = [frozenset[int](), first]
    by_targets: dict[frozenset[int], int] = {}
    rows = [np.zeros(256, np.int32)]
    at = START
    while at < len(subsets):
        if not at % 256:
            budget.check_time()
        budget.spend(10 + sum(len(nfa.edges[s]) for s in subsets[at]))
        row = np.zeros(256, np.int32)
        for low, high, targets in _moves(nfa, subsets[at]):
            budget.spend(len(targets) // 4)
            number = by_targets.get(targets)
            if number is None:
                found = subset(targets)
                budget.spend(len(found))
                number = numbers.setdefault(found, len(subsets))
                if number == len(subsets):
                    subsets.append(found)
                    if number > budget.max_states:
                        raise TooManyStatesError(f"more than {budget.max_states} states")
                by_targets[targets] = number
            row[low:high] = number
        rows.append(row)
        at += 1
    accepting = np.array([nfa.final in s for s in subsets], np.bool_)
    return _minimise(_trim(np.stack(rows), accepting), budget)


def _moves(nfa: _Nfa, states: frozenset[int]) -> list[tuple[int, int, frozenset[int]]]:
    """Return (first byte, byte after the last, NFA states reached) for each stretch of bytes."""
    events: dict[int, tuple[list[int], list[int]]] = {}
    for state in states:
        for low, high, target in nfa.edges[state]:
            events.setdefault(low, ([], []))[0].append(target)
            events.setdefault(high + 1, ([], []))[1].append(target)
    result: list[tuple[int, int, frozenset[int]]] = []
    active: dict[int, int] = {}
    start = 0
    for byte in sorted(events):
        if active:
            result.append((start, byte, frozenset(active)))
        added, removed = events[byte]
        for target in added:
            active[target] = active.get(target, 0) + 1
        for target in removed:
            active[target] -= 1
            if not active[target]:
                del active[target]
        start = byte
    return result


class _Trimmed(NamedTuple):
    """An automaton whose moves all lead on, and a first guess at which states are the same."""

    transitions: npt.NDArray[np.int32]
    accepting: npt.NDArray[np.bool_]
    classes: npt.NDArray[np.int64]  # states in different classes are different


def _trim(transitions: npt.NDArray[np.int32], accepting: npt.NDArray[np.bool_]) -> _Trimmed:
    """Send moves into states that can't reach an accepting one to the dead state.

    Equal states have equal shortest and longest texts left to go, which tells the states of a
    counter apart at once; refinement alone would take a round for each.
    """
    num_states = len(accepting)
    after = [frozenset(np.unique(row).tolist()) - {DEAD} for row in transitions]
    before: list[list[int]] = [[] for _ in after]
    for state, targets in enumerate(after):
        for target in targets:
            before[target].append(state)
    shortest = np.full(num_states, -1, np.int64)
    reached = np.flatnonzero(accepting).tolist()
    shortest[reached] = 0
    for state in reached:  # grows while it is walked: breadth first
        for earlier in before[state]:
            if shortest[earlier] < 0:
                shortest[earlier] = shortest[state] + 1
                reached.append(earlier)
    longest = np.full(num_states, -1, np.int64)  # stays -1 where there is no bound
    is_alive = shortest >= 0
    open_moves = [sum(bool(is_alive[t]) for t in targets) for targets in after]
    settled = [s for s in reached if not open_moves[s]]
    for state in settled:
        longest[state] = max((longest[t] + 1 for t in after[state] if is_alive[t]), default=0)
        for earlier in before[state]:
            open_moves[earlier] -= 1
            if not open_moves[earlier] and is_alive[earlier]:
                settled.append(earlier)
    keys = np.stack([shortest, longest], axis=1)
    keys[DEAD] = -2  # a class of its own, so that it stays number 0
    _, classes = np.unique(keys, axis=0, return_inverse=True)
    alive_moves = np.where(is_alive[transitions], transitions, DEAD).astype(np.int32)
    return _Trimmed(alive_moves, accepting, classes.reshape(-1))


def _minimise(trimmed: _Trimmed, budget: Budget) -> ByteDFA:
    """Merge the states that no text tells apart."""
    transitions, accepting, classes = trimmed
    num_states = len(accepting)
    _, columns = np.unique(transitions, axis=1, return_index=True)
    reduced = transitions[:, columns]  # [num_states, distinct columns]
    random = np.random.default_rng(0)
    weights = random.integers(1, 2**63, len(columns), np.uint64) | np.uint64(1)
    names = random.integers(0, 2**63, num_states + 1, np.uint64)
    num_classes = int(classes.max()) + 1
    while True:
        budget.spend(reduced.size // 50 + num_states // 5)
        budget.check_time()
        signatures = (names[classes][reduced] * weights).sum(axis=1, dtype=np.uint64)
        signatures += names[classes] * np.uint64(0x9E3779B97F4A7C15)
        _, classes = np.unique(signatures, return_inverse=True)
        found = int(classes.max()) + 1
        if found in (num_classes, num_states):
            break
        num_classes = found
    order = np.unique(classes, return_index=True)[1]  # one state of each class
    same = classes[reduced] == classes[reduced[order[classes]]]
    if not same.all() or (accepting != accepting[order[classes]]).any():
        raise AssertionError("hash collision while minimising")
    # number the classes by their first state; the dead state is the first of all
    by_first = np.argsort(order, kind="stable")
    number = np.empty(len(order), np.int32)
    number[by_first] = np.arange(len(order), dtype=np.int32)
    representatives = order[by_first]
    dfa = ByteDFA(number[classes[transitions[representatives]]], accepting[representatives])
    return _reachable(dfa)


def _reachable(dfa: ByteDFA) -> ByteDFA:
    """Drop the states that trimming cut off; number the rest breadth first."""
    if dfa.num_states == 1:  # the start is the dead state
        return ByteDFA(np.zeros((2, 256), np.int32), np.zeros(2, np.bool_))
    order, at = [DEAD, START], 1
    seen = set(order)
    while at < len(order):
        for target in dict.fromkeys(dfa.transitions[order[at]].tolist()):
            if target not in seen:
                seen.add(target)
                order.append(target)
        at += 1
    number = np.zeros(dfa.num_states, np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    return ByteDFA(number[dfa.transitions[order]], dfa.accepting[order])


def _product(left: ByteDFA, right: ByteDFA, is_both: bool, budget: Budget) -> ByteDFA:
    """Return the automaton of (left and right), or of (left and not right)."""
    width = right.num_states
    numbers = {START * width + START: START}
    pairs = [(DEAD, DEAD), (START, START)]
    rows = [np.zeros(256, np.int32)]
    at = START
    while at < len(pairs):
        if not at % 256:
            budget.check_time()
        first, second = pairs[at]
        keys = left.transitions[first].astype(np.int64) * width + right.transitions[second]
        keys[left.transitions[first] == DEAD] = DEAD
        if is_both:
            keys[right.transitions[second] == DEAD] = DEAD
        found, inverse = np.unique(keys, return_inverse=True)
        targets = np.zeros(len(found), np.int32)
        for i, key in enumerate(found.tolist()):
            if key:
                targets[i] = numbers.setdefault(key, len(pairs))
                if targets[i] == len(pairs):
                    pairs.append((key // width, key % width))
                    if len(pairs) > budget.max_states:
                        raise TooManyStatesError(f"more than {budget.max_states} states")
        rows.append(targets[inverse])
        at += 1
    accepting = [bool(left.accepting[a]) and bool(right.accepting[b]) == is_both for a, b in pairs]
    accepting[DEAD] = False
    return _minimise(_trim(np.stack(rows), np.array(accepting, np.bool_)), budget)
