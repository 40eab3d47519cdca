"""Tells the cache which places of running graphs will be gone on from.

A place is held from the end of the node that computed it (or of the first branch that left it, for
a stem of text) until its last reader has ended, or its run is over. Knows graphs and rows; nothing
of pages, nor of what the cache does about it.
"""

from __future__ import annotations

from umbel.lang.graph import RequestGraph

from .kv_cache import Holds
from .program_run import ProgramRun
from .token_row import RowBuilder


class LivePlaces:
    """Follows the readers of every run's places. Called on the engine's thread."""

    def __init__(self, holds: Holds, rows: RowBuilder) -> None:
        self._holds = holds
        self._rows = rows

    def extend(self, run: ProgramRun, piece: RequestGraph) -> None:
        """Note that a run's graph has grown, before any of it starts."""
        extension = run.readers.add(piece.nodes)
        for place in extension.read:
            steps = run.readers.steps_left(place)
            if steps is not None:
                self._holds.expect(run.run_id, place, steps)
        self._drop(run, extension.unread)

    def computed(self, run: ProgramRun, node_id: int) -> None:
        """Note that a gen or select has ended, once its place is known and its KV is cached."""
        self._drop(run, run.readers.ended(node_id))
        place = run.readers.place_read(node_id)
        if place is None:
            return
        at = run.places[place]
        if at.row is None:  # several samples: what they share
            at = run.place_after(run.state.nodes[place].parent)
        if at.row is not None:
            tokens = self._rows.encode(at.row)
            self._holds.hold(run.run_id, place, tokens, run.readers.steps_left(place))

    def ended(self, run: ProgramRun, node_id: int, *, failed: bool = False) -> None:
        """Note that a node has ended. Idempotent."""
        self._drop(run, run.readers.ended(node_id, failed=failed))

    def close(self, run: ProgramRun) -> None:
        """Note that a run's graph grows no more."""
        self._drop(run, run.readers.close())

    def over(self, run: ProgramRun) -> None:
        """Note that a run reads nothing any more."""
        self._holds.drop_program(run.run_id)

    def _drop(self, run: ProgramRun, places: list[int]) -> None:
        for place in places:
            self._holds.drop(run.run_id, place)
