"""The state of an ended run as plain data, and back: what a results file keeps of a row.

Holds every node with its outcome and the typed values as they are, so that a state that was stored
reads as it did before. Knows no files; what it holds of a body is what the body named.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from .bindings import Binding, CaptureBinding, ListBinding, ValueBinding, values_in
from .ended_run import EndedRun, Outcome
from .errors import ProgramError, UmbelError, WireError
from .expressions import GenExpr, SelectExpr, ValueExpr
from .graph import GraphNode
from .ir import Gen, Select, Text
from .results import NodeResult
from .run_result import Result
from .sampling_params import SamplingParams
from .state import State
from .transcript import misfit
from .value_codec import decode_value, encode_value, pointer

R_co = TypeVar("R_co", covariant=True)
_NOTHING = NodeResult()


class StoredNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node and its outcome; without either it is one that only repeats its literal text."""

    node: GraphNode
    result: NodeResult | None = None
    error: WireError | None = None


class StoredExpr(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a gen or select says beyond its operation. `wrong` is why its text is not the type."""

    node: int
    label: str = ""
    append: bool = False
    is_typed: bool = False
    wrong: str = ""
    is_handle: bool = False  # the latest use of its expression


class StoredBinding(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a name stands for: one of the three."""

    node: int | None = None
    capture: tuple[int, ...] | None = None
    items: tuple[StoredBinding, ...] | None = None


class StoredState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A state of an ended run.

    `values` are the named values that can be read, as JSON; `unnamed` the typed ones of nodes that
    no name stands for. `types` tells what JSON does not (see `value_codec`).
    """

    values: dict[str, Any] = {}
    unnamed: dict[int, Any] = {}
    types: dict[str, str] = {}
    names: dict[str, StoredBinding] = {}
    exprs: tuple[StoredExpr, ...] = ()
    nodes: tuple[StoredNode, ...] = ()
    tail: int | None = None


def store_state(state: State) -> StoredState:
    """Return an ended run's state as data; raises ProgramError for a value that has no form."""
    run = state._run
    assert isinstance(run, EndedRun), "only what has ended is stored"
    values: dict[str, Any] = {}
    types: dict[str, str] = {}
    exprs: dict[int, StoredExpr] = {}
    names: dict[str, StoredBinding] = {}
    for key, binding in state._bound.items():
        for value in values_in(binding):
            if value.node not in exprs:
                exprs[value.node] = _store_expr(state, value)
        if isinstance(key, str):
            names[key] = _store_binding(binding)
            try:
                found = state[key]
            except UmbelError:
                continue  # its nodes say why
            values[key] = encode_value(found, pointer("/values", key), types)
    unnamed: dict[int, Any] = {}
    readable = {value.node for key in values for value in values_in(state._bound[key])}
    for key, binding in state._bound.items():
        for value in values_in(binding):
            expr = exprs[value.node]
            if isinstance(key, ValueExpr):
                exprs[value.node] = expr = msgspec.structs.replace(expr, is_handle=True)
            if expr.is_typed and value.node not in readable and value.node not in unnamed:
                unnamed[value.node] = encode_value(
                    state._read(value), f"/unnamed/{value.node}", types
                )
    nodes = tuple(map(_store_node, run.nodes, run.outcomes))
    return StoredState(values, unnamed, types, names, tuple(exprs.values()), nodes, state._tail)


def load_state(stored: StoredState) -> State:
    """Return the state as it was; raises ProgramError where a value's class has changed."""
    nodes = tuple(item.node for item in stored.nodes)
    run = EndedRun(nodes, tuple(map(_load_node, stored.nodes)))
    state = State(run)
    state._tail = stored.tail
    bound = {
        item.node: ValueBinding(item.node, _load_expr(item, nodes[item.node]))
        for item in stored.exprs
    }
    for item in stored.exprs:
        if item.is_handle:
            state._bound[bound[item.node].expr] = bound[item.node]
    cache: dict[Binding, Any] = {}
    typed = {item.node for item in stored.exprs if item.is_typed}
    for name, stored_binding in stored.names.items():
        state._bound[name] = binding = _load_binding(stored_binding, bound)
        if name not in stored.values:
            continue
        value = decode_value(stored.values[name], pointer("/values", name), stored.types)
        if isinstance(binding, ListBinding):
            cache.update(zip(binding.items, value, strict=True))
        else:
            cache[binding] = value
    for node, data in stored.unnamed.items():
        cache[bound[node]] = decode_value(data, f"/unnamed/{node}", stored.types)
    # texts are read from their nodes
    state._cache = {
        b: v for b, v in cache.items() if isinstance(b, ValueBinding) and b.node in typed
    }
    return state


class StoredResult(Result[R_co], Generic[R_co]):
    """A result that was read back. Expressions find the values that their like have made.

    `defaults` are the program's sampling defaults, which an expression's operation depends on.
    """

    __slots__ = ("_defaults",)

    def __init__(
        self,
        stored: StoredState,
        value: R_co | None,
        *,
        row: int,
        seed: int,
        attempt: int,
        defaults: SamplingParams | None,
    ) -> None:
        super().__init__(load_state(stored), value, row=row, seed=seed, attempt=attempt)
        self._defaults = defaults

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self._known(key))

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._known(key))

    def meta(self, key: str | ValueExpr[Any]) -> Any:
        """Return what is known of a value; see `State.meta`."""
        return super().meta(self._known(key))

    def _known(self, key: Any) -> Any:
        """Return the stored expression that does what `key` does; `key` itself if there is none."""
        if not isinstance(key, ValueExpr) or self.state is None:
            return key
        handles = [expr for expr in self.state._bound if isinstance(expr, ValueExpr)]
        op = key.op(self._defaults)
        found = [expr for expr in handles if expr.op(None) == op]
        if not found and key.name:  # an inlined program has sampling defaults of its own
            found = [expr for expr in handles if expr.name == key.name]
        if len(found) > 1:
            raise ProgramError(
                f"{key!r} was read back from a file, where {len(found)} expressions are like it: "
                "give each a name of its own, and read it by that"
            )
        return found[0] if found else key


