"""A model's own chat template, cut into what comes before and after each turn's content.

Templates are rendered with markers in place of contents, so no user text ever passes through a
template, and what it returns is trusted to hold special tokens. It knows no token ids.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from umbel.lang.errors import ModelLoadError, ProgramError, UnsupportedFeatureError

logger = logging.getLogger(__name__)

_HINT = "pass template= with a template that renders every turn's content once, or template=''"
# Whatever a template's own code may raise when it dislikes a conversation.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_MARKER = re.compile(r"umbelTurn(\d+)Content")
_MAX_CACHED = 4096
# How families of models mark what they think (Qwen3, DeepSeek-R1 and others; Seed-OSS; Magistral).
_THINK_MARKS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
)


class ThinkFormat(NamedTuple):
    """The texts of the template around what a model thinks at the beginning of its turn."""

    start: str  # opens the turn and the block
    close: str  # the mark that ends the block
    after: str  # from there to the answer


class ChatTemplate:
    """Renders turn borders; every text depends on the roles before it only, and is cached.

    The history is frozen as it was appended (rule 10b): for each turn, the text is that of
    `start`, the content, and that of `end`. A template under which this differs from rendering
    the whole conversation anew is reported once, when it is loaded. Raises ModelLoadError for a
    template that can't be compiled or split.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens` are the template's variables, such as {"bos_token": "<s>"}."""
        self.source = source
        self._variables = {"bos_token": "", "eos_token": "", **(special_tokens or {})}
        self._marks = next((pair for pair in _THINK_MARKS if pair[1] in source), None)
        self._texts: dict[tuple[str, tuple[str, ...]], str] = {}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the chat template is no Jinja template: {error}") from error
        self._probe()

    def start(self, history: tuple[str, ...], role: str) -> str:
        """Return the text that opens a turn of `role` after turns of the roles in `history`.

        For the assistant it is the generation prompt, with thinking switched off: a block that the
        template always opens is closed, empty. A default system turn that the template adds is part
        of the first turn's start. Raises ProgramError for a role that the template refuses.
        """
        text = self._cached("start", history, role)
        if role == "assistant" and self._marks is not None:
            opened, closed = self._marks
            if text.rstrip().endswith(opened):
                text += f"\n{closed}\n\n"
        return text

    def end(self, history: tuple[str, ...], role: str) -> str:
        """Return the text that closes a turn of `role` after turns of the roles in `history`."""
        return self._cached("end", history, role)

    def thinking(self, history: tuple[str, ...]) -> ThinkFormat:
        """Return how an assistant's turn after `history` begins with a think block.

        Raises UnsupportedFeatureError for a template that has no such block, or that would have
        had to know of it in an earlier turn.
        """
        if self._marks is None:
            raise _no_thinking("it mentions no block of thoughts, such as <think>")
        opened, closed = self._marks
        off = self._cached("start", history, "assistant")
        try:
            quiet = self._split(history, generation=True)
            loud = self._split(history, generation=True, thinking=True)
        except _TEMPLATE_ERRORS as error:
            raise _no_thinking(f"it can't be rendered with it: {error}") from error
        if quiet is None or loud is None or quiet[:-1] != loud[:-1]:
            raise _no_thinking("it is switched on in an earlier turn, which stays as it is")
        same = _shared(quiet[-1], loud[-1])
        if not off.endswith(quiet[-1][same:]):
            raise _no_thinking("its generation prompt does not stand alone")
        start = off[: len(off) - len(quiet[-1]) + same] + loud[-1][same:]
        if start.rstrip().endswith(closed):
            raise _no_thinking("its generation prompt always ends the block at once")
        if not start.rstrip().endswith(opened):
            start += opened  # what the model would write first
        _, found, after = off.rpartition(closed)
        return ThinkFormat(start, closed, after if found else "\n\n")  # what models write there

    @cached_property
    def default_system(self) -> str | None:
        """The content of the system turn that the template adds where there is none."""
        try:
            start = self._cached("start", (), "user")
            pieces = self._split(("system", "user"))
        except (*_TEMPLATE_ERRORS, ProgramError):
            return None
        if pieces is None:
            return None
        before, between = pieces[0], pieces[1]
        is_around = start.startswith(before) and start.endswith(between)
        if not before or not is_around or len(start) <= len(before) + len(between):
            return None
        return start[len(before) : len(start) - len(between)]

    def _cached(self, kind: str, roles: tuple[str, ...], role: str) -> str:
        key = (kind, (*roles, role))
        text = self._texts.get(key)
        if text is None:
            text = self._start(roles, role) if kind == "start" else self._end(roles, role)
            if len(self._texts) >= _MAX_CACHED:
                self._texts.clear()
            self._texts[key] = text
        return text

    def _start(self, roles: tuple[str, ...], role: str) -> str:
        if _ROLE.fullmatch(role) is None:
            raise ProgramError(
                f"role {role!r} is no name: a role is a letter, then letters, digits, '_' or '-'"
            )
        gap = self._before(roles, role)
        if not roles:
            return gap
        closed = self._cached("end", roles[:-1], roles[-1])
        # Where the template takes back a part of what it closed the last turn with, the turn
        # stays as it was appended.
        return gap[_shared(closed, gap) :]

    def _before(self, roles: tuple[str, ...], role: str) -> str:
        """Return the text from the last content of `roles` (or the beginning) to the new one."""
        reason: Exception | None = None
        message = None
        for turns in ((*roles, role), *((*roles, role, then) for then in ("user", "assistant"))):
            try:
                pieces = self._split(turns)
            except _TEMPLATE_ERRORS as error:
                reason = reason or error
                continue
            if pieces is not None:
                message = pieces[len(roles)]
                break
        if role == "assistant":
            return self._generation_prompt(roles, message, reason)
        if message is None:
            self._refuse(role, roles, reason)
        return message

    def _generation_prompt(
        self, roles: tuple[str, ...], message: str | None, reason: Exception | None
    ) -> str:
        try:
            prompted = self._split(roles, generation=True)
        except _TEMPLATE_ERRORS:
            prompted = None
        if prompted is None:
            if message is None:
                self._refuse("assistant", roles, reason)
            return message
        prompt = prompted[-1]
        if message is None:
            return prompt
        if not roles:  # nothing was rendered that a default system turn could have come before
            return message if message.endswith(prompt) else prompt
        closed = self._cached("end", roles[:-1], roles[-1])
        if prompt.rstrip() == closed.rstrip() and message[len(closed) :].strip():
            return message  # the template knows no generation prompt, but does open the turn
        return prompt

    def _end(self, roles: tuple[str, ...], role: str) -> str:
        turns = (*roles, role)
        try:
            last = self._split(turns)
        except _TEMPLATE_ERRORS:
            last = None
        if last is None:  # rendered only with the turn that follows, which then brings all of it
            self._before(roles, role)
            return ""
        # What the last turn has and a turn in the middle has not belongs to the conversation's
        # end, not to the turn's. (Where that begins like the next turn, as </s> does like <user>,
        # the border comes out a character late; the two texts together are right.)
        then = "assistant" if role == "user" else "user"
        try:
            more = self._split((*turns, then))
        except _TEMPLATE_ERRORS:
            more = None
        tail = last[-1]
        return tail if more is None else tail[: _shared(tail, more[len(turns)])]

    def _split(
        self, roles: tuple[str, ...], generation: bool = False, thinking: bool = False
    ) -> list[str] | None:
        """Return the texts around the contents of turns; None if they can't be told apart."""
        pieces = self._render(roles, generation, thinking)
        if pieces is None and len(roles) > 2 and roles[0] == "system":
            # A template may move the system turn's content to the last user turn (Mistral's do).
            # It stays where it was, and what comes later is as it is without one.
            rest = self._render(roles[1:], generation, thinking)
            pieces = None if rest is None else ["", *rest]
        return pieces

    def _render(
        self, roles: tuple[str, ...], generation: bool = False, thinking: bool = False
    ) -> list[str] | None:
        """Render turns of `roles`; return the texts around their contents.

        None if the contents are not all there, once each and in order.
        """
        text = self._template.render(
            messages=[
                {"role": role, "content": f"umbelTurn{i}Content"} for i, role in enumerate(roles)
            ],
            add_generation_prompt=generation,
            enable_thinking=thinking,
            thinking=thinking,
            tools=None,
            documents=None,
            **self._variables,
        )
        pieces = _MARKER.split(text)
        if pieces[1::2] != [str(i) for i in range(len(roles))]:
            return None
        return pieces[::2]

    def _refuse(self, role: str, roles: tuple[str, ...], reason: Exception | None) -> NoReturn:
        place = f"after {', '.join(roles)}" if roles else "at the beginning"
        why = str(reason) if reason is not None else "it leaves the content out"
        raise ProgramError(
            f"the model's chat template refuses a {role!r} turn {place}: {why}: use roles that "
            "it has, in its order"
        ) from reason

    def _probe(self) -> None:
        """Check on conversations that turns can be split, and report if history is rewritten."""
        turns = ("user", "assistant", "user", "assistant", "user")
        try:
            self._compare(turns)
        except ProgramError as error:
            raise ModelLoadError(f"the chat template can't be split: {error}: {_HINT}") from error
        try:
            self._cached("start", (), "system")
            self._cached("start", ("system",), "user")
        except ProgramError:
            return  # no system turns: the program that opens one is told so
        self._compare(("system", *turns))

    def _compare(self, roles: tuple[str, ...]) -> None:
        try:
            whole = self._render(roles)
        except _TEMPLATE_ERRORS as error:
            raise ModelLoadError(
                f"the chat template can't render the turns {', '.join(roles)}: {error}: {_HINT}"
            ) from error
        if whole is None:
            if roles[0] == "system":
                logger.warning(
                    "the chat template moves the system turn along with the conversation; it "
                    "stays where it was appended"
                )
                return
            raise ModelLoadError(
                "the chat template can't be split: it does not render each of the turns "
                f"{', '.join(roles)} once and in order: {_HINT}"
            )
        closed = ""
        for i, role in enumerate(roles):
            piece = closed + self._cached("start", roles[:i], role)
            if piece != whole[i]:
                logger.warning(
                    "the chat template rewrites earlier turns: before turn %d (%s) the whole "
                    "conversation has %r where the turns one by one have %r; the history stays "
                    "as it was appended",
                    i,
                    role,
                    whole[i],
                    piece,
                )
                return
            closed = self._cached("end", roles[:i], role)


def _no_thinking(why: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        backend="local",
        feature="thinking=True",
        hint=f"the model's chat template has no way to switch it on here ({why}): leave it out, or "
        "use a model that thinks",
    )


def _shared(left: str, right: str) -> int:
    """Return how many leading characters two texts share."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it for instances

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that templates are written for: that of transformers.

    The time is that of loading, so that a template with a date gives stable prefixes.
    """
    now = datetime.datetime.now()

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return now.strftime(form)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
