"""What an OpenAI-compatible endpoint offers, and what is refused because it does not.

Decides from the graph alone, before anything is sent; knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from umbel.lang.constraints import Grammar, JsonSchema
from umbel.lang.errors import ProgramError, UnsupportedFeatureError
from umbel.lang.graph import GraphNode
from umbel.lang.ir import Gen, Join, Pick, RoleEnd, RoleStart, Select, SelectMethod, Text

from ..capability_check import check_op
from .base import Capabilities

Endpoint = Literal["chat", "completions"]
SelectBy = Literal["echo", "top_logprobs"]
BACKEND = "openai"

#: sampling options outside OpenAI's own API, by the values that mean "off"
EXTENSIONS: dict[str, object] = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "stop_token_ids": (),
}
_ALL_METHODS: frozenset[str] = frozenset(get_args(SelectMethod))
_SCORED_METHODS = _ALL_METHODS - {"unconditional_likelihood_normalized"}


@dataclass(frozen=True, slots=True)
class EndpointFeatures:
    """What an endpoint honours, as its owner declares it; nothing is probed.

    `continuation`: a last assistant message is continued, on vLLM's `continue_final_message`.
    `json_schema`: `response_format` with a schema. `select_by`: how choices are scored, by the
    log-probabilities of an echoed prompt (completions only) or those of the likeliest next tokens.
    `max_stops` is what goes to the endpoint; further stops are found here. `extensions` names
    sampling options outside OpenAI's API (`EXTENSIONS`) that it takes. `usage`: a stream ends with
    token counts when `stream_options` asks for them.
    """

    continuation: bool = False
    json_schema: bool = True
    n: bool = True
    seed: bool = True
    logprobs: bool = True
    max_top_logprobs: int = 20
    select_by: SelectBy | None = "top_logprobs"
    max_stops: int = 4
    usage: bool = True
    max_tokens_field: Literal["max_completion_tokens", "max_tokens"] = "max_completion_tokens"
    extensions: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Refuse names that no endpoint could honour."""
        unknown = sorted(self.extensions - EXTENSIONS.keys())
        if unknown:
            raise ProgramError(
                f"extensions names {', '.join(unknown)}; there are {', '.join(EXTENSIONS)}"
            )


CHAT = EndpointFeatures()
COMPLETIONS = EndpointFeatures(json_schema=False, max_top_logprobs=5, max_tokens_field="max_tokens")
#: for the routes of `umbel serve`, on either endpoint
UMBEL_SERVER = EndpointFeatures(
    continuation=True,
    max_top_logprobs=100,
    max_stops=64,
    max_tokens_field="max_tokens",
    extensions=frozenset(EXTENSIONS),
)


def capabilities_of(endpoint: Endpoint, features: EndpointFeatures, emulate: bool) -> Capabilities:
    """Return what a backend on such an endpoint honours."""
    methods: frozenset[str] = frozenset()
    if emulate:
        methods = _ALL_METHODS
    elif features.select_by is not None:
        methods = _SCORED_METHODS
    return Capabilities(
        roles=endpoint == "chat",
        regex=emulate,
        json_schema=features.json_schema or emulate,
        choices=emulate,
        select_methods=methods,
        n_samples=features.n,
        logprobs=features.logprobs,
        seed=features.seed,
    )


class Turn(NamedTuple):
    """Where a sequence stands: the open turn, and whether anything is in it."""

    role: str | None = None
    has_content: bool = False


class Refusals:
    """Reads a run's nodes as they come and refuses what the endpoint can't honour."""

    def __init__(
        self, endpoint: Endpoint, features: EndpointFeatures, capabilities: Capabilities
    ) -> None:
        self._endpoint = endpoint
        self._features = features
        self._capabilities = capabilities
        self._turns: list[Turn] = []

    def check(self, nodes: Sequence[GraphNode]) -> None:
        """Take more nodes; raises UnsupportedFeatureError and takes none of them."""
        turns = list(self._turns)
        for node in nodes:
            check_op(node.op, BACKEND, self._capabilities)
            turns.append(self._next(node, Turn() if node.parent is None else turns[node.parent]))
        self._turns = turns

    def _next(self, node: GraphNode, turn: Turn) -> Turn:
        op = node.op
        match op:
            case RoleStart(role=role):
                return Turn(role)
            case RoleEnd():
                return Turn()
            case Gen():
                self._check_gen(node, op)
                self._check_place(node, turn)
                return turn if op.n > 1 else turn._replace(has_content=True)
            case Select(choices=choices):
                if len(choices) > 1:
                    self._check_place(node, turn)
                    _check_choices(node, op)
            case Text(parts=parts):
                if not any(parts):
                    return turn
            case Join(mode="append") | Pick():
                pass
            case _:
                return turn
        if self._endpoint == "chat" and turn.role is None:
            raise _refusal(
                node,
                "text outside of turns",
                "wrap it in user(...), system(...) or assistant(...), or use the completions "
                "endpoint",
            )
        return turn._replace(has_content=True)

    def _check_place(self, node: GraphNode, turn: Turn) -> None:
        if self._endpoint != "chat":
            return
        if turn.role != "assistant":
            where = "outside of turns" if turn.role is None else f"in a {turn.role} turn"
            raise _refusal(
                node,
                f"a generation {where}",
                "a chat endpoint writes assistant turns only: use assistant(gen(...))",
            )
        if turn.has_content and not self._features.continuation:
            raise _refusal(
                node,
                "a generation that continues a started assistant turn",
                "put it at the turn's beginning, or declare "
                "EndpointFeatures(continuation=True) if the endpoint takes it",
            )

    def _check_gen(self, node: GraphNode, gen: Gen) -> None:
        sampling = gen.sampling
        for name, off in EXTENSIONS.items():
            if name not in self._features.extensions and getattr(sampling, name) != off:
                raise _refusal(
                    node, name, "declare it in EndpointFeatures.extensions if the endpoint takes it"
                )
        if sampling.top_logprobs > self._features.max_top_logprobs:
            raise _refusal(
                node,
                f"top_logprobs={sampling.top_logprobs}",
                f"the endpoint gives at most {self._features.max_top_logprobs}",
            )
        if gen.constraint is not None and sampling.stop:
            raise _refusal(node, "a stop in a constrained value", "leave one of the two out")
        if isinstance(gen.constraint, Grammar):
            raise _refusal(node, "grammar", "use a local model")
        wraps = not isinstance(gen.constraint, JsonSchema | None)
        if wraps and sampling.logprobs:
            raise _refusal(node, "logprobs of an emulated constraint", "leave one of the two out")


def _check_choices(node: GraphNode, select: Select) -> None:
    choices = select.choices
    if select.terminator is None and any(
        other.startswith(choice) for choice in choices for other in choices if other != choice
    ):
        raise ProgramError(
            f"{node.label}: one choice is empty or begins another: pass terminator=, which is "
            "scored after every choice"
        )


def _refusal(node: GraphNode, feature: str, hint: str) -> UnsupportedFeatureError:
    what = f"{feature} on {node.label}"
    return UnsupportedFeatureError(backend=BACKEND, feature=what, hint=hint)