class _Wrong:
    """The decoder of a value that did not fit its type: says again why."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __call__(self, text: str) -> Any:
        raise ValueError(self.why)


def _store_binding(binding: Binding) -> StoredBinding:
    match binding:
        case ValueBinding():
            return StoredBinding(node=binding.node)
        case CaptureBinding():
            return StoredBinding(capture=binding.nodes)
        case ListBinding():
            return StoredBinding(items=tuple(map(_store_binding, binding.items)))


def _load_binding(stored: StoredBinding, bound: dict[int, ValueBinding]) -> Binding:
    if stored.items is not None:
        items = [_load_binding(item, bound) for item in stored.items]
        return ListBinding(tuple(item for item in items if not isinstance(item, ListBinding)))
    if stored.capture is not None:
        return CaptureBinding(stored.capture)
    assert stored.node is not None, "a binding is one of the three"
    return bound[stored.node]


def _store_expr(state: State, value: ValueBinding) -> StoredExpr:
    expr, wrong, is_typed = value.expr, "", False
    if expr.decode is not None:
        try:
            state._read(value)
            is_typed = True
        except UmbelError as error:
            wrong = "" if error.__cause__ is None else misfit(error.__cause__)
    return StoredExpr(value.node, expr.label, expr.append, is_typed, wrong)


def _load_expr(stored: StoredExpr, node: GraphNode) -> ValueExpr[Any]:
    if isinstance(node.op, Select):
        return SelectExpr(node.op, append=stored.append)
    assert isinstance(node.op, Gen), "values are made by gens and selects"
    decode = _Wrong(stored.wrong) if stored.is_typed or stored.wrong else None
    return GenExpr(node.op, {}, append=stored.append, decode=decode, label=stored.label)


def _store_node(node: GraphNode, outcome: Outcome) -> StoredNode:
    if isinstance(outcome, WireError):
        return StoredNode(node, error=outcome)
    return StoredNode(node, None if outcome == _literal(node) else outcome)


def _load_node(stored: StoredNode) -> Outcome:
    return stored.error or stored.result or _literal(stored.node)


def _literal(node: GraphNode) -> NodeResult:
    op = node.op
    if isinstance(op, Text) and len(op.parts) == 1 and isinstance(op.parts[0], str):
        return NodeResult(text=op.parts[0])
    return _NOTHING
