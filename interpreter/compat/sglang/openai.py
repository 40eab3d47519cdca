"""SGLang's OpenAI backend by its arguments, as umbel's; loads the client when one is made."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from umbel.lang.errors import UnsupportedFeatureError
from umbel.lang.results import Event, NodeFinished, RunOptions

from ...backends.base import EventSink, Session
from .backends import WrappedBackend

if TYPE_CHECKING:
    from ...backends.openai_features import EndpointFeatures

#: the models that SGLang asks through the completions endpoint unless it is told otherwise
_COMPLETION_MODELS = frozenset({"gpt-3.5-turbo-instruct"})
#: arguments of the official client that umbel's backend honours
_CLIENT = frozenset({"api_key", "base_url", "max_retries", "timeout"})


@dataclass(slots=True)
class TokenUsage:
    """The tokens that a backend was charged for, since it was made or since `reset`."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def reset(self) -> None:
        """Count from zero again."""
        self.prompt_tokens = self.completion_tokens = 0


class OpenAI(WrappedBackend):
    """An OpenAI-compatible endpoint as a backend; see `umbel`'s OpenAIBackend.

    `is_chat_model` chooses the endpoint; without it all models but gpt-3.5-turbo-instruct are
    asked as chat models. Of the client's arguments there are `api_key`, `base_url`, `timeout` and
    `max_retries`. `features` and `emulate`, which SGLang's class has not, say what the endpoint
    honours, and whether to ask in plain words for what it does not.

    Raises UnsupportedFeatureError for Azure, for a template and for other arguments of the client,
    ProgramError where the key is missing or the address can't be used.
    """

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: object = None,
        is_azure: bool = False,
        *,
        features: EndpointFeatures | None = None,
        emulate: bool = False,
        **client: Any,
    ) -> None:
        if is_azure:
            _refuse("is_azure", "give base_url= of an endpoint that takes a bearer token")
        if chat_template is not None:
            _refuse("chat_template", "leave it out: a chat endpoint renders turns itself")
        for name in client:
            if name not in _CLIENT:
                _refuse(name, f"leave it out; there are {', '.join(sorted(_CLIENT))}")
        from ...backends.openai import OpenAIBackend

        if is_chat_model is None:
            is_chat_model = model_name not in _COMPLETION_MODELS
        given = {name: value for name, value in client.items() if value is not None}
        backend = OpenAIBackend(
            model_name,
            endpoint="chat" if is_chat_model else "completions",
            features=features,
            emulate=emulate,
            **given,
        )
        super().__init__(backend)
        self.model_name = model_name
        self.is_chat_model = is_chat_model
        self.token_usage = TokenUsage()
        self._counting = threading.Lock()

    def open(self, options: RunOptions, sink: EventSink) -> Session:
        """Start a run; its events go to `sink`."""

        def counting(events: Sequence[Event]) -> None:
            self._count(events)
            sink(events)

        return super().open(options, counting)

    def _count(self, events: Sequence[Event]) -> None:
        with self._counting:
            for event in events:
                if isinstance(event, NodeFinished):
                    usage = event.result.usage
                    self.token_usage.prompt_tokens += usage.prompt_tokens
                    self.token_usage.completion_tokens += usage.completion_tokens


def _refuse(feature: str, hint: str) -> None:
    raise UnsupportedFeatureError(backend="openai", feature=feature, hint=hint)
