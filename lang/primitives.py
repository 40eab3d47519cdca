"""What a program writes: functions that check their arguments and return expressions.

Nothing runs here, and nothing is known of the state an expression will be appended to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from re import Pattern
from typing import Any, NoReturn, TypedDict, TypeVar, Unpack, get_args, overload

from .constraints import Choices, Constraint, Grammar, JsonSchema, Regex
from .errors import ConstraintError, ProgramError
from .expressions import Concat, Expr, GenExpr, Part, RoleMark, SelectExpr, parts_of
from .ir import MAX_SAMPLES, Gen, Select, SelectMethod
from .number_checks import MAX_SECONDS, check_flags, check_number, check_seconds, check_seed
from .sampling_params import MAX_COUNT, SamplingParams
from .suggestions import check_keywords, nearest
from .typed_values import ValueType, value_type
from .unicode_check import check_text

T = TypeVar("T")


class GenOptions(TypedDict, total=False):
    """The options of `gen` besides its type; what is left out comes from the program's options."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    ignore_eos: bool
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    stop_regex: str | Sequence[str]
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: bool
    regex: str
    grammar: str | Grammar
    choices: Sequence[str]
    heal: bool
    thinking: bool
    max_thinking_tokens: int
    strict: bool
    retries: int
    reask: bool
    timeout: float
    append: bool


@overload
def gen(
    name: str | None = None, *, n: int, schema: type[T], **options: Unpack[GenOptions]
) -> GenExpr[list[T]]: ...
@overload
def gen(
    name: str | None = None, *, n: int, dtype: type[T], **options: Unpack[GenOptions]
) -> GenExpr[list[T]]: ...
@overload
def gen(
    name: str | None = None, *, n: int, **options: Unpack[GenOptions]
) -> GenExpr[list[str]]: ...
@overload
def gen(
    name: str | None = None, *, schema: type[T], **options: Unpack[GenOptions]
) -> GenExpr[T]: ...
@overload
def gen(
    name: str | None = None, *, dtype: type[T], **options: Unpack[GenOptions]
) -> GenExpr[T]: ...
@overload
def gen(name: str | None = None, **options: Unpack[GenOptions]) -> GenExpr[str]: ...
@overload
def gen(
    name: str | None = None, *, schema: object, n: int = 1, **options: Unpack[GenOptions]
) -> GenExpr[Any]: ...
def gen(
    name: str | None = None,
    *,
    n: int = 1,
    schema: object = None,
    dtype: object = None,
    regex: str | None = None,
    grammar: str | Grammar | None = None,
    choices: Sequence[str] | None = None,
    heal: bool = False,
    thinking: bool = False,
    max_thinking_tokens: int | None = None,
    strict: bool = True,
    retries: int = 0,
    reask: bool = False,
    timeout: float | None = None,
    append: bool = False,
    **sampling: Any,
) -> GenExpr[Any]:
    r"""Generate text, and name it so that it can be read.

    At most one of `schema`, `dtype`, `regex`, `grammar` and `choices` restricts the value; with a
    type, the value is read back as that type. With `n > 1` the value is a list and `s.pick` says
    which sample the text goes on with. A name that is written again stands for the latest value;
    with `append=True` its value is the list of all that was written under it. With `heal=True` the
    model may choose the last tokens of the text before again; the value still begins behind it.
    With `thinking=True`, first in an assistant's turn, the model thinks before the value, in at
    most `max_thinking_tokens` tokens (1,024): `s.meta(name).thinking` has what.

    With `strict=False` a schema may hold what can't be enforced while generating; it is checked
    afterwards. A value that fails that check, or a validator of its type, is asked for again up to
    `retries` times, each time with another seed; with `reask=True` behind the wrong value and what
    is wrong about it, of which the text then shows nothing. `timeout` counts seconds from the
    moment the node can run. The other options are those of `SamplingParams`; without a
    `temperature` the text is greedy, and n samples are n times the same. A backend that can't
    honour an option refuses the run with UnsupportedFeatureError.

    >>> gen("answer", max_tokens=16, stop="\n")
    gen('answer')

    Raises TypeError, ValueError or ConstraintError (a ValueError that says where) on this line
    for an argument that can't be used.
    """
    checked = _name(name)
    for flag in (heal, thinking, strict, reask, append):
        if flag is not True and flag is not False:  # names cost more, and only an error needs them
            check_flags(heal=heal, thinking=thinking, strict=strict, reask=reask, append=append)
    overrides = _sampling(sampling)
    constraint, value = _constraint(
        schema=schema, dtype=dtype, regex=regex, grammar=grammar, choices=choices
    )
    if not strict:
        constraint = _lenient(constraint)
    if isinstance(constraint, JsonSchema):
        _check_schema(constraint)
    if retries or reask:
        _check_retries(retries, reask, n, constraint)
    _typed("n", n, int, "a whole number")
    _bounded("n", n, MAX_SAMPLES)
    check_timeout(timeout)
    most_thinking = _most_thinking(thinking, max_thinking_tokens, heal)
    params = _params(tuple(overrides.items())) if overrides else _DEFAULT
    return GenExpr(
        Gen(checked, params, constraint, n, timeout, heal, thinking, most_thinking),
        overrides,
        append=append,
        decode=None if value is None else value.decode,
        label="" if value is None else value.label,
        schema=dtype if schema is None else schema,
        retries=retries,
        reask=reask,
    )


