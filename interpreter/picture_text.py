"""The words of a plan's picture: labels, numbers and details; escapes nothing, draws nothing."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any

from umbel.lang.ir import Branch, Gen, Image, Join, Pick, Ref, RoleEnd, RoleStart, Select, Text
from umbel.lang.plan import Bounds, NodePlan, Plan, counted

from .credentials import without_credentials

_MOST_DETAIL = 4000  # characters of a text in the details
_CONTROLS = {i: 0x2400 + i for i in range(32) if i not in (9, 10, 13)} | {127: 0x2421}
#: characters that would turn the text around them, and halves of characters
_HIDDEN = (*range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF)
_REPLACED = _CONTROLS | dict.fromkeys(_HIDDEN, 0xFFFD)


@dataclass(frozen=True, slots=True)
class Label:
    """What a row shows: `title` and `value` in its first line, `note` in its second."""

    kind: str
    title: str
    value: str = ""
    note: str = ""


def visible(text: str) -> str:
    """Return text with what can't be shown, or shows as something else, made visible."""
    return text.translate(_REPLACED)


def one_line(text: str) -> str:
    """Return text on one line, with its line ends and outer blanks made visible."""
    joined = visible(text).replace("\r\n", "\n").replace("\n", "↵ ").replace("\t", "⇥ ")
    return " ".join(joined.split()) or "␣" * min(len(text), 3)


def shorten(text: str, width: float, size: float) -> str:
    """Cut text so that it takes at most `width` pixels in a sans-serif font of `size`."""
    if text_width(text, size) <= width:
        return text
    room = width - text_width("…", size)
    kept = 0
    for char in text:
        room -= _em(char) * size
        if room < 0:
            break
        kept += 1
    return text[:kept].rstrip() + "…"


def text_width(text: str, size: float) -> float:
    """Return about how wide a text is: a little more than in usual fonts."""
    return sum(map(_em, text)) * size


def _em(char: str) -> float:
    if unicodedata.combining(char):
        return 0.0
    if unicodedata.east_asian_width(char) in "WF":
        return 1.05
    if char in "iljftr.,:;'|!()[] ":
        return 0.36
    return 0.9 if char in "mwMW@%…" else 0.7 if char.isupper() else 0.6


def label_of(plan: NodePlan, about: str) -> Label:
    """Return a node's row; `about` stands before a number that is an estimate."""
    op = plan.node.op
    match op:
        case Text(parts=parts):
            text = "".join(p if isinstance(p, str) else f"⟨{p.node}⟩" for p in parts)
            return Label("text", one_line(text) if text else "(empty)", f"{about}{plan.appended}")
        case RoleStart(role=role):
            return Label("role", one_line(role))
        case RoleEnd():
            return Label("end", "")
        case Gen(n=n):
            value, note = _model_words(plan)
            title = one_line(op.name or "gen")
            return Label("gen", f"{title} ×{n}" if n > 1 else title, value, note)  # noqa: RUF001
        case Select(choices=choices):
            value, note = _model_words(plan)
            if plan.actual is None:
                value = counted(len(choices), "choice")
            return Label("select", one_line(op.name or "select"), value, note)
        case Branch(index=index, of=of):
            return Label("branch", "continues" if of == 1 else f"branch {index + 1} of {of}")
        case Join(policy=policy, mode=mode, k=k):
            rule = {"all": "", "collect": "collect", "any": f"any {k}"}[policy]
            words = [word for word in (rule, "append" if mode == "append" else "") if word]
            return Label("join", f"join {len(op.branches)}", " · ".join(words))
        case Pick(sample=sample):
            return Label("pick", f"goes on with sample {sample}")
        case Image(path=path):
            return Label("text", one_line(f"image {path}"))


def _model_words(plan: NodePlan) -> tuple[str, str]:
    actual, op = plan.actual, plan.node.op
    if actual is None:
        value = _at_most(plan.decode) if isinstance(op, Gen) else ""
        return value, _shape(plan)
    if actual.status == "failed":
        return "✕ failed", actual.error.partition(":")[0]
    usage = actual.usage
    words = [seconds(actual.seconds)] if actual.seconds else []
    if usage.prompt_tokens:
        words.append(f"{_percent(usage.cached_tokens, usage.prompt_tokens)} cached")
    if isinstance(op, Select):
        return one_line(actual.text), " · ".join(words)
    return f"{usage.completion_tokens:,} tok", " · ".join(words) or _shape(plan)


def _shape(plan: NodePlan) -> str:
    op = plan.node.op
    if isinstance(op, Select):
        return op.method.replace("_", " ") if len(op.choices) > 1 else "needs no model"
    if plan.constraint is not None:
        size = plan.constraint
        if size.kind == "choices":
            return str(size)
        return (
            size.kind
            if size.max_bytes is None
            else f"{size.kind} · ≤ {counted(size.max_bytes, 'byte')}"
        )
    assert isinstance(op, Gen), "only gens and selects have a shape"
    return f"temperature {op.sampling.temperature:g}" if op.sampling.temperature else "greedy"


def _at_most(bounds: Bounds) -> str:
    return f"{bounds.high:,} tok" if bounds.low == bounds.high else f"≤ {bounds.high:,} tok"


