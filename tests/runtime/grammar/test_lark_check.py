"""What is wrong with a Lark grammar shows on the line of its gen, with line and column."""

from __future__ import annotations

import contextlib
import random
from collections import Counter

import numpy as np
import pytest

from umbel.lang.constraints import Grammar
from umbel.lang.errors import ConstraintError
from umbel.lang.lark_check import check_lark_text
from umbel.lang.primitives import gen
from umbel.runtime.grammar import GrammarCompiler
from umbel.runtime.grammar.endless_lexemes import has_endless_lexeme
from umbel.runtime.grammar.llguidance import (
    NO_LOOKING_AHEAD,
    LLGuidanceTokenizers,
    compile_llguidance,
)

from .vocabularies import abc_vocabulary
from .walks import sentences

END = "can never end"


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("// nothing\n", "line 1, column 1", "no rule named start"),
        ('begin: "a"', "line 1, column 1", "no rule named start"),
        ('starts: "a"', "line 1, column 1", "did you mean 'starts'"),
        ('START: "a"', "line 1, column 1", "no rule named start"),
        ("start: x\nx: z", "line 2, column 4", "'z' is not defined"),
        ('start: number\nnumbr: "1"', "line 1, column 8", "did you mean 'numbr'"),
        ('start: "a" | Xyz', "line 1, column 14", "'Xyz' is not defined (a name is in small"),
        ("%ignore WS\nstart: /a/", "line 1, column 9", "'WS' is not defined"),
        ('start: x\n x: "a"\n?x: "b"', "line 3, column 1", "'x' is defined twice"),
        ('start: X\nX: "a"\nX: "b"', "line 3, column 1", "'X' is defined twice"),
        ('start: X\nX: "a" Y\nY: "b" | X', "line 3, column 10", "'X' holds itself"),
        ('start: "a" start', "line 1, column 1", END),
        ('start: start "a"', "line 1, column 1", END),
        ('\nstart: (x | "a" y)+\nx: y y\ny: x "b"', "line 2, column 1", END),
        ('start: "a"\nRule: "b"', "line 2, column 1", "'Rule' is no name"),
        ('start: "a"\nx "b"', "line 2, column 6", "expected a colon after 'x'"),
        ('start: "a"\n\n| "b"\n"c"', "line 4, column 1", "expected a rule"),
        ('start: "a"\n  "b"', "line 2, column 3", "expected a rule"),
        ("start: 'a'", "line 1, column 8", "double quotes"),
        ('start: x\nx: "a', "line 2, column 4", "not closed"),
        ("start: /a", "line 1, column 8", "not closed"),
        ('start: "a";', "line 1, column 11", "ends with its line"),
        ('start: ("a" | "b"', "line 1, column 8", "( is not closed"),
        ('start: "a")', "line 1, column 11", ") closes nothing"),
        ("start: /ab(?=c)/", "line 1, column 11", "look-around ((?=)"),
        (r"start: /a|(b)\1/", "line 1, column 14", r"a back-reference (\1)"),
        ("start: <|end|>", "line 1, column 8", "special token"),
        ("start: @json", "line 1, column 8", "grammar elsewhere"),
        ('start: "a"\n %llguidance {}', "line 2, column 2", "options"),
        ('start: %json {"type": }', "line 1, column 14", "not JSON"),
        ('start: %json {"a": 1, "a": 2}', "line 1, column 14", "duplicate key"),
        ('start: %json {"type": "strng"}', "line 1, column 14 /type", "did you mean 'string'"),
        ('start: "a"\n  | %json {"pattern": "a^"}', "line 2, column 11 /pattern", "an anchor"),
    ],
)  # fmt: skip
def test_rule_1_a_grammar_is_refused_on_the_line_of_its_gen(
    text: str, where: str, what: str, json_compiler: GrammarCompiler
) -> None:
    with pytest.raises(ConstraintError) as caught:
        gen("x", grammar=text)
    assert caught.value.where == where
    assert what in str(caught.value)
    assert f" at {where.partition(' /')[0]}" in str(caught.value)
    with pytest.raises(ConstraintError) as again:  # and a graph that came from elsewhere
        json_compiler.compile(Grammar(text))
    assert again.value.where == where


