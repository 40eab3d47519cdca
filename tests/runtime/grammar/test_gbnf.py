"""GBNF means what llama.cpp says, whichever way it is compiled."""

from __future__ import annotations

import itertools
import random
import re
from functools import cache

import pytest

from umbel.lang import regex_syntax as rx
from umbel.lang.constraints import Grammar
from umbel.lang.errors import ConstraintError
from umbel.lang.gbnf import (
    Alternatives,
    Expression,
    Repetition,
    RuleRef,
    Sequence,
    Terminal,
    parse_gbnf,
)
from umbel.runtime.grammar import GrammarCompiler
from umbel.runtime.grammar.byte_dfa import Budget, ByteDFA, build_dfa
from umbel.runtime.grammar.gbnf_to_lark import LarkText
from umbel.runtime.grammar.grammar_builder import GrammarBuilder

from .walks import accepts, sentences

TEXTS = ["".join(p) for n in range(5) for p in itertools.product("abc", repeat=n)]


@cache
def automaton(node: rx.Node) -> ByteDFA:
    return build_dfa(node, Budget())


def derives(rules: dict[str, Expression], text: str) -> bool:
    """Whether `root` derives the text, by the definition: which ends each start can reach."""

    @cache
    def terminal_ends(node: rx.Node, start: int) -> frozenset[int]:
        dfa = automaton(node)
        ends = range(start, len(text) + 1)
        return frozenset(end for end in ends if dfa.matches(text[start:end].encode()))

    table: dict[tuple[str, int], frozenset[int]] = {}

    def ends(expression: Expression, start: int) -> frozenset[int]:
        match expression:
            case Terminal(node):
                return terminal_ends(node, start)
            case RuleRef(name):
                return table.get((name, start), frozenset())
            case Sequence(parts):
                reached = frozenset((start,))
                for part in parts:
                    reached = frozenset(e for s in reached for e in ends(part, s))
                return reached
            case Alternatives(options):
                return frozenset(e for option in options for e in ends(option, start))
            case Repetition(body, low, high):
                reached, found = frozenset((start,)), frozenset[int]()
                for count in range((high if high is not None else low + len(text)) + 1):
                    found |= reached if count >= low else frozenset()
                    reached = frozenset(e for s in reached for e in ends(body, s))
                return found

    while True:  # least fixed point
        new = {(n, s): ends(r, s) for n, r in rules.items() for s in range(len(text) + 1)}
        if new == table:
            return len(text) in table["root", 0]
        table = new


def random_expression(rng: random.Random, depth: int, names: list[str]) -> str:
    kind = rng.random()
    if depth == 0 or kind < 0.25:
        return rng.choice(['"a"', '"b"', '"ab"', "[a-b]", "[^a]", '"c"', *names])
    if kind < 0.55:
        parts = [random_expression(rng, depth - 1, names) for _ in range(2)]
        return f"{parts[0]} {parts[1]}"
    if kind < 0.8:
        parts = [random_expression(rng, depth - 1, names) for _ in range(2)]
        return f"({parts[0]} | {parts[1]})"
    sign = rng.choice(["*", "+", "?", "{2}", "{1,2}", "{0,1}", "{1,}"])
    return f"({random_expression(rng, depth - 1, names)}){sign}"


@pytest.mark.parametrize("is_recursive", [False, True])
def test_random_grammars_accept_what_their_rules_derive(
    is_recursive: bool, abc: GrammarCompiler
) -> None:
    rng = random.Random(11 + is_recursive)
    alphabet = {char: abc.vocabulary.encode(char)[0] for char in "abc"}
    num_compiled = 0
    for _ in range(25):
        names = ["x", "root"] if is_recursive else ["x"]
        text = (
            f"root ::= {random_expression(rng, 2, names)} | {random_expression(rng, 1, ['x'])}\n"
            f"x ::= {random_expression(rng, 2, ['x'] if is_recursive else [])} | [bc]\n"
        )
        rules = parse_gbnf(text).rules
        wanted = {sentence for sentence in TEXTS if derives(rules, sentence)}
        grammar = abc.compile(Grammar(text, "gbnf"))
        num_compiled += 1
        assert sentences(grammar, alphabet, 4) == wanted, text
    assert num_compiled == 25


