"""Finds where a node ends: the row that its text, its turn, its sample or its choice leads to.

Carries out the nodes that need no model. Knows rows and templates; no requests and no events.
"""

from __future__ import annotations

from typing import assert_never

from umbel.lang.errors import ProgramError, UnsupportedFeatureError
from umbel.lang.graph import GraphNode
from umbel.lang.ir import Branch, Image, Join, Pick, RoleEnd, RoleStart, Select, Text
from umbel.lang.results import NodeResult

from .program_run import Place, ProgramRun
from .token_row import RowBuilder, TokenRow

#: operations that end as soon as they are ready
ModelFree = Text | RoleStart | RoleEnd | Branch | Join | Pick | Image


class NodePlaces:
    """Writes `ProgramRun.places`. Raises ProgramError for what cannot be appended."""

    def __init__(self, rows: RowBuilder) -> None:
        self._rows = rows

    def append(self, run: ProgramRun, node: GraphNode, op: ModelFree, before: Place) -> NodeResult:
        """Append what a ready node adds, and return its result."""
        row = before.row or TokenRow()
        match op:
            case Text():
                text = run.text_of(op)
                run.places[node.id] = before.moved(self._rows.append_text(row, text))
                return NodeResult(text=text)
            case RoleStart():
                added = self._rows.default_system(row, op.role)
                run.places[node.id] = before.moved(self._rows.start_role(row, op.role))
                # the template's text is the row's, not the program's
                return NodeResult(default_system=added)
            case RoleEnd():
                run.places[node.id] = before.moved(self._rows.end_role(row))
                return NodeResult()
            case Branch():
                run.places[node.id] = Place(row, before.depth, op.gang, run.starts_together(op))
                return NodeResult()
            case Join():
                result = run.state.join_result(node.id)
                run.places[node.id] = before.moved(self._rows.append_text(row, result.text))
                return result
            case Pick():
                return self._pick(run, node, op)
            case Image():
                raise UnsupportedFeatureError(backend="local", feature="images")
            case _:
                assert_never(op)

    def after_gen(
        self, run: ProgramRun, node: GraphNode, before: Place, result: NodeResult
    ) -> None:
        """Place a gen behind its sample; behind several of them is no row."""
        row: TokenRow | None = None
        if len(result.samples) == 1 and before.row is not None:
            row = self._rows.append_sample(before.row, result.samples[0])
        run.places[node.id] = before.deeper(row)

    def after_select(self, run: ProgramRun, node: GraphNode, before: Place, choice: str) -> None:
        """Place a select behind its choice."""
        assert isinstance(node.op, Select)
        assert before.row is not None
        if len(node.op.choices) == 1:  # no forward ran: the choice is literal text
            row = self._rows.append_text(before.row, choice)
        else:
            ids = self._rows.encode(before.row, then=choice)
            row = self._rows.freeze(before.row, ids, choice)
        run.places[node.id] = before.deeper(row)

    def _pick(self, run: ProgramRun, node: GraphNode, op: Pick) -> NodeResult:
        gen = None if node.parent is None else run.state.nodes[node.parent]
        samples = () if gen is None else run.state.results[gen.id].samples
        if gen is None or not 0 <= op.sample < len(samples):
            raise ProgramError(f"{node.label} picks sample {op.sample} of {len(samples)}")
        sample = samples[op.sample]
        before = run.place_after(gen.parent)
        assert before.row is not None
        run.places[node.id] = before.deeper(self._rows.append_sample(before.row, sample))
        return NodeResult(text=sample.text)