@pytest.mark.parametrize(
    "text",
    [
        'start: "a" | start "b"',
        'start: "a" | "b" start',
        'start: x? ("y" start | [start])\nx: x "never"',
        'start: x~0..2 "a" | x{,2} | x{0}"b"\nx: x',
        'start: "a"\nunused: nothing <|end|> @other /(?=a)/\nunused2: unused2',
        'start: INT WS n -> all\n%import common (INT, WS)\n%import common.NUMBER -> N\n!n: N',
        'start: /[(?=)]/ /\\(\\?=/ /a[\\]\\[(?!]/ "(?=" // (?=\n# <x>\n',
        'start[max_tokens=3]: "a" start',
        'start: A & B\nA: /a*/\nB: ~/aa/',
        '?start : x-1 _Y-1\nx-1: "a"i\n_Y-1: "b".."d"\r\n\t| "x"',
        '%ignore /[ \\n]+/ | "#"\nstart: "%json {" %json {"type": "null"} %json true',
        'start: <[5-9]>',
    ],
)  # fmt: skip
def test_what_the_dialect_has_is_taken(text: str) -> None:
    check_lark_text(text)


_PIECES = (
    *"()[]|?*+:~,.&", " ", " ", " ", "\n", "\n | ", '"a"', '"b"i', "/b+/", "/[^/]/", "x", "y", "X",
    "Y", "start", "\nx: ", "\ny: ", "\nX: ", "\n?x: ", "\n!y: ", "{2}", "{0,1}", "{,2}", "~2",
    "~0..1", "->", "%ignore ", "%import common.INT", "INT", "<[7]>", "<e>", "@x", "# c", "// c",
    "'", '"', "/", "_x", "Ab", "..", "[lazy]", "%json {}", '%json {"type": "null"}', "é", ";",
    "\\", "-", "1",
)  # fmt: skip


def test_the_line_of_a_gen_refuses_no_grammar_that_the_engine_takes() -> None:
    rng = random.Random(4)
    tokenizers = LLGuidanceTokenizers(abc_vocabulary())
    outcomes = Counter[tuple[bool, bool]]()
    for _ in range(4000):
        few = rng.random() < 0.7  # most have but a few odd places
        body = ['"a"', " ", "x", " ", "|", ' "b"', "\n", "x:", ' "c"', " Y", "\n", "Y: ", "/b/"]
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(body) + 1)
            body[at : at + rng.randrange(3)] = rng.choices(_PIECES, k=rng.randrange(3))
        if not few:
            body = rng.choices(_PIECES, k=rng.randrange(1, 12))
        text = "start: " + "".join(body)
        line = _refusal(text)
        ahead = NO_LOOKING_AHEAD if line or has_endless_lexeme(text) else ""
        try:
            compile_llguidance(tokenizers, "lark", text + ahead)
        except ConstraintError:
            outcomes[bool(line), True] += 1
        else:
            assert not line or END in line, (text, line)
            outcomes[bool(line), False] += 1
    assert outcomes[True, True] > 5 * outcomes[False, True] > 0
    assert outcomes[False, False] > 500


def _refusal(text: str) -> str:
    try:
        check_lark_text(text)
    except ConstraintError as error:
        return str(error)
    return ""


def test_a_start_that_can_end_is_one_that_has_sentences(abc: GrammarCompiler) -> None:
    rng = random.Random(5)
    alphabet = {char: abc.vocabulary.encode(char)[0] for char in "abc"}
    verdicts = Counter[bool]()
    for _ in range(60):
        names = ["start", "x", "y"]
        rules = []
        for name in names:
            parts = [rng.choice([*names, '"a"', '"b"', "(x y)?", "y*"]) for _ in range(3)]
            rules.append(f"{name}: {parts[0]} {parts[1]} | {parts[2]} {rng.choice(names)}")
        text = "\n".join(rules)
        refused = _refusal(text)
        assert not refused or END in refused
        verdicts[bool(refused)] += 1
        tokenizers = LLGuidanceTokenizers(abc.vocabulary)
        try:
            found = sentences(compile_llguidance(tokenizers, "lark", text), alphabet, 6)
        except ConstraintError:
            found = set()
        assert bool(found) <= (not refused), text
        if not refused:
            assert found, text
    assert min(verdicts.values()) > 10


