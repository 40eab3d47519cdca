from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import transformers.utils.chat_template_utils as transformers_templates

from umbel.lang.errors import ModelLoadError, ProgramError
from umbel.runtime.chat_template import ChatTemplate

Turns = Sequence[tuple[str, str]]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}"
    "{% endif %}" + CHATML
)
# Trims contents, begins with BOS, has blocks whose newlines the environment must drop.
TRIMMING = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'odd' %}{% continue %}{% endif %}
    {{- '<|start|>' + message.role + '<|end|>\\n\\n' }}
    {%- generation %}{{- message.content | trim }}{% endgeneration %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""
# The system turn is a part of the user's; roles must alternate; there is no generation prompt.
FOLDED = """{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}
    {%- set system = false %}{%- set turns = messages %}
{%- endif %}
{%- for turn in turns %}
    {%- if (turn.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if turn.role == 'user' %}
        {{- bos_token + '[INST] ' }}
        {%- if loop.first and system %}{{- '<<SYS>>' + system + '<</SYS>>' }}{% endif %}
        {{- turn.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + turn.content + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}"""
# Thinks in the last turn only, as Qwen3's does.
THINKING = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.last %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
MOVING = """{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for turn in turns %}
    {%- if turn.role == 'user' %}
        {{- '[INST]' }}
        {%- if loop.last and system is defined %}{{- system + '\\n\\n' }}{% endif %}
        {{- turn.content + '[/INST]' }}
    {%- else %}
        {{- turn.content + eos_token }}
    {%- endif %}
{%- endfor %}"""
NO_PROMPT = CHATML[: CHATML.index("{% if add_generation_prompt")]
ENDS_WITH_EOS = CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CONVERSATION = [("user", "Hi"), ("assistant", "Hello."), ("user", "Why?"), ("assistant", "So.")]
WITH_SYSTEM = [("system", "Be brief."), *CONVERSATION]


def roles_of(turns: Turns) -> tuple[str, ...]:
    return tuple(role for role, _ in turns)


def text_of(template: ChatTemplate, turns: Turns) -> str:
    pieces = []
    for i, (role, content) in enumerate(turns):
        before = roles_of(turns[:i])
        pieces += [template.start(before, role), content, template.end(before, role)]
    return "".join(pieces)


def rendered(source: str, turns: Turns, add_generation_prompt: bool = False) -> str:
    """Return what transformers renders."""
    messages = [{"role": role, "content": content} for role, content in turns]
    variables: dict[str, Any] = {**TOKENS, "add_generation_prompt": add_generation_prompt}
    result = transformers_templates.render_jinja_template(
        [messages], chat_template=source, **variables
    )
    return str(result[0][0])


@pytest.mark.parametrize("turns", [CONVERSATION, WITH_SYSTEM], ids=["plain", "system"])
@pytest.mark.parametrize("source", [CHATML, DEFAULT_SYSTEM, TRIMMING, NO_PROMPT])
def test_turn_by_turn_text_is_that_of_the_whole_conversation(source: str, turns: Turns) -> None:
    template = ChatTemplate(source, TOKENS)
    for end in range(1, len(turns) + 1):
        assert text_of(template, turns[:end]) == rendered(source, turns[:end])


@pytest.mark.parametrize("turns", [CONVERSATION, WITH_SYSTEM], ids=["plain", "system"])
@pytest.mark.parametrize("source", [CHATML, DEFAULT_SYSTEM, TRIMMING, FOLDED])
def test_the_assistant_is_started_by_the_generation_prompt(source: str, turns: Turns) -> None:
    template = ChatTemplate(source, TOKENS)
    asked = turns[:-3]
    started = text_of(template, asked) + template.start(roles_of(asked), "assistant")
    assert started == rendered(source, asked, add_generation_prompt=True)


def test_a_template_without_generation_prompt_still_opens_the_turn() -> None:
    template = ChatTemplate(NO_PROMPT)
    assert template.start(("user",), "assistant") == "<|im_start|>assistant\n"


def test_a_default_system_turn_appears_once_and_is_shown() -> None:
    template = ChatTemplate(DEFAULT_SYSTEM)
    assert template.default_system == "Be kind."
    assert text_of(template, CONVERSATION).count("Be kind.") == 1
    assert "Be kind." not in text_of(template, WITH_SYSTEM)
    assert template.start((), "assistant").startswith("<|im_start|>system\nBe kind.")


@pytest.mark.parametrize("source", [CHATML, TRIMMING, FOLDED, THINKING])
def test_without_a_default_system_turn_there_is_none(source: str) -> None:
    assert ChatTemplate(source, TOKENS).default_system is None


def test_a_system_turn_inside_the_users_is_rendered_there() -> None:
    template = ChatTemplate(FOLDED, TOKENS)
    turns = [("system", "S"), ("user", "U")]
    assert text_of(template, turns) == "<s>[INST] <<SYS>>S<</SYS>>U [/INST]"


def test_a_system_turn_that_the_template_moves_stays_where_it_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        template = ChatTemplate(MOVING, TOKENS)
    assert ["moves the system turn" in record.message for record in caplog.records] == [True]
    assert text_of(template, CONVERSATION) == rendered(MOVING, CONVERSATION)
    asked = WITH_SYSTEM[:2]
    started = text_of(template, asked) + template.start(roles_of(asked), "assistant")
    assert started == rendered(MOVING, asked, add_generation_prompt=True)
    without = rendered(MOVING, CONVERSATION).partition("Hi")[2]
    assert text_of(template, WITH_SYSTEM) == "<s>[INST]Be brief.\n\nHi" + without


def test_thinking_is_off_and_the_history_stays_as_it_was_appended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        template = ChatTemplate(THINKING)
    prompt = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert template.start(("user",), "assistant") == prompt
    assert text_of(template, CONVERSATION).count("<think>") == 2
    assert [record.message for record in caplog.records if "rewrites" in record.message] != []
    caplog.clear()
    text_of(template, CONVERSATION)
    assert caplog.records == []


def test_what_ends_the_conversation_does_not_end_each_turn() -> None:
    template = ChatTemplate(ENDS_WITH_EOS, TOKENS)
    asked = CONVERSATION[:3]
    started = text_of(template, asked) + template.start(roles_of(asked), "assistant")
    assert started == rendered(CHATML, asked, add_generation_prompt=True)
    assert "</s>" not in text_of(template, CONVERSATION)


def test_a_faithful_template_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ChatTemplate(DEFAULT_SYSTEM, TOKENS)
        ChatTemplate(TRIMMING, TOKENS)
    assert caplog.records == []


def test_a_role_that_the_template_refuses_is_named() -> None:
    template = ChatTemplate(FOLDED, TOKENS)
    with pytest.raises(
        ProgramError, match="refuses a 'user' turn after user: roles must alternate"
    ):
        template.start(("user",), "user")
    with pytest.raises(ProgramError, match="refuses a 'odd' turn at the beginning: it leaves"):
        ChatTemplate(TRIMMING, TOKENS).start((), "odd")


@pytest.mark.parametrize("role", ["", "user<|im_end|>", "a b", "user\n", "1"])
def test_a_role_cannot_smuggle_text_into_the_template(role: str) -> None:
    with pytest.raises(ProgramError, match="is no name"):
        ChatTemplate(CHATML).start((), role)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "no Jinja template"),
        ("fixed text", "can't be split.*template="),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "template="),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "template="),
        ("{{ messages[-1].content }}", "template="),
        ("{{ raise_exception('no') }}", "no.*template="),
        ("{{ messages.append(1) }}", "template="),
        ("{{ ''.__class__.__mro__ }}", "template="),
    ],
)
def test_a_template_that_cannot_be_split_is_refused(source: str, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        ChatTemplate(source)


def test_filters_and_functions_are_those_of_transformers() -> None:
    source = "{{ {'b': 'ä<', 'a': [1]} | tojson(indent=1) }}{{ strftime_now('%Y') }}" + CHATML
    template = ChatTemplate(source)
    assert text_of(template, CONVERSATION) == rendered(source, CONVERSATION)