def gen_int(name: str | None = None, **options: Unpack[GenOptions]) -> GenExpr[int]:
    """Generate a whole number; its value is an int."""
    return gen(name, dtype=int, **options)


def gen_string(name: str | None = None, **options: Unpack[GenOptions]) -> GenExpr[str]:
    """Generate a JSON string with its quotes; its value is what the quotes hold."""
    return gen(name, dtype=str, **options)


@check_keywords()
def select(
    name: str | None = None,
    choices: Iterable[str] = (),
    *,
    method: SelectMethod = "token_length_normalized",
    temperature: float = 0.0,
    terminator: str | None = None,
    timeout: float | None = None,
    append: bool = False,
) -> SelectExpr[str]:
    """Append the one of `choices` that the model finds likeliest, and name it.

    The name comes first: without one, write ``select(choices=[...])``. `s.meta(name).scores` holds
    the whole table. `terminator` is scored after every choice; it is needed outside a role where
    one choice is empty or begins another, which shows where the select is appended. With
    `temperature > 0` the choice is drawn from the softmax of score / temperature.

    >>> select("severity", ["low", "high"])
    select('severity')

    Raises ConstraintError (a ValueError) for no choices and for duplicates, TypeError for choices
    in no order, as a set's, which would differ from one process to the next.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(
            f"a name is a string, not {type(name).__name__}: "
            "the choices come second, or as select(choices=[...])"
        )
    checked_name = _name(name)
    if method not in get_args(SelectMethod):
        known = ", ".join(get_args(SelectMethod))
        raise ValueError(f"method {method!r} is unknown: use one of {known}")
    check_number("temperature", temperature)
    if not temperature >= 0:
        raise ValueError(f"temperature must be 0 or more, not {temperature!r}")
    if terminator is not None:
        if not isinstance(terminator, str):
            raise TypeError(f"terminator is a string, not {terminator!r}")
        if not terminator:
            raise ValueError("terminator must not be empty")
        check_text(terminator, f"terminator {terminator!a}")
    check_timeout(timeout)
    check_flags(append=append)
    checked = _choices(choices)
    return SelectExpr(
        Select(checked_name, checked, method, temperature, terminator, timeout), append=append
    )


def system(expr: Part) -> Expr:
    """Wrap an expression in a system turn."""
    return role("system", expr)


def user(expr: Part) -> Expr:
    """Wrap an expression in a user turn."""
    return role("user", expr)


def assistant(expr: Part) -> Expr:
    """Wrap an expression in an assistant turn."""
    return role("assistant", expr)


def role(name: str, expr: Part) -> Expr:
    """Wrap an expression in a turn of any role that the model's template knows."""
    if not isinstance(expr, str | Expr):
        raise TypeError(f"a turn holds a string or an expression, not {type(expr).__name__}")
    return Concat((RoleMark(name, "begin"), *parts_of(expr), RoleMark(name, "end")))


def system_begin() -> Expr:
    """Open a system turn."""
    return RoleMark("system", "begin")


def system_end() -> Expr:
    """Close the system turn."""
    return RoleMark("system", "end")


def user_begin() -> Expr:
    """Open a user turn."""
    return RoleMark("user", "begin")


def user_end() -> Expr:
    """Close the user turn."""
    return RoleMark("user", "end")


def assistant_begin() -> Expr:
    """Open an assistant turn."""
    return RoleMark("assistant", "begin")


def assistant_end() -> Expr:
    """Close the assistant turn."""
    return RoleMark("assistant", "end")


def image(path: str) -> NoReturn:
    """Refuse: images are reserved, and no backend takes them yet."""
    raise ProgramError(f"image({path!r}): images are not supported yet")