def seconds(value: float) -> str:
    """Return a duration with two or three digits."""
    if value >= 99.5:
        return f"{value:,.0f} s"
    if value >= 0.995:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 0.000995 else f"{value * 1e6:.0f} µs"


def tiles_of(plan: Plan) -> list[tuple[str, str, str]]:
    """Return the picture's headline numbers: what, how much, and a remark."""
    about = "≈ " if plan.is_estimate else ""
    saved, whole = plan.saved, plan.prefill + plan.decode + plan.saved
    tiles = [
        ("nodes", f"{len(plan.nodes):,}", counted(plan.num_paths, "path")),
        ("prefill", f"{about}{plan.prefill}", "tokens"),
        ("decode", str(plan.decode), "tokens"),
        (
            "saved by sharing",
            f"{about}{saved}",
            f"tokens, up to {_percent(saved.high, whole.high)}" if saved.high else "tokens",
        ),
        ("longest chain", str(plan.critical_steps), "steps"),
    ]
    if not plan.has_run:
        return tiles
    usage = plan.usage
    tiles[1:3] = [
        ("took", seconds(plan.seconds) if plan.seconds else "–", "first ready to last end"),  # noqa: RUF001
        ("sampled", f"{usage.completion_tokens:,}", f"tokens, of at most {plan.decode.high:,}"),
    ]
    if usage.prompt_tokens:
        share = _percent(usage.cached_tokens, usage.prompt_tokens)
        remark = f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} prompt tokens"
        tiles.insert(3, ("cache hits", share, remark))
    if plan.num_retries:
        tiles.append(("retries", f"{plan.num_retries:,}", "runs before this one"))
    if plan.num_failed:
        tiles.append(("failed", f"{plan.num_failed:,}", "nodes"))
    return tiles


def details_of(plan: Plan, node: NodePlan) -> dict[str, Any]:
    """Return what the details of a node show, as data for the page's script."""
    about = "≈ " if plan.is_estimate else ""
    op, actual = node.node.op, node.actual
    label = label_of(node, about)
    facts: list[tuple[str, str]] = [("address", node.node.address)]
    blocks: list[tuple[str, str]] = []
    if node.needs_model:
        facts.append(("prompt", f"{about}{node.prompt} tokens"))
    if node.prefill.high:
        facts.append(("prefill", f"{about}{node.prefill} tokens"))
    if node.decode.high:
        facts.append(("decode", f"{node.decode} tokens"))
    if node.num_paths > 1:
        facts.append(("shared by", f"{node.num_paths:,} paths"))
    if node.saved.high:
        facts.append(("saved", f"{about}{node.saved} tokens"))
    if node.constraint is not None:
        facts.append(("constraint", str(node.constraint)))
    match op:
        case Text(parts=parts):
            names = {i: _reference(plan, i) for i in node.node.deps}
            text = "".join(names[p.node] if isinstance(p, Ref) else p for p in parts)
            blocks.append(("text", text))
        case Gen(sampling=sampling, timeout=timeout):
            if sampling.stop:
                facts.append(("stops", ", ".join(map(repr, sampling.stop))))
            if sampling.temperature:
                facts.append(("temperature", f"{sampling.temperature:g}"))
            if op.thinking:
                facts.append(("thinking", f"up to {op.max_thinking_tokens:,} tokens"))
            if timeout is not None:
                facts.append(("timeout", seconds(timeout)))
        case Select(choices=choices, method=method):
            facts.append(("method", method.replace("_", " ")))
            blocks.append(("choices", "\n".join(choices)))
        case _:
            pass
    if actual is not None:
        facts += _actual_facts(node)
        if actual.error:
            blocks.append(("error", without_credentials(actual.error)))
        elif node.needs_model or isinstance(op, Join):
            blocks.append(("value", actual.text))
    return {
        "kind": label.kind,
        "title": shorten(visible(node.name or label.title or "end of turn"), 560, 16),
        "facts": [(key, visible(value)) for key, value in facts],
        "blocks": [(heading, visible(_cut(text))) for heading, text in blocks],
    }


def _actual_facts(node: NodePlan) -> list[tuple[str, str]]:
    actual = node.actual
    if actual is None or not node.needs_model:
        return []
    usage = actual.usage
    facts: list[tuple[str, str]] = [("status", actual.status)]
    if actual.seconds:
        facts.append(("took", f"{seconds(actual.seconds)}, from {seconds(actual.start)} on"))
    if actual.queued:
        facts.append(("waited", seconds(actual.queued)))
    if usage.prompt_tokens:
        share = _percent(usage.cached_tokens, usage.prompt_tokens)
        facts.append(
            ("cache hits", f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} tokens ({share})")
        )
    if usage.completion_tokens:
        forced = f", {usage.forced_tokens:,} of them forced" if usage.forced_tokens else ""
        facts.append(("sampled", f"{usage.completion_tokens:,} tokens{forced}"))
    if usage.tree_tokens:
        facts.append(("token tree", f"{usage.tree_tokens:,} tokens"))
    return facts


def _reference(plan: Plan, node: int) -> str:
    return f"⟨{plan.nodes[node].name or plan.nodes[node].node.address}⟩"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "–"  # noqa: RUF001


def _cut(text: str) -> str:
    if len(text) <= _MOST_DETAIL:
        return text
    return f"{text[:_MOST_DETAIL]}… ({len(text):,} characters)"
