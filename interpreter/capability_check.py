"""Says what an operation asks for that a backend can't honour, before any token is paid for."""

from __future__ import annotations

from umbel.lang.constraints import Choices, Grammar, JsonSchema, Regex
from umbel.lang.errors import UnsupportedFeatureError
from umbel.lang.ir import Gen, Image, Join, Op, RoleStart, Select

from .backends.base import Capabilities


def check_op(op: Op, backend: str, capabilities: Capabilities) -> None:
    """Raise UnsupportedFeatureError for the first feature that the backend can't honour."""
    if type(op) is Gen:
        _check_gen(op, backend, capabilities)
        return
    match op:
        case Select(method=method):
            # one choice needs no score, whatever the method
            if len(op.choices) > 1 and method not in capabilities.select_methods:
                known = ", ".join(sorted(capabilities.select_methods))
                hint = f"it scores by {known}" if known else "it can't score choices"
                raise _refusal(backend, f"select by {method}", hint)
        case RoleStart(role=role):
            if not capabilities.roles:
                article = "an" if role == "assistant" else "a"
                raise _refusal(backend, f"{article} {role} turn", "append plain text")
        case Join(mode="append"):
            if not capabilities.join_append:
                raise _refusal(backend, "a join that appends", "use mode='gather'")
        case Image():
            raise _refusal(backend, "images", "no backend takes them yet")
        case _:
            pass


def _check_gen(gen: Gen, backend: str, capabilities: Capabilities) -> None:
    sampling = gen.sampling
    if gen.constraint is None and not (
        gen.n > 1
        or gen.heal
        or gen.thinking
        or sampling.logprobs
        or sampling.prompt_logprobs
        or sampling.seed is not None
        or sampling.stop_regex
    ):
        return  # the plain gen, which every backend takes
    match gen.constraint:
        case Regex() if not capabilities.regex:
            raise _refusal(backend, "regex", "use schema=, or a local model")
        case JsonSchema() if not capabilities.json_schema:
            raise _refusal(backend, "schema", "use a local model")
        case Grammar() if not capabilities.grammar:
            raise _refusal(backend, "grammar", "use a local model")
        case Choices() if not capabilities.choices:
            raise _refusal(backend, "choices", "use select, or a local model")
        case _:
            pass
    wanted = (
        ("n > 1", gen.n > 1, capabilities.n_samples),
        ("heal", gen.heal, capabilities.heal),
        ("thinking", gen.thinking, capabilities.thinking),
        ("logprobs", sampling.logprobs, capabilities.logprobs),
        ("prompt_logprobs", sampling.prompt_logprobs, capabilities.prompt_logprobs),
        ("seed", sampling.seed is not None, capabilities.seed),
        ("stop_regex", bool(sampling.stop_regex), capabilities.stop_regex),
    )
    for feature, is_wanted, is_there in wanted:
        if is_wanted and not is_there:
            raise _refusal(backend, feature, "leave it out, or use a local model")


def _refusal(backend: str, feature: str, hint: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(backend=backend, feature=feature, hint=hint)
