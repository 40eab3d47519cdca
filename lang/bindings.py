"""What names and handles stand for in a state, and how it is read from a run; keeps no names."""

from __future__ import annotations

from typing import Any

import msgspec

from .errors import ProgramError
from .expressions import ValueExpr
from .results import NodeResult
from .runner import Run
from .transcript import NodeMeta, appended_text, meta_of, value_of


# without cycles and never compared: left out of garbage collection, since results keep many
class ValueBinding(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Stands for one gen or select."""

    node: int
    expr: ValueExpr[Any]


class CaptureBinding(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Stands for the text of several nodes."""

    nodes: tuple[int, ...]


class ListBinding(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Stands for a list: all that was written with append=True."""

    items: tuple[ValueBinding | CaptureBinding, ...]


Binding = ValueBinding | CaptureBinding | ListBinding


def label_of(key: str | ValueExpr[Any]) -> str:
    """Return what messages call a name or handle."""
    return key if isinstance(key, str) else key.name or repr(key)


def bound_again(
    name: str, before: Binding | None, value: ValueBinding | CaptureBinding, *, append: bool
) -> Binding:
    """Return what `name` stands for once `value` is written, after what it stood for before.

    Raises ProgramError where it was written with `append=True` and without.
    """
    if before is not None and append != isinstance(before, ListBinding):
        raise ProgramError(
            f"{name!r} was written {'without' if append else 'with'} append=True before: "
            "write it in one way"
        )
    if not append:
        return value
    items = before.items if isinstance(before, ListBinding) else ()
    return ListBinding((*items, value))


def moved(binding: Binding, old: int, new: int) -> Binding:
    """Return a binding in which node `new` has the place of node `old`."""
    if isinstance(binding, ValueBinding):
        return ValueBinding(new, binding.expr) if binding.node == old else binding
    if isinstance(binding, ListBinding):
        items = (moved(item, old, new) for item in binding.items)
        return ListBinding(tuple(item for item in items if not isinstance(item, ListBinding)))
    return binding


def nodes_of(binding: Binding) -> list[int]:
    """Return the nodes whose end is the end of all that a binding stands for."""
    if isinstance(binding, ValueBinding):
        return [binding.node]
    if isinstance(binding, CaptureBinding):
        return list(binding.nodes[-1:])
    return [node for item in binding.items for node in nodes_of(item)]


def values_in(binding: Binding) -> list[ValueBinding]:
    """Return the gens and selects among what a binding stands for."""
    if isinstance(binding, ListBinding):
        return [item for item in binding.items if isinstance(item, ValueBinding)]
    return [binding] if isinstance(binding, ValueBinding) else []


def texts_in(run: Run, capture: CaptureBinding) -> tuple[int, ...]:
    """Return the nodes of a capture that can add text (turn borders and samples can't)."""
    probe = NodeResult(text="x")
    return tuple(i for i in capture.nodes if appended_text(run.nodes[i], probe))


def text_at(run: Run, node: int) -> str:
    """Wait for a node and return what it added to the text; raises GenerationError."""
    return appended_text(run.nodes[node], run.result(node))


def value_in(run: Run, binding: ValueBinding | CaptureBinding) -> Any:
    """Wait for a value and return it, made anew.

    Raises GenerationError where its node failed or the text does not fit the type, TruncatedError
    where max_tokens cut it.
    """
    if isinstance(binding, ValueBinding):
        return value_of(run.nodes[binding.node], run.result(binding.node), binding.expr)
    return "".join(text_at(run, node) for node in binding.nodes)


def meta_in(run: Run, binding: ValueBinding | CaptureBinding, label: str) -> NodeMeta:
    """Wait for a value and return what is known of it; raises ProgramError for a capture."""
    if isinstance(binding, CaptureBinding):
        raise ProgramError(f"{label!r} is a capture of several nodes: it has no metadata")
    return meta_of(run.nodes[binding.node], run.result(binding.node))
