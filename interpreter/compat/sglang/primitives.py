"""SGLang's primitives with its parameters, in its order; each returns an expression of umbel.

Values are text, as SGLang's are: `int(s["n"])`, `json.loads(s["report"])`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import umbel.lang.primitives as lang
from umbel.lang.errors import ConstraintError, ProgramError
from umbel.lang.expressions import Expr, GenExpr, Part, SelectExpr
from umbel.lang.typed_values import FLOAT_PATTERN, INT_PATTERN

from .choices import ChoicesSamplingMethod, token_length_normalized

REGEX_INT = INT_PATTERN + r"[ \n]?"
REGEX_FLOAT = FLOAT_PATTERN + r"[ \n]?"
REGEX_BOOL = r"(True|False)"
REGEX_STR = r'"[\w\s]*"'

# A number ends where the model writes a blank: without one in the pattern, the only way out of a
# number would be another digit or the end of the text.
_NUMBER_ENDS = (" ", "\n")

#: SGLang's sampling options -> umbel's; `run` says max_new_tokens, `gen` says max_tokens
_SAMPLING = {
    "max_new_tokens": "max_tokens",
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "stop_regex": "stop_regex",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "ignore_eos": "ignore_eos",
    "return_logprob": "logprobs",
    "top_logprobs_num": "top_logprobs",
    "logprob_start_len": "prompt_logprobs",
    "return_text_in_logprobs": "",
}


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesSamplingMethod | None = None,
    regex: str | None = None,
    json_schema: str | dict[str, Any] | None = None,
) -> GenExpr[Any] | SelectExpr[str]:
    """Generate text, or with `choices` select one of them; see `umbel.gen` and `umbel.select`.

    At most one of `dtype`, `choices`, `regex` and `json_schema`. With ``n > 1`` the value is a
    list, and the text goes on with the first sample. Raises on this line for arguments that can't
    be used.
    """
    kinds = {"dtype": dtype, "choices": choices, "regex": regex, "json_schema": json_schema}
    given = [kind for kind, value in kinds.items() if value is not None]
    if len(given) > 1:
        raise ConstraintError(f"{' and '.join(given)} can't be combined: give one of them")
    if choices is not None:
        method = token_length_normalized if choices_method is None else choices_method
        return select(name, choices, temperature or 0.0, method)
    options = sampling_options(
        {
            "max_tokens": max_tokens,
            "min_tokens": min_tokens,
            "stop": stop,
            "stop_token_ids": stop_token_ids,
            "stop_regex": stop_regex,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "frequency_penalty": frequency_penalty,
            "presence_penalty": presence_penalty,
            "ignore_eos": ignore_eos,
            "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len,
            "top_logprobs_num": top_logprobs_num,
            "return_text_in_logprobs": return_text_in_logprobs,
        }
    )
    options["n"] = 1 if n is None else n
    if dtype is not None:
        options |= _dtype_options(dtype, options.get("stop"))
    if regex is not None:
        options["regex"] = regex
    if json_schema is not None:
        options["schema"] = json_schema
    made = lang.gen(name, **options)
    made.decode = None  # the value is the text
    return made


def gen_int(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
) -> GenExpr[Any] | SelectExpr[str]:
    """Generate a whole number; its value is the number's text."""
    return gen(**locals(), dtype=int)


def gen_string(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
) -> GenExpr[Any] | SelectExpr[str]:
    """Generate a JSON string; its value is the text with the quotes."""
    return gen(**locals(), dtype=str)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod = token_length_normalized,
    *,
    terminator: str | None = None,
) -> SelectExpr[str]:
    """Append the likeliest of `choices`; see `umbel.select`, also for `terminator` (not SGLang's).

    Raises TypeError for a method of one's own: umbel scores all choices in one forward pass, by
    one of its named methods.
    """
    if not isinstance(choices_method, ChoicesSamplingMethod):
        raise TypeError(
            f"choices_method takes token_length_normalized, greedy_token_selection or "
            f"unconditional_likelihood_normalized, not {choices_method!r}: to decide otherwise, "
            "read the table with s.get_meta_info(name)"
        )
    return lang.select(
        name,
        () if choices is None else choices,
        method=choices_method.method,
        temperature=temperature,
        terminator=terminator,
    )


def system(expr: Part | None = None) -> Expr:
    """Wrap an expression in a system turn; without one the turn is empty."""
    return _turn("system", expr)


def user(expr: Part | None = None) -> Expr:
    """Wrap an expression in a user turn; without one the turn is empty."""
    return _turn("user", expr)


def assistant(expr: Part | None = None) -> Expr:
    """Wrap an expression in an assistant turn; without one the turn is empty."""
    return _turn("assistant", expr)


system_begin = lang.system_begin
system_end = lang.system_end
user_begin = lang.user_begin
user_end = lang.user_end
assistant_begin = lang.assistant_begin
assistant_end = lang.assistant_end
image = lang.image


def video(path: str, num_frames: int) -> NoReturn:
    """Refuse: no backend takes videos."""
    raise ProgramError(f"video({path!r}, {num_frames}): videos are not supported")


def separate_reasoning(expr: Part | None = None, model_type: str | None = None) -> NoReturn:
    """Refuse: taking a think block out of a value that was appended would rewrite the text."""
    raise ProgramError(
        f"separate_reasoning(model_type={model_type!r}): umbel never changes text that was "
        "appended. Generate the think block under a name of its own: "
        "'<think>' + gen('thoughts', stop='</think>') + '</think>' + gen('answer')"
    )


def sampling_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return SGLang's sampling options as umbel's; None and empty stops count as not given."""
    options: dict[str, Any] = {}
    for key, value in given.items():
        if value is None or (key.startswith("stop") and not isinstance(value, str) and not value):
            continue
        if key == "return_text_in_logprobs":
            continue  # texts come with the log-probabilities, asked for or not
        if key == "logprob_start_len":
            options["prompt_logprobs"] = _asks_for_prompt(value)
        elif key == "top_k":
            options["top_k"] = 0 if value == -1 else value  # -1 is SGLang's word for off
        else:
            options[_SAMPLING[key]] = value
    return options


def is_sampling_option(name: str) -> bool:
    """Say whether `run` takes an option of this name."""
    return name in _SAMPLING


def _turn(role: str, expr: Part | None) -> Expr:
    return lang.role(role, "" if expr is None else expr)


def _asks_for_prompt(start: int) -> bool:
    if start not in (0, -1):
        raise ProgramError(
            f"logprob_start_len={start}: give 0 for the whole prompt or -1 for none, and slice "
            "input_token_logprobs"
        )
    return start == 0


def _dtype_options(dtype: type | str, stop: str | Sequence[str] | None) -> dict[str, Any]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if dtype in ("int", int):
        return {"regex": REGEX_INT, "stop": (*stops, *_NUMBER_ENDS)}
    if dtype in ("float", float):
        return {"regex": REGEX_FLOAT, "stop": (*stops, *_NUMBER_ENDS)}
    if dtype in ("bool", bool):
        return {"regex": REGEX_BOOL}
    if dtype in ("str", str):
        return {"schema": '{"type": "string"}'}
    raise TypeError(
        f"dtype takes int, float, bool or str, not {dtype!r}: for other types give json_schema=, "
        "or use umbel.gen(schema=...)"
    )
