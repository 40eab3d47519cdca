"""Draws a plan as one web page or as a Mermaid flowchart; decides no place and no word in it.

All text of a program is untrusted: it goes in escaped, and the page's policy lets no script run
but its own, and nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from typing import Any

from umbel.lang.ir import Branch, Gen, Join, Op, Pick, RoleEnd, RoleStart, Select
from umbel.lang.plan import NodePlan, Plan

from .picture_layout import CARD_WIDTH, Card, Edge, Layout, Row, lay_out
from .picture_text import (
    Label,
    details_of,
    label_of,
    shorten,
    text_width,
    tiles_of,
    visible,
)

_LEFT = 30.0  # where a row's words begin: right of the stem and its mark
_RIGHT = 12.0


def to_html(plan: Plan, *, title: str = "plan") -> str:
    """Return the plan's picture as one page that loads nothing and opens in any browser."""
    template = files(__package__).joinpath("picture.html").read_text(encoding="utf-8")
    script = template.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    fields = {
        "title": escape(visible(title)),
        "subtitle": "actual cost" if plan.has_run else "estimated" if plan.is_estimate else "plan",
        "script_hash": digest,
        "tiles": "".join(_tile(*tile) for tile in tiles_of(plan)),
        "svg": to_svg(plan),
        "data": _json(_page_data(plan)),
    }
    return re.sub(r"@@(\w+)@@", lambda found: fields[found[1]], template)


def to_svg(plan: Plan) -> str:
    """Return the picture alone, as it stands in the page (whose style sheet gives the colours)."""
    nodes = plan.graph.nodes
    layout = lay_out(nodes)
    width, height = _number(layout.width), _number(layout.height)
    parts = [
        f'<svg id="picture" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="group" aria-label="request graph">',
        '<g id="drawing">',
        *_edges(plan, layout),
    ]
    for card in layout.cards:
        parts += _card(plan, layout, card)
    parts.append("</g></svg>")
    return "\n".join(parts)


def to_mermaid(plan: Plan) -> str:
    """Return the plan as a Mermaid flowchart: one node each, shared prefixes as thick lines."""
    lines = ["flowchart LR"]
    for planned in plan.nodes:
        label = label_of(planned, "≈ " if plan.is_estimate else "")
        words = [label.title or label.kind, label.value, label.note]
        if label.kind in ("role", "end", "text"):
            words[0] = f"{label.kind}: {words[0]}"
        text = "<br/>".join(_mermaid_text(word) for word in words if word)
        start, end = {"gen": ("(", ")"), "select": ("{{", "}}")}.get(label.kind, ("[", "]"))
        lines.append(f'  n{planned.node.id}{start}"{text}"{end}:::{_mermaid_class(planned, label)}')
    for planned in plan.nodes:
        node = planned.node
        if node.parent is not None:
            line = "==>" if planned.num_paths > 1 else "-->"
            lines.append(f"  n{node.parent} {line} n{node.id}")
        line = "---" if isinstance(node.op, Join) else "-.->"
        lines += [f"  n{dep} {line} n{node.id}" for dep in dict.fromkeys(node.deps)]
    lines += [
        "  classDef gen fill:#fbe3ee,stroke:#b8326f,color:#3c1026",
        "  classDef select fill:#ebe5fb,stroke:#6a4fc4,color:#241650",
        "  classDef plain fill:#f4f6ef,stroke:#9aa68c,color:#28311f",
        "  classDef fork fill:#dff0d8,stroke:#3f7d3a,color:#1c3a1a",
        "  classDef failed fill:#fde4de,stroke:#c0341d,color:#5a1408,stroke-dasharray:4 3",
    ]
    return "\n".join(lines) + "\n"


def _mermaid_class(node: NodePlan, label: Label) -> str:
    if node.actual is not None and node.actual.status == "failed":
        return "failed"
    if label.kind in ("gen", "select"):
        return label.kind
    return "fork" if label.kind in ("branch", "join") else "plain"


def _mermaid_text(text: str) -> str:
    """Write everything but letters, digits and harmless marks as an entity code."""
    text = shorten(visible(text), 260, 13)
    return "".join(c if c.isalnum() or c in " .,_-≈≤–·×↻✕…↵␣" else f"#{ord(c)};" for c in text)  # noqa: RUF001


def _tile(name: str, value: str, remark: str) -> str:
    return (
        f'<div class="tile"><dt>{escape(name)}</dt>'
        f"<dd>{escape(value)} <small>{escape(remark)}</small></dd></div>"
    )


def _page_data(plan: Plan) -> dict[str, Any]:
    return {
        "nodes": [details_of(plan, node) for node in plan.nodes],
        "parents": [node.parent for node in plan.graph.nodes],
        "deps": [node.deps for node in plan.graph.nodes],
    }


