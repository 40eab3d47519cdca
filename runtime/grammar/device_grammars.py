"""Which requests follow their automaton on the device, and where each stands; knows no batch.

The device steps by itself from one sample to the next. What it can't know is sent: where a value
begins, and where the host went on alone, over forced text or a pass that the request was not in.
"""

from __future__ import annotations

from typing import NamedTuple

from .device_arena import DeviceArena
from .matcher import GrammarMatcher
from .token_dfa import TokenDFA, TokenDFAMatcher


class _Held(NamedTuple):
    grammar: TokenDFA
    base: int | None  # None: there was no room when it asked


class DeviceGrammars:
    """Holds the grammars of running requests in a device's arena; without one, of none."""

    def __init__(self, arena: DeviceArena | None) -> None:
        self._arena = arena
        self._held: dict[int, _Held] = {}  # by request
        self.num_refused = 0  # requests that found no room

    def state(self, request_id: int, matcher: GrammarMatcher, last_place: int) -> int | None:
        """Return the state that masks a request's next token; None: the host has to mask it.

        `last_place` is that of the request among the samples before, where the device goes on from
        there: then -1 - last_place is returned, and the state is the one after that sample. -1: it
        does not. A request is held from its first call on, until it is released; one that finds no
        room is not asked for again.
        """
        if self._arena is None or not isinstance(matcher, TokenDFAMatcher):
            return None
        held = self._held.get(request_id)
        if held is None:
            held = _Held(matcher.grammar, self._arena.hold(matcher.grammar))
            self._held[request_id] = held
            self.num_refused += held.base is None
            last_place = -1  # the sample before was masked by the host, or not at all
        if held.base is None:
            return None
        return held.base + matcher.state if last_place < 0 else -1 - last_place

    def release(self, request_id: int) -> None:
        """Give back what a request holds, if it holds anything."""
        held = self._held.pop(request_id, None)
        if held is not None and held.base is not None:
            assert self._arena is not None
            self._arena.release(held.grammar)

    def close(self) -> None:
        """Let go of the arena and of all grammars: no request is masked by one any more."""
        self._arena = None
        self._held.clear()

    @property
    def num_held(self) -> int:
        """Requests that follow their automaton on the device."""
        arena = self._arena  # read once: another thread may be closing
        return 0 if arena is None else arena.num_held
