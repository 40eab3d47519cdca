"""OpenAI's requests as data, and as graphs; runs nothing.

Fields that would change the answer and that we can't honour are refused, not ignored.
"""

from __future__ import annotations

import secrets
from typing import Any, Literal, TypeVar

import msgspec

from umbel.lang.constraints import Constraint, JsonSchema
from umbel.lang.errors import ProgramError
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Branch, Gen, Op, RoleEnd, RoleStart, Text
from umbel.lang.results import RunOptions
from umbel.lang.sampling_params import SamplingParams
from umbel.lang.wire import UNREADABLE, RunRequest

MAX_SAMPLES = 128
_UNBOUNDED = 1 << 30  # the engine ends a text at its longest row

T = TypeVar("T")


class TextPart(msgspec.Struct, frozen=True):
    """A part of a message's content; only text is taken."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True):
    """A turn."""

    role: str
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream sends besides its text."""

    include_usage: bool = False


class SchemaFormat(msgspec.Struct, frozen=True):
    """A schema for the answer."""

    schema: dict[str, Any] | bool = True
    name: str = ""
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    @property
    def constraint(self) -> Constraint | None:
        """The form as a constraint."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return JsonSchema('{"type": "object"}')
        if self.json_schema is None:
            raise ProgramError("response_format has the type json_schema, but no json_schema")
        schema = msgspec.json.encode(self.json_schema.schema).decode()
        return JsonSchema(schema, strict=bool(self.json_schema.strict))


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    """What both routes take; `top_k` and what follows it are additions to OpenAI's API."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None

    @property
    def num_samples(self) -> int:
        """How many samples of each prompt are wanted."""
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MAX_SAMPLES:
            raise ProgramError(f"n must be from 1 to {MAX_SAMPLES}, not {n}")
        return n

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self) -> RunOptions:
        """Return the run's options; without a seed, a new one."""
        seed = secrets.randbits(63) if self.seed is None else self.seed % 2**64
        return RunOptions(seed=seed)

    def gen(
        self, *, max_tokens: int, top_logprobs: int | None, prompt_logprobs: bool = False
    ) -> Gen:
        """Return the gen of one sample; raises ProgramError for a value out of its bounds."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        try:
            bias = tuple(sorted((int(i), b) for i, b in (self.logit_bias or {}).items()))
            sampling = SamplingParams(
                max_tokens=max_tokens,
                min_tokens=self.min_tokens or 0,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=self.top_k or 0,
                min_p=self.min_p or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                presence_penalty=self.presence_penalty or 0.0,
                repetition_penalty=(
                    1.0 if self.repetition_penalty is None else self.repetition_penalty
                ),
                logit_bias=bias,
                ignore_eos=bool(self.ignore_eos),
                stop=stop,
                stop_token_ids=tuple(self.stop_token_ids or ()),
                logprobs=top_logprobs is not None,
                top_logprobs=top_logprobs or 0,
                prompt_logprobs=prompt_logprobs,
            )
        except ValueError as error:
            raise ProgramError(str(error)) from None
        form = self.response_format
        return Gen("", sampling, None if form is None else form.constraint)


class ChatRequest(_Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`. With `continue_final_message` a last assistant turn goes on."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    def compile(self) -> tuple[RunRequest, list[int]]:
        """Return the run, and its gens' nodes, one for each sample."""
        if self.tools:
            raise ProgramError("tools are not supported: leave them out, or use select and schema")
        if not self.messages:
            raise ProgramError("messages is empty: there is nothing to answer")
        if self.continue_final_message:
            if self.messages[-1].role != "assistant":
                raise ProgramError("continue_final_message needs a last message of the assistant")
            if self.add_generation_prompt:
                raise ProgramError(
                    "continue_final_message and add_generation_prompt exclude each other"
                )
        elif self.add_generation_prompt is False:
            raise ProgramError("add_generation_prompt=false needs continue_final_message=true")
        if self.top_logprobs and not self.logprobs:
            raise ProgramError("top_logprobs needs logprobs=true")
        limit = self.max_completion_tokens
        if limit is None:
            limit = self.max_tokens
        gen = self.gen(
            max_tokens=_UNBOUNDED if limit is None else limit,
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )
        nodes = _Nodes()
        at: int | None = None
        for i, message in enumerate(self.messages):
            at = nodes.add(RoleStart(message.role), at)
            at = nodes.add(Text((message.text,)), at)
            if not (self.continue_final_message and i == len(self.messages) - 1):
                at = nodes.add(RoleEnd(message.role), at)
        if not self.continue_final_message:
            at = nodes.add(RoleStart("assistant"), at)
        gens = nodes.add_samples(gen, self.num_samples, at)
        return nodes.request(self.options()), gens


class CompletionRequest(_Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: str | list[str] = ""
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[str]:
        """The prompts; each has its samples, side by side in the answer."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

    @property
    def echoes_only(self) -> bool:
        """Whether the prompts come back, and nothing after them."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompts come back with their log-probabilities."""
        return bool(self.echo) and self.logprobs is not None

    def compile(self) -> tuple[RunRequest, list[int]]:
        """Return the run, and its gens' nodes, one for each sample of each prompt."""
        if self.suffix:
            raise ProgramError("suffix is not supported: there is no infilling here")
        if self.best_of is not None and self.best_of != self.num_samples:
            raise ProgramError("best_of is not supported: ask for n samples and choose")
        if not self.prompts:
            raise ProgramError("prompt is an empty list: there is nothing to go on with")
        if len(self.prompts) * self.num_samples > MAX_SAMPLES:
            raise ProgramError(f"prompts times n must be at most {MAX_SAMPLES}")
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        gen = self.gen(
            # a prompt is scored by a gen, whose one token is then left out of the answer
            max_tokens=1 if self.echoes_only else max_tokens,
            top_logprobs=self.logprobs,
            prompt_logprobs=self.scores_prompt,
        )
        nodes = _Nodes()
        gens: list[int] = []
        for prompt in self.prompts:
            gens += nodes.add_samples(gen, self.num_samples, nodes.add(Text((prompt,)), None))
        return nodes.request(self.options()), gens


def decode(data: bytes, kind: type[T]) -> T:
    """Read a request; raises ProgramError that names the field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE as error:
        raise ProgramError(f"the request can't be used: {error}") from None


class _Nodes:
    """Adds nodes one by one."""

    def __init__(self) -> None:
        self._nodes: list[GraphNode] = []

    def add(self, op: Op, parent: int | None) -> int:
        node_id = len(self._nodes)
        self._nodes.append(GraphNode(node_id, str(node_id), op, parent))
        return node_id

    def add_samples(self, gen: Gen, num_samples: int, parent: int | None) -> list[int]:
        """Add a branch for each sample, so that each streams."""
        gang = f"samples{len(self._nodes)}"
        gens = []
        for i in range(num_samples):
            branch = self.add(Branch(i, num_samples, gang), parent)
            gens.append(self.add(gen, branch))
        return gens

    def request(self, options: RunOptions) -> RunRequest:
        return RunRequest(RequestGraph(tuple(self._nodes)), options)
