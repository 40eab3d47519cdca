"""Reads a run's nodes back as text, turns and values; waits for nothing and records nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypedDict

import msgspec

from .errors import GenerationError, TruncatedError, message_of
from .expressions import ValueExpr
from .graph import GraphNode
from .ir import Gen, RoleEnd, RoleStart, Text
from .results import (
    ChoiceScore,
    FinishReason,
    NodeResult,
    Sample,
    Thinking,
    Timings,
    TokenLogprob,
    Usage,
)


class Message(TypedDict):
    """One turn, in the form that chat APIs use."""

    role: str
    content: str


class NodeMeta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a named value besides the value; of n > 1 samples, the first one's.

    `attempts` counts how often a gen with `retries` was asked; what is here is the last one's.
    """

    address: str
    attempts: int = 1
    finish_reason: FinishReason = "stop"
    matched_stop: str | int | None = None
    token_ids: tuple[int, ...] = ()
    num_kept: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    thinking: Thinking | None = None
    scores: tuple[ChoiceScore, ...] = ()
    samples: tuple[Sample, ...] = ()
    grammar_engine: str = ""
    usage: Usage = Usage()
    timings: Timings = Timings()


_RETRY = re.compile(r"\.retry([0-9]+)(?:\[0\]\.[0-9]+)?$")


def attempts_of(address: str) -> int:
    """Return how many times a value was asked for, up to the node at this address."""
    found = _RETRY.search(address)
    return 1 if found is None else 1 + int(found[1])


def tried(address: str) -> str:
    """Return the words for an error of the node at this address, where it is not the first try."""
    attempts = attempts_of(address)
    return f" after {attempts} attempts" if attempts > 1 else ""


def path_to(nodes: Sequence[GraphNode], tail: int | None) -> list[GraphNode]:
    """Return the nodes of a sequence from its first to `tail`."""
    path: list[GraphNode] = []
    at = tail
    while at is not None:
        node = nodes[at]
        path.append(node)
        at = node.parent
    path.reverse()
    return path


def appended_text(node: GraphNode, result: NodeResult) -> str:
    """Return what a finished node added to the text a program sees.

    Turn borders add nothing (their rendering belongs to the model's template), and several samples
    add nothing before one is picked.
    """
    match node.op:
        case RoleStart() | RoleEnd():
            return ""
        case Gen(n=n) if n > 1:
            return ""
        case Text(parts=(str() as literal,)):
            return literal
        case _:
            return result.text


def messages_of(steps: Sequence[tuple[GraphNode, str]]) -> list[Message]:
    """Return the turns of a sequence of nodes with their texts; text between turns is left out."""
    messages: list[Message] = []
    is_open = False
    for node, text in steps:
        match node.op:
            case RoleStart(role=role):
                messages.append(Message(role=role, content=""))
                is_open = True
            case RoleEnd():
                is_open = False
            case _ if is_open:
                messages[-1]["content"] += text
            case _:
                pass
    return messages


def meta_of(node: GraphNode, result: NodeResult) -> NodeMeta:
    """Return a finished node's metadata."""
    first = result.samples[0] if result.samples else Sample(text=result.text)
    return NodeMeta(
        address=node.address,
        attempts=attempts_of(node.address),
        finish_reason=first.finish_reason,
        matched_stop=first.matched_stop,
        token_ids=first.token_ids,
        num_kept=first.num_kept,
        logprobs=first.logprobs,
        prompt_logprobs=first.prompt_logprobs,
        thinking=first.thinking,
        scores=result.scores,
        samples=result.samples,
        grammar_engine=result.grammar_engine,
        usage=result.usage,
        timings=result.timings,
    )


def value_of(node: GraphNode, result: NodeResult, expr: ValueExpr[Any]) -> Any:
    """Return a finished node's value as the type that its expression asked for.

    Raises TruncatedError when max_tokens cut it short, and GenerationError when it does not fit.
    """
    if not result.samples:
        return _decode(node, Sample(text=result.text), expr)
    if expr.num_samples == 1:
        return _decode(node, result.samples[0], expr)
    return [_decode(node, sample, expr) for sample in result.samples]


def _decode(node: GraphNode, sample: Sample, expr: ValueExpr[Any]) -> Any:
    if not sample.accepting:
        raise _truncated(node, sample, expr)
    if expr.decode is None:
        return sample.text
    try:
        return expr.decode(sample.text)
    except Exception as error:  # a type's own checks are the program's code: they raise anything
        if sample.finish_reason == "length":
            raise _truncated(node, sample, expr) from error
        raise GenerationError(
            f"{_where(node, expr)}: the value is no valid {expr.label}{tried(node.address)}: "
            f"{misfit(error)}; the text is {_short(sample.text)}",
            address=node.address,
        ) from error


def misfit(error: BaseException) -> str:
    """Return what is wrong with a value whose decoding raised; never empty.

    Errors by which checks refuse a value speak of it; others need their class to be understood.
    """
    name, message = type(error).__name__, message_of(error)
    if isinstance(error, ValueError | AssertionError | msgspec.MsgspecError):
        return message or name
    return f"{name}: {message}" if message else name


def _truncated(node: GraphNode, sample: Sample, expr: ValueExpr[Any]) -> TruncatedError:
    limit = node.op.sampling.max_tokens if isinstance(node.op, Gen) else 0
    return TruncatedError(
        f"{_where(node, expr)}: the value was cut at max_tokens={limit} before it was complete: "
        f"raise max_tokens; the text so far is {_short(sample.text)}",
        partial=sample.text,
    )


def _where(node: GraphNode, expr: ValueExpr[Any]) -> str:
    return f"{expr.name!r} ({node.address})" if expr.name else node.address


def _short(text: str) -> str:
    return repr(text) if len(text) <= 200 else f"{text[:200]!r}..."
