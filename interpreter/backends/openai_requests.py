"""A gen or select as the arguments of one call, and its raw text as the value; sends nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from umbel.lang.constraints import Choices, Constraint, JsonSchema, Regex
from umbel.lang.ir import Gen, Select
from umbel.lang.sampling_params import SamplingParams
from umbel.lang.transcript import Message

from .openai_features import EXTENSIONS, Endpoint, EndpointFeatures

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a node continues: turns on a chat endpoint, text on a completions endpoint."""

    text: str
    messages: Sequence[Message]

    @property
    def is_continued(self) -> bool:
        """Whether the last turn has begun and goes on."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"


def prompt_of(text: str, messages: list[Message]) -> Prompt:
    """Return a node's prompt; `messages` end with the turn that the node writes."""
    if messages and messages[-1]["role"] == "assistant" and not messages[-1]["content"]:
        messages = messages[:-1]
    return Prompt(text, tuple(messages))


@dataclass(frozen=True, slots=True)
class ValueForm:
    """How a value travels. `read` turns the raw text into the value; None: it does not fit.

    `response_format` is what asks for the form, where the endpoint knows it. Only text that is the
    value as it stands may be streamed.
    """

    read: Callable[[str], str | None]
    response_format: Arguments | None = None
    is_plain: bool = True


def value_form(constraint: Constraint | None, features: EndpointFeatures) -> ValueForm:
    """Return the form of a gen's value; constraints that were refused do not come here."""
    match constraint:
        case None:
            return ValueForm(lambda text: text)
        case JsonSchema(schema=schema, strict=strict):
            asked = _response_format(json.loads(schema), strict) if features.json_schema else None
            return ValueForm(lambda text: text if is_valid(text, schema) else None, asked)
        case Choices(choices=choices):
            return _string_form(
                {"enum": list(choices)}, lambda text: text in choices, features.json_schema
            )
        case Regex(pattern=pattern):
            compiled = re.compile(pattern, re.ASCII)
            return _string_form(
                {"pattern": f"^(?:{pattern})$"},
                lambda text: compiled.fullmatch(text) is not None,
                features.json_schema,
            )
        case _:
            raise AssertionError(f"{constraint!r} is refused before")


def _string_form(keywords: Arguments, fits: Callable[[str], bool], has_schema: bool) -> ValueForm:
    """Return the form of a string that a schema may ask for, inside an object."""

    def read_plain(text: str) -> str | None:
        return next((found for found in (text, text.strip()) if fits(found)), None)

    def read_wrapped(text: str) -> str | None:
        try:
            value = json.loads(text)["value"]
        except (ValueError, TypeError, KeyError):
            return None
        return value if isinstance(value, str) and fits(value) else None

    if not has_schema:
        return ValueForm(read_plain, None, is_plain=False)
    schema = {
        "type": "object",
        "properties": {"value": {"type": "string", **keywords}},
        "required": ["value"],
        "additionalProperties": False,
    }
    return ValueForm(read_wrapped, _response_format(schema, True), is_plain=False)


def _response_format(schema: Any, strict: bool) -> Arguments:
    return {
        "type": "json_schema",
        "json_schema": {"name": "value", "schema": schema, "strict": strict},
    }


def is_valid(text: str, schema: str) -> bool:
    """Whether `text` is JSON that `schema` (JSON text) takes; looks nothing up elsewhere."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return bool(_validator(schema).is_valid(value))


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    from jsonschema.validators import validator_for
    from referencing import Registry

    parsed = json.loads(schema)
    registry: Registry[Any] = Registry()
    return validator_for(parsed, default=validator_for({}))(parsed, registry=registry)


def base_arguments(
    model: str, endpoint: Endpoint, prompt: Prompt, features: EndpointFeatures
) -> Arguments:
    """Return the model and the prompt as arguments of a call."""
    if endpoint == "completions":
        return {"model": model, "prompt": prompt.text}
    made: Arguments = {"model": model, "messages": list(prompt.messages)}
    if prompt.is_continued and features.continuation:
        made["extra_body"] = {"continue_final_message": True, "add_generation_prompt": False}
    return made


def add_gen(
    made: Arguments,
    gen: Gen,
    form: ValueForm,
    endpoint: Endpoint,
    features: EndpointFeatures,
    seed: int,
) -> Arguments:
    """Add a gen's options to the arguments of a streamed call, and return these."""
    sampling = gen.sampling
    made[_limit_field(endpoint, features)] = sampling.max_tokens
    made["temperature"] = sampling.temperature
    made["stream"] = True
    optional = {
        "top_p": (sampling.top_p, 1.0),
        "frequency_penalty": (sampling.frequency_penalty, 0.0),
        "presence_penalty": (sampling.presence_penalty, 0.0),
        "n": (gen.n, 1),
        "stop": (list(sampling.stop[: features.max_stops]), []),
        "logit_bias": ({str(i): bias for i, bias in sampling.logit_bias}, {}),
    }
    made.update({name: value for name, (value, off) in optional.items() if value != off})
    if features.seed:
        made["seed"] = seed if sampling.seed is None else sampling.seed
    if features.usage:
        made["stream_options"] = {"include_usage": True}
    if sampling.logprobs:
        made.update(_logprobs(endpoint, sampling.top_logprobs))
    extra = _extensions(sampling)
    if form.response_format is not None:
        if endpoint == "chat":
            made["response_format"] = form.response_format
        else:  # not in OpenAI's own completions, so the client has no argument for it
            extra["response_format"] = form.response_format
    if extra:
        made["extra_body"] = {**made.get("extra_body", {}), **extra}
    return made


def add_next_token(made: Arguments, endpoint: Endpoint, features: EndpointFeatures) -> Arguments:
    """Ask for the likeliest next tokens, and return the arguments."""
    made[_limit_field(endpoint, features)] = 1
    made["temperature"] = 1.0  # so that nobody scales the log-probabilities
    made.update(_logprobs(endpoint, features.max_top_logprobs))
    return made


def add_echo(made: Arguments, select: Select, context: str) -> Arguments:
    """Ask for the log-probabilities of the prompt with each choice, and return the arguments."""
    end = select.terminator or ""
    made["prompt"] = [context + choice + end for choice in select.choices]
    made.update(echo=True, logprobs=1, max_tokens=0, temperature=1.0)
    return made


def emulated_gen(select: Select) -> Gen:
    """Return the gen that stands for a select whose choices can't be scored."""
    # a token is a byte at least; 32 are for what is around the choice
    longest = max(len(choice.encode()) for choice in select.choices)
    sampling = SamplingParams(max_tokens=longest + 32, temperature=select.temperature)
    return Gen(select.name, sampling, Choices(select.choices))


def _limit_field(endpoint: Endpoint, features: EndpointFeatures) -> str:
    return "max_tokens" if endpoint == "completions" else features.max_tokens_field


def _logprobs(endpoint: Endpoint, top: int) -> Arguments:
    if endpoint == "completions":
        return {"logprobs": top}
    return {"logprobs": True, "top_logprobs": top}


def _extensions(sampling: SamplingParams) -> Arguments:
    values = {name: getattr(sampling, name) for name in EXTENSIONS}
    return {name: value for name, value in values.items() if value != EXTENSIONS[name]}