def test_rule_15_checking_takes_time_linear_in_the_grammar() -> None:
    check_lark_text(
        "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(20_000)) + 'r20000: "a"'
    )
    check_lark_text("start: " + "(" * 3000 + '"a"' + ")" * 3000)
    check_lark_text("start: " + "[" * 200_000)
    check_lark_text("start: " + '"a" ' * 100_000)


@pytest.mark.parametrize(
    "rest",
    [
        "/b+/ /b+/", "/b*/ /b/ x\nx: /b+/", '/(bd)+/ /b/', 'X "b"\nX: "b"+', 'X X\nX: "b"{2,}',
        'X X\nX: Y+\nY: "b" "d"', "X X\nX: (Y | Y Y)*\nY: /b/", "/(b|bb)+/ /b+/", "/b{2,}/i /b+/",
        'X X\nX: ("b"+ "b"*)', "X X\nX: A & B\nA: /[ab]+/\nB: /[bc]+/", "/[b]+/ /b+/",
    ],
)  # fmt: skip
def test_rule_15_a_lexeme_that_repeats_one_text_ends_no_step_late(
    rest: str, abc: GrammarCompiler
) -> None:
    """llguidance looks ahead while there is one way to go on, which was for ever."""
    grammar = abc.compile(Grammar(f'start: "a" | "c" {rest}'))
    matcher = grammar.matcher()
    row = np.zeros((abc.vocabulary.size + 31) // 32, np.int32)
    for char in "cb":
        assert matcher.accept(abc.vocabulary.encode(char)[0])
        with contextlib.suppress(ConstraintError):  # that nothing can follow
            matcher.fill(row)
            assert len(matcher.forced()) < 10


@pytest.mark.parametrize(
    "text",
    [
        'start: /"(\\\\.|[^"\\\\])*"/ WS NAME\nWS: /[ \\t]+/\nNAME: LETTER (LETTER | "0".."9")*\n'
        "%import common.LETTER",
        'start: "b"+ x*\nx: "b"{2,} "a"',
        'start: N ("," N)*\nN: DIGIT+ ("." DIGIT{2,})?\nDIGIT: "0".."9"',
        "start: /[a-z]*[0-9]+/ /b{2,7}/",
    ],
)
def test_most_grammars_are_looked_ahead_in(text: str) -> None:
    check_lark_text(text)
    assert not has_endless_lexeme(text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('start: "a" | <[5]>', ["a", "c"]),  # 3 is the first id with text, "a"
        ('start: "ab" | <[0-5]>', ["a", "ab", "b", "c"]),
        ('start: "a" <[2]>', []),  # a special token is no text
    ],
)
def test_a_mask_lets_through_what_can_be_accepted_where_ids_are_named(
    text: str, wanted: list[str], abc: GrammarCompiler
) -> None:
    vocabulary = abc.vocabulary
    try:
        matcher = abc.compile(Grammar(text)).matcher()
    except ConstraintError:
        matcher = None
    row = np.zeros((vocabulary.size + 31) // 32, np.int32)
    allowed = []
    if matcher is not None:
        matcher.fill(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        assert all(matcher.fork().accept(i) for i in allowed)
        if not wanted:
            assert matcher.accept(allowed[0])
            with pytest.raises(ConstraintError, match="no token of the model"):
                matcher.fill(row)
            return
    assert {vocabulary.token_bytes[i].decode() for i in allowed} == set(wanted)


def test_an_engines_refusal_has_its_place_in_the_message(abc: GrammarCompiler) -> None:
    with pytest.raises(ConstraintError, match=r"^grammar: .* at line 2, column 4$") as caught:
        abc.compile(Grammar('start: x\nx: "a"{3,2}'))
    assert caught.value.where == "line 2, column 4"