def _json(data: Any) -> str:
    """Return JSON that can't end the script element it stands in."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _edges(plan: Plan, layout: Layout) -> Iterator[str]:
    chain = set(zip(plan.critical_path, plan.critical_path[1:], strict=False))
    drawn = (
        *(("value", edge) for edge in layout.values),
        *(("join", edge) for edge in layout.joins),
        *(("stem", edge) for edge in layout.stems),
    )
    for kind, edge in drawn:
        width = 1.25
        if kind == "stem":
            width = _stem_width(plan.nodes[edge.target].num_paths)
        elif kind == "join":
            width = 2.0
        path = _path(edge)
        is_critical = (edge.source, edge.target) in chain
        if is_critical:
            yield f'<path class="glow" d="{path}" stroke-width="{_number(width + 6)}"/>'
        yield (
            f'<path class="{kind}" data-from="{edge.source}" data-to="{edge.target}" d="{path}" '
            f'stroke-width="{_number(width)}"/>'
        )
    hubs = {(edge.source, edge.x1, edge.y1) for edge in layout.stems}
    for source, x, y in sorted(hubs):
        radius = _stem_width(plan.nodes[source].num_paths) / 2 + 2.5
        yield f'<circle class="hub" cx="{_number(x)}" cy="{_number(y)}" r="{_number(radius)}"/>'


def _stem_width(num_paths: int) -> float:
    return min(2.0 + 1.4 * math.log2(max(num_paths, 1)), 10.0)


def _path(edge: Edge) -> str:
    start, end = edge.x1 + edge.level, edge.x1 + edge.level + edge.turn
    middle = (start + end) / 2
    numbers = [edge.x1, edge.y1, start, middle, edge.y1, middle, edge.y2, end, edge.y2, edge.x2]
    x1, y1, level, m1, a, m2, b, turned, y2, x2 = map(_number, numbers)
    return f"M{x1} {y1}H{level}C{m1} {a} {m2} {b} {turned} {y2}H{x2}"


def _card(plan: Plan, layout: Layout, card: Card) -> Iterator[str]:
    first = plan.nodes[card.nodes[0]]
    paths = max(plan.nodes[node].num_paths for node in card.nodes)
    shared = " shared" if paths > 1 else ""
    x, y, height = _number(card.x), _number(card.y), _number(card.height)
    width = _number(CARD_WIDTH)
    yield f'<g class="card{shared}" transform="translate({x} {y})">'
    yield f'<rect class="box" width="{width}" height="{height}" rx="9"/>'
    stem = _stem_width(first.num_paths)
    yield (
        f'<path class="stalk" d="M15 8V{_number(card.height - 8)}" '
        f'stroke-width="{_number(min(stem, 6.0))}"/>'
    )
    for node in card.nodes:
        yield from _row(plan, plan.nodes[node], layout.rows[node], card)
    yield "</g>"


def _row(plan: Plan, node: NodePlan, row: Row, card: Card) -> Iterator[str]:
    label = label_of(node, "≈ " if plan.is_estimate else "")
    actual = node.actual
    classes = ["node", label.kind]
    if actual is not None:
        classes.append(actual.status)
    elif plan.has_run:
        classes.append("open")
    if node.node.id in plan.critical_path and node.needs_model:
        classes.append("critical")
    spoken = ", ".join(word for word in (label.kind, label.title, label.value, label.note) if word)
    top = _number(row.y - card.y)
    yield (
        f'<g class="{" ".join(classes)}" data-node="{node.node.id}" tabindex="-1" role="button" '
        f'aria-label="{escape(spoken)}" transform="translate(0 {top})">'
    )
    inner = CARD_WIDTH - 6
    yield (
        f'<rect class="hit" x="3" y="0.5" width="{_number(inner)}" '
        f'height="{_number(row.height - 1)}" rx="6"/>'
    )
    is_tall = node.needs_model or bool(label.note)
    line = 16.5 if is_tall else row.height / 2 + 4
    yield _mark(node.node.op, line - 4.5)
    yield from _words(label, line)
    if actual is not None and actual.seconds and plan.seconds:
        yield _bar(actual.start / plan.seconds, actual.seconds / plan.seconds, row.height)
    yield "</g>"


def _words(label: Label, line: float) -> Iterator[str]:
    size = 13.0 if label.kind in ("gen", "select") else 12.0
    room = CARD_WIDTH - _LEFT - _RIGHT
    value = shorten(label.value, room * 0.62, 11.5)
    if value:
        room -= text_width(value, 11.5) + 8
    title = shorten(label.title, room, size)
    y = _number(line)
    if title:
        yield f'<text class="title" x="{_number(_LEFT)}" y="{y}">{escape(title)}</text>'
    if value:
        x = _number(CARD_WIDTH - _RIGHT)
        yield f'<text class="value" x="{x}" y="{y}">{escape(value)}</text>'
    if label.note:
        note = escape(shorten(label.note, CARD_WIDTH - _LEFT - _RIGHT, 11))
        yield f'<text class="note" x="{_number(_LEFT)}" y="{_number(line + 14)}">{note}</text>'


def _mark(op: Op, y: float) -> str:
    """Return the sign on the stem: a shape for each kind, so that colour is not needed."""
    at = _number(y)
    match op:
        case Gen():
            return f'<circle class="mark" cx="15" cy="{at}" r="5.5"/>'
        case Select():
            return f'<path class="mark" d="M15 {_number(y - 6.5)}l6.5 6.5-6.5 6.5-6.5-6.5z"/>'
        case Branch():
            return f'<path class="mark" d="M10 {_number(y - 4)}l9 4-9 4z"/>'
        case Join() | Pick():
            return f'<circle class="mark" cx="15" cy="{at}" r="4.5"/>'
        case RoleStart():
            return f'<path class="mark" d="M11 {_number(y + 3)}V{_number(y - 3)}h8"/>'
        case RoleEnd():
            return f'<path class="mark" d="M11 {_number(y - 2)}v4h8"/>'
        case _:
            return f'<circle class="mark" cx="15" cy="{at}" r="2.5"/>'


def _bar(start: float, length: float, height: float) -> str:
    """Return when a node ran within the run, as a strip along the foot of its row."""
    whole = CARD_WIDTH - _LEFT - _RIGHT
    x, y = _LEFT + start * whole, _number(height - 6)
    width = max(length * whole, 2.0)
    return (
        f'<rect class="track" x="{_number(_LEFT)}" y="{y}" width="{_number(whole)}" height="2.5" '
        f'rx="1.25"/><rect class="bar" x="{_number(min(x, _LEFT + whole - 2))}" y="{y}" '
        f'width="{_number(width)}" height="2.5" rx="1.25"/>'
    )


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
