"""SGLang's frontend language, name by name, over umbel: ``import umbel.interpreter.compat.sglang``.

A thin layer: programs become umbel's request graphs and run on umbel's backends; nothing here
executes anything. Where SGLang's behaviour is a defect this differs, see docs/migration-sglang.md.
"""

from .backends import (
    Anthropic,
    LiteLLM,
    OpenAI,
    Runtime,
    RuntimeEndpoint,
    VertexAI,
    flush_cache,
    get_server_info,
    set_default_backend,
)
from .choices import (
    ChoicesDecision,
    ChoicesSamplingMethod,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from .primitives import (
    REGEX_BOOL,
    REGEX_FLOAT,
    REGEX_INT,
    REGEX_STR,
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    image,
    select,
    separate_reasoning,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
    video,
)
from .program import SglFunction, function
from .state import ProgramState, ProgramStateGroup

__all__ = [
    "REGEX_BOOL",
    "REGEX_FLOAT",
    "REGEX_INT",
    "REGEX_STR",
    "Anthropic",
    "ChoicesDecision",
    "ChoicesSamplingMethod",
    "LiteLLM",
    "OpenAI",
    "ProgramState",
    "ProgramStateGroup",
    "Runtime",
    "RuntimeEndpoint",
    "SglFunction",
    "VertexAI",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]
