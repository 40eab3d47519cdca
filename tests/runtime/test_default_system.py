"""Rule 10b: a system turn that the model's template adds is among the messages, once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.engine_harness import GRAMMAR, make_runner

import umbel as ub
from umbel.interpreter.backends.local import LocalBackend
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine
from umbel.runtime.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADDS = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"


@pytest.fixture(params=[ADDS, ""])
def added(request: pytest.FixtureRequest) -> Iterator[list[ub.Message]]:
    tokenizer = Tokenizer.byte_level(288, template=request.param + CHATML)
    engine = Engine(
        make_runner(), tokenizer, EngineConfig(), max_seq_len=512, grammar=GRAMMAR, start=True
    )
    with LocalBackend(engine) as backend, ub.use_backend(backend):
        yield [ub.Message(role="system", content="Be kind.")] if request.param else []


def test_the_templates_own_system_turn_is_shown_where_it_is_rendered(
    added: list[ub.Message],
) -> None:
    @ub.function
    def plain(s: ub.State) -> None:
        s += "Before. " + ub.user("Hi") + ub.assistant("Yes?") + ub.user("No")

    result = plain.run()
    roles = [message["role"] for message in result.messages[len(added) :]]
    assert result.messages[: len(added)] == added
    assert roles == ["user", "assistant", "user"]
    assert result.text() == "Before. HiYes?No"


def test_a_programs_own_system_turn_takes_its_place(added: list[ub.Message]) -> None:
    @ub.function
    def own(s: ub.State) -> None:
        s += ub.system("Be brief.") + ub.user("Hi")

    assert [message["content"] for message in own.run().messages] == ["Be brief.", "Hi"]


def test_branches_show_it_too(added: list[ub.Message]) -> None:
    @ub.function
    def forks(s: ub.State) -> list[ub.Message]:
        s += ub.user("Hi")
        (branch,) = s.fork(1)
        branch += ub.assistant("Yes?")
        return branch.messages

    turns = [ub.Message(role="user", content="Hi"), ub.Message(role="assistant", content="Yes?")]
    assert forks.run().value == [*added, *turns]