def test_both_ways_of_compiling_agree(abc: GrammarCompiler) -> None:
    rng = random.Random(13)
    alphabet = {char: abc.vocabulary.encode(char)[0] for char in "abc"}
    for _ in range(20):
        text = f"root ::= {random_expression(rng, 3, ['x'])}\nx ::= {random_expression(rng, 2, [])}"
        grammar = parse_gbnf(text)
        node = grammar.as_regex()
        assert node is not None
        as_regex = sentences(abc.compile(Grammar(text, "gbnf")), alphabet, 4)
        as_lark = sentences(abc.compile(Grammar(LarkText(grammar).text)), alphabet, 4)
        assert as_regex == as_lark, text


@pytest.mark.parametrize(
    ("text", "valid", "invalid"),
    [
        ('root ::= "a\\n\\t\\x41\\u00e9\\"\\\\" # note\n', ['a\n\tAé"\\'], ["a"]),
        ("root ::= [a\\-\\]]+ | [^\\x00-\\x7f]", ["a-]", "é"], ["b", "éé"]),
        ("# first\n\nroot ::=\n  x |\n  y\nx ::= (\n \"p\"\n \"q\" )\ny ::= .",
         ["pq", "é", "p"], ["q q"]),
        ('root ::= x-1 x_2\nx-1 ::= "a"? \nx_2 ::= "b"{0,2}', ["", "abb", "bb"], ["abbb", "ba"]),
        ('root ::= ""', [""], ["a"]),
        ('root ::= "a" | ', ["", "a"], ["b"]),
        ('root ::= ("a" | "b" root)* "!"', ["!", "aab!!"], ["", "b"]),
    ],
)  # fmt: skip
def test_the_syntax_of_llama_cpp(
    text: str, valid: list[str], invalid: list[str], json_compiler: GrammarCompiler
) -> None:
    grammar = json_compiler.compile(Grammar(text, "gbnf"))
    for sentence in valid:
        assert accepts(grammar, json_compiler.vocabulary.encode(sentence)), sentence
    for sentence in invalid:
        assert not accepts(grammar, json_compiler.vocabulary.encode(sentence)), sentence


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("x ::= [a]", "line 1, column 1", "no rule named root"),
        ("# x\n\n  # y", "line 1, column 1", "no rule named root"),
        ("# x\n x ::= [a]\n\n", "line 2, column 2", "no rule named root"),
        ('root ::= "a" root', "line 1, column 1", "'root' can never end"),
        ('x ::= "a"\nroot ::= root', "line 2, column 1", "'root' can never end"),
        ('root ::= x+ | "a" y\nx ::= y\ny ::= x "b"', "line 1, column 1", "'root' can never end"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1", "twice"),
        ('root ::= "a" y', "line 1, column 14", "'y' is not defined"),
        ('root ::= "a', "line 1, column 10", "not closed"),
        ('root ::= ("a"', "line 1, column 14", r"expected \)"),
        ('root ::= "a")', "line 1, column 13", "end of the rule"),
        ("root ::= [b-a]", "line 1, column 11", "range"),
        ("root ::= []", "line 1, column 10", "empty"),
        ('root ::= "\\q"', "line 1, column 12", "escape"),
        ('root ::= "a"{2,1}', "line 1, column 13", "bounds"),
        ('root ::= "a"{x}', "line 1, column 13", "bounds"),
        ('root = "a"', "line 1, column 6", "::="),
        ("root ::= " + "(" * 200, "line 1, column 110", "deeper"),
        ('root ::= "a"' + "*" * 3000, "line 1, column 113", "deeper"),
        ('root ::= "b" |\n  ' + "[a]" + "{1,2}" * 3000, "line 2, column 506", "deeper"),
        ('root ::= ("a" | "b"' + "+" * 60 + ' "c")' + "?" * 60, "line 1, column 125", "deeper"),
    ],
)
def test_errors_say_where(text: str, where: str, what: str) -> None:
    with pytest.raises(ConstraintError, match=what) as caught:
        parse_gbnf(text)
    assert caught.value.where == where