_DEFAULT = SamplingParams()
_DEFAULT_GEN = Gen("")
_TUPLES = {"stop": str, "stop_regex": str, "stop_token_ids": int}
_WHOLE = frozenset({"max_tokens", "min_tokens", "top_k", "top_logprobs", "seed"})
_REAL = frozenset(
    {
        "temperature",
        "top_p",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
    }
)
_GEN_OPTIONS = frozenset({*GenOptions.__annotations__, "n", "schema", "dtype"})
_FLAGS = frozenset({"ignore_eos", "logprobs", "prompt_logprobs"})


def _name(name: str | None) -> str:
    if name is None:
        return ""
    if not isinstance(name, str):
        raise TypeError(f"a name is a string, not {type(name).__name__}")
    if not name:
        raise ValueError("a name must not be empty; leave it out instead")
    return name


def check_timeout(timeout: float | None) -> None:
    """Refuse a time limit that means nothing, or that no lock can wait for.

    Raises TypeError for what is no number, else ValueError.
    """
    if timeout is None:
        return
    check_seconds("timeout", timeout)
    if not 0 < timeout <= MAX_SECONDS:
        raise ValueError(
            f"timeout must be above 0 seconds and at most {MAX_SECONDS:g}, not {timeout!r}: "
            "None is no limit"
        )


def _sampling(given: dict[str, Any]) -> dict[str, Any]:
    """Bring sampling options into the form of SamplingParams' fields."""
    fields: dict[str, Any] = {}
    for key, value in given.items():
        if value is None:
            continue
        if key in _TUPLES:
            fields[key] = _as_tuple(key, value, _TUPLES[key])
        elif key == "logit_bias":
            fields[key] = _as_bias(value)
        elif key in _WHOLE:
            _typed(key, value, int, "a whole number")
            if key == "seed":
                check_seed(value)
            fields[key] = value
        elif key in _REAL:
            check_number(key, value)
            fields[key] = float(value)
        elif key in _FLAGS:
            check_flags(**{key: value})
            fields[key] = value
        else:
            raise TypeError(f"gen() has no option {key!r}: {nearest(key, _GEN_OPTIONS)}")
    if fields.get("top_logprobs"):
        fields["logprobs"] = True
    for stop in fields.get("stop", ()):
        check_text(stop, f"stop {stop!a}")
    if "stop_regex" in fields:
        from .regex_check import check_regex

        for pattern in fields["stop_regex"]:
            if pattern:
                check_regex(pattern, is_stop=True)
    return fields


@lru_cache(maxsize=1024)
def _params(overrides: tuple[tuple[str, Any], ...]) -> SamplingParams:
    fields = dict(overrides)
    if "min_tokens" in fields and "max_tokens" not in fields:
        # the program's own max_tokens is checked against it when the gen is appended
        fields["max_tokens"] = max(_DEFAULT.max_tokens, fields["min_tokens"])
    return SamplingParams(**fields)


def sampling_params(given: SamplingParams | Mapping[str, Any]) -> SamplingParams:
    """Return sampling options, given as such or as a mapping of `gen`'s option names."""
    if isinstance(given, SamplingParams):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"sampling is a dict of gen's options, not {given!r}")
    return SamplingParams(**_sampling(dict(given)))


def _check_schema(constraint: JsonSchema) -> None:
    """Refuse what depends on `strict`; that it is a schema at all is known."""
    if constraint.strict:
        from .schema_check import check_spelling  # a program without schemas pays nothing

        check_spelling(constraint.schema)
    if '"pattern' in constraint.schema:
        from .schema_patterns import check_patterns

        check_patterns(constraint.schema, strict=constraint.strict)


def _lenient(constraint: Constraint | None) -> Constraint:
    if isinstance(constraint, JsonSchema):
        return JsonSchema(constraint.schema, strict=False)
    if constraint is None or isinstance(constraint, Regex | Grammar):
        raise ConstraintError("strict=False needs a schema: nothing else can be checked afterwards")
    return constraint  # a closed set of values leaves nothing to check


def _check_retries(retries: int, reask: bool, n: int, constraint: Constraint | None) -> None:
    _typed("retries", retries, int, "a whole number")
    if retries < 0:
        raise ValueError(f"retries must be 0 or more, not {retries}")
    if reask and not retries:
        raise ValueError("reask=True needs retries: say how often at most")
    if n > 1:
        raise ValueError("retries and n > 1 can't be combined: look at the samples and pick one")
    if constraint is None:
        raise ValueError("retries needs a type or a schema: any text is a value otherwise")