def test_what_nests_as_deep_as_is_taken_compiles(abc: GrammarCompiler) -> None:
    for text in ("(" * 100 + '"a"' + ")?" * 100, "(" * 100 + '"a" | "b"' + "?" * 100 + ")" * 100):
        grammar = abc.compile(Grammar(f"root ::= {text}", "gbnf"))
        assert accepts(grammar, abc.vocabulary.encode("a"))


def test_a_grammar_that_grows_too_large_as_a_regex_stays_a_grammar() -> None:
    rules = "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(40))
    assert parse_gbnf(f'root ::= r0\n{rules}r40 ::= "a"').as_regex() is None


def test_left_recursion_means_what_it_says(abc: GrammarCompiler) -> None:
    alphabet = {char: abc.vocabulary.encode(char)[0] for char in "abc"}
    left = sentences(abc.compile(Grammar('root ::= root "a" | "b"', "gbnf")), alphabet, 4)
    lark = sentences(abc.compile(Grammar('start: start "a" | "b"')), alphabet, 4)
    assert left == lark == {"b", "ba", "baa", "baaa"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('root ::= "a" | "b" root "c"{0} "c"{0,0}', {"a", "ba", "bba", "bbba"}),
        ("root ::= " + "(" * 60 + '"a" | "b" root' + ")" * 60, {"a", "ba", "bba", "bbba"}),
        ('root ::= "a" | "b" ' + '("" | ' * 40 + "root" + ")" * 40,
         {"a", "b", "ba", "bb", "bba", "bbb", "bbba", "bbbb"}),
    ],
)  # fmt: skip
def test_what_llguidances_lark_lacks_is_written_in_other_words(
    text: str, wanted: set[str], abc: GrammarCompiler
) -> None:
    alphabet = {char: abc.vocabulary.encode(char)[0] for char in "abc"}
    assert sentences(abc.compile(Grammar(text, "gbnf")), alphabet, 4) == wanted


def test_a_place_in_the_lark_is_one_in_the_users_grammar() -> None:
    """Each character of what was made leads to what it was made from."""
    rng = random.Random(17)
    for _ in range(60):
        names = ["root", "x", "y"]
        bodies = [[random_expression(rng, depth, names) for depth in (4, 2)] for _ in names]
        rules = [f"{n} ::= {a} |\n {b}\n" for n, (a, b) in zip(names, bodies, strict=True)]
        text = "".join(rules) + "z ::= [a]"
        grammar = parse_gbnf(
            f"{text}\n" if _ends(text) else f"# {text[:3]}\nroot ::= [b] x?\nx ::= [a]"
        )
        lark = LarkText(grammar)
        source = grammar.source.split("\n")
        made = {f"r{i}": name for i, name in enumerate(grammar.rules)}
        for line, row in enumerate(lark.text.splitlines()[1:], 2):
            for column in range(row.index(":") + 1, len(row)):
                found = re.match(r"r\d+|/(?:\\.|[^/\\])+/", row[column:])
                if found is None or row[column - 1] not in " (":
                    continue
                place = lark.place_of(f"line {line}, column {column + 1}")
                at = [int(number) - 1 for number in re.findall(r"\d+", place)]
                there = source[at[0]][at[1] :]
                if found[0] in made:
                    assert there.startswith(made[found[0]]), (text, lark.text, place)
                else:
                    assert there[0] in '"[', (text, lark.text, place)


def _ends(text: str) -> bool:
    try:
        parse_gbnf(text)
    except ConstraintError:
        return False
    return True


def test_what_the_engine_refuses_of_a_recursive_grammar_is_placed_in_it(
    abc: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: object, _kind: str, text: str) -> None:
        column = text.splitlines()[2].index("/c/") + 1
        raise ConstraintError('too much (at "/c/" (a regex))', where=f"line 3, column {column}")

    monkeypatch.setattr(GrammarBuilder, "_follow", refuse)
    with pytest.raises(ConstraintError, match=r"^GBNF: too much at line 4, column 7$") as caught:
        abc.compile(Grammar('root ::= "a" | x\n# more\nx ::=\n  "b" "c" root', "gbnf"))
    assert caught.value.where == "line 4, column 7"