def _most_thinking(thinking: bool, given: int | None, heal: bool) -> int:
    """Check the options of thinking; return the most tokens that a think block may take."""
    if thinking and heal:
        raise ValueError(
            "heal and thinking can't be combined: a think block comes first in a turn, where there "
            "is no text to heal"
        )
    if given is None:
        return _DEFAULT_GEN.max_thinking_tokens
    if not thinking:
        raise ValueError("max_thinking_tokens needs thinking=True")
    _typed("max_thinking_tokens", given, int, "a whole number")
    _bounded("max_thinking_tokens", given, MAX_COUNT)
    return given


def _bounded(key: str, value: int, most: int) -> None:
    if value < 1:
        raise ValueError(f"{key} must be at least 1, not {value}")
    if value > most:
        raise ValueError(f"{key} must be at most {most:,}, not {value}")


def _typed(key: str, value: object, kind: Any, words: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{key} must be {words}, not {value!r}")


def _as_bias(value: object) -> tuple[tuple[int, float], ...]:
    what = "logit_bias takes a dict of token ids and numbers"
    try:
        table = dict(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise TypeError(f"{what}, not {type(value).__name__}") from None
    bias = []
    for token_id, shift in table.items():
        try:
            bias.append((int(token_id), float(shift)))
        except (TypeError, ValueError):  # the entry's alone: a whole vocabulary may be around it
            raise TypeError(f"{what}, not {token_id!r}: {shift!r}") from None
    return tuple(sorted(bias))


def _as_tuple(key: str, value: object, kind: type) -> tuple[Any, ...]:
    items = (value,) if isinstance(value, kind) else value
    if not isinstance(items, Iterable) or isinstance(items, str):
        raise TypeError(f"{key} takes {kind.__name__} values, not {value!r}")
    found = tuple(items)
    for item in found:
        if not isinstance(item, kind) or isinstance(item, bool):
            raise TypeError(f"{key} takes {kind.__name__} values, not {item!r}")
    return found


def _choices(choices: Iterable[str]) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Iterable):
        raise TypeError(f"choices takes a list of strings, not {choices!r}")
    if isinstance(choices, set | frozenset):  # a dict and its keys have an order
        raise TypeError(
            f"choices takes a list of strings, not a {type(choices).__name__}, whose order differs "
            "from one process to the next: sort it"
        )
    found = tuple(choices)
    if not found:
        raise ConstraintError("choices is empty: there is nothing to choose from")
    for choice in found:
        if not isinstance(choice, str):
            raise TypeError(f"a choice is a string, not {choice!r}")
        check_text(choice, f"choice {choice!a}")
    if len(set(found)) != len(found):
        twice = next(c for i, c in enumerate(found) if c in found[:i])
        raise ConstraintError(f"choices holds {twice!r} more than once")
    return found


def _constraint(
    *,
    schema: object,
    dtype: object,
    regex: str | None,
    grammar: str | Grammar | None,
    choices: Sequence[str] | None,
) -> tuple[Constraint | None, ValueType | None]:
    if schema is None and dtype is None and regex is None and grammar is None and choices is None:
        return None, None
    given = {
        "schema": schema,
        "dtype": dtype,
        "regex": regex,
        "grammar": grammar,
        "choices": choices,
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ConstraintError(f"{' and '.join(names)} can't be combined: give one of them")
    if regex is not None:
        if not isinstance(regex, str):
            hint = ": give its .pattern" if isinstance(regex, Pattern) else ""
            raise TypeError(f"regex is a string, not {regex!r}{hint}")
        from .regex_check import check_regex  # a program without regexes pays nothing

        check_regex(regex)
        return Regex(regex), None
    if grammar is not None:
        return _grammar(grammar), None
    if choices is not None:
        return Choices(_choices(choices)), None
    if dtype is not None and isinstance(dtype, str | dict | bool):
        raise TypeError(f"dtype takes a type, such as int, not {dtype!r}; a JSON schema is schema=")
    value = value_type(schema if dtype is None else dtype)
    return value.constraint, value


def _grammar(grammar: str | Grammar) -> Grammar:
    if isinstance(grammar, Grammar):
        found = grammar
    elif isinstance(grammar, str):
        found = Grammar(grammar, "gbnf" if "::=" in grammar else "lark")
    else:
        raise TypeError(f"grammar is text or a Grammar, not {grammar!r}")
    if not found.text.strip():
        raise ConstraintError("grammar is empty")
    if found.syntax == "gbnf":
        from .gbnf import check_gbnf  # a program without grammars pays nothing

        check_gbnf(found.text)
    else:
        from .lark_check import check_lark_text

        check_lark_text(found.text)
    return found
