"""What the parser refuses, and where; what it reads like `re`."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
import re
import time
import warnings
from collections.abc import Callable

import pytest

from umbel.lang.errors import ConstraintError
from umbel.lang.primitives import gen
from umbel.lang.regex_check import check_regex
from umbel.lang.regex_parser import MAX_GROUP_DEPTH, parse, parse_search
from umbel.lang.regex_syntax import (
    NEVER,
    Both,
    Node,
    Without,
    alternate,
    concat,
    from_steps,
    literal,
    optional,
    render,
    to_steps,
)
from umbel.runtime.grammar.byte_dfa import Budget, build_dfa

from .regexes import random_regex

TEXTS = ["".join(p) for n in range(6) for p in itertools.product("abc", repeat=n)]


@pytest.mark.parametrize(
    ("pattern", "position", "name"),
    [
        ("ab(?=c)", 2, "look-ahead"),
        ("(?!a)b", 0, "negative look-ahead"),
        ("a(?<=a)b", 1, "look-behind"),
        ("a(?<!b)", 1, "negative look-behind"),
        (r"(a)b\1", 4, "back-reference"),
        ("(?P<x>a)(?P=x)", 8, "back-reference"),
        ("(a)?(?(1)b)", 4, "back-reference"),
        (r"a\b", 1, r"word boundary \\b"),
        (r"\Ba", 0, r"word boundary \\B"),
        ("ab*+", 3, "possessive"),
        ("(?>a)", 0, "atomic"),
        ("x(?i)a", 1, "flags"),
        (r"ab\p{L}", 2, "Unicode properties"),
        (r"a\qb", 1, r"unknown escape \\q"),
        ("ab[", 2, "unterminated character set"),
        ("a(b", 1, "unterminated group"),
        ("a)b", 1, "parenthesis"),
        ("a|*", 2, "nothing to repeat"),
        ("a**", 2, "multiple repeat"),
        ("a{2}{3}", 4, "multiple repeat"),
        ("^*", 0, "nothing to repeat"),
        ("ab{3,2}", 2, "minimum is above"),
        ("a{9999999}", 1, "up to"),
        ("a[z-b]", 2, "bad character range"),
        (r"[\d-z]", 1, "end of a range"),
        (r"ab\x4", 2, "2 hexadecimal"),
        (r"\u12", 0, "4 hexadecimal"),
        ("ab\\", 2, "bad escape"),
        (r"a\777", 1, "octal"),
        (r"\ud800", 0, "not a character"),
        (r"\U00110000", 0, "not a character"),
        ("a(?#b", 1, "comment"),
        ("a^b", 1, "something can come before"),
        ("(a$|b)c", 2, "something can follow"),
        ("(?P<1>a)", 0, "group name"),
        ("(" * (MAX_GROUP_DEPTH + 1) + ")" * (MAX_GROUP_DEPTH + 1), MAX_GROUP_DEPTH, "deeper"),
    ],
)
def test_what_is_not_regular_or_not_sound_is_refused_by_name_and_place(
    pattern: str, position: int, name: str
) -> None:
    with pytest.raises(ConstraintError, match=name) as caught:
        parse(pattern)
    assert caught.value.where == f"position {position}"


@pytest.mark.parametrize(
    "pattern",
    [
        "a{", "a{,}", "a{b}", "a{1,b}", "{a", "a{1", "[]a]", "[^]a]", "[a-]", "[-a]", r"[\]a]",
        "[a^]", r"a\{1\}", r"\.", r"[.]", r"\-", r"[\b]", "(?#note)a", "(?P<n>a)b", "a|", "|a", "",
        "()", "a||b", r"\x61\u0062\143", "[a-a]", r"\0", "^a|b$", "(^a|b)", "a{0}", "(a|^)b",
        "[[]", "a{2", "[a&&b]",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Possible")
def test_corners_of_the_syntax_read_like_re(pattern: str) -> None:
    dfa = build_dfa(parse(pattern), Budget())
    oracle = re.compile(pattern, re.ASCII)
    texts = [*TEXTS[:200], "a{", "a{,}", "a{b}", "a{1,b}", "{a", "a{1", "]", "-", "^", "a{1}", ".",
             "\b", "\0", "a{2", "[", "&", "b{"]  # fmt: skip
    for text in texts:
        assert dfa.matches(text.encode()) == bool(oracle.fullmatch(text)), text


@pytest.mark.parametrize("name", "dDwWsS")
def test_classes_are_ascii(name: str) -> None:
    dfa = build_dfa(parse("\\" + name), Budget())
    oracle = re.compile("\\" + name, re.ASCII)
    for code in [*range(0x250), 0x660, 0x1680, 0x2003, 0x2028, 0x3000, 0xFF11, 0x1D7D8]:
        assert dfa.matches(chr(code).encode()) == bool(oracle.fullmatch(chr(code))), hex(code)


def test_a_digit_that_is_not_ascii_may_be_escaped() -> None:
    assert parse("\\\u00b2") == literal("\u00b2")  # as in `re`: no back-reference


def test_a_search_pattern_matches_wherever_re_search_does() -> None:
    rng = random.Random(5)
    for _ in range(150):
        pattern = random_regex(rng, 2)
        pattern = rng.choice(
            (pattern, f"^(?:{pattern})", f"(?:{pattern})$", f"^a|{pattern}", f"(^|b)(?:{pattern})")
        )
        dfa = build_dfa(parse_search(pattern), Budget())
        oracle = re.compile(pattern, re.ASCII)
        for text in TEXTS:
            assert dfa.matches(text.encode()) == bool(oracle.search(text)), (pattern, text)


def test_a_printed_tree_is_read_back_to_the_same_language() -> None:
    rng = random.Random(6)
    for _ in range(100):
        node = parse(random_regex(rng, 3))
        if node == NEVER:
            continue
        printed = render(node).replace(r"\x{", r"\U{")
        # Rust writes \x{61}; ours and Python's reader want eight digits
        printed = re.sub(r"\\U\{([0-9A-F]+)\}", lambda m: rf"\U{m[1]:0>8}", printed)
        again, first = build_dfa(parse(printed), Budget()), build_dfa(node, Budget())
        assert (again.transitions == first.transitions).all()
        assert (again.accepting == first.accepting).all()


def test_trees_simplify() -> None:
    assert concat([literal("ab"), NEVER]) == NEVER
    assert alternate([NEVER, literal("ab")]) == literal("ab")
    assert alternate([literal("a"), literal("c"), literal("b")]) == parse("[a-c]")
    assert alternate([]) == NEVER
    assert optional(NEVER) == concat([])
    assert concat([literal("a"), concat([literal("b"), literal("c")])]) == literal("abc")


def test_a_tree_survives_the_way_through_steps() -> None:
    rng = random.Random(9)
    for _ in range(100):
        node = Both(parse(random_regex(rng, 4)), Without(parse(random_regex(rng, 3)), NEVER))
        assert from_steps(to_steps(node)) == node
    deep = parse("(a|" * 100 + "b" + ")*c" * 100)
    assert pickle.loads(pickle.dumps(to_steps(deep))) == to_steps(deep)


def test_shared_parts_are_sent_once() -> None:
    part = parse("[ab]c{2,3}")
    steps = to_steps(concat([part, literal("x"), part]))
    assert len(steps) == 5  # [ab], c, c{2,3}, x, and the whole


@pytest.mark.parametrize("num_times", [1, 2, 5])
@pytest.mark.parametrize(
    ("unit", "template"), [("(^|)", "{}b"), ("(|$)", "b{}"), ("(^||^)", "{}b{}"), ("(?:^|)", "{}b")]
)
def test_anchors_that_may_be_left_out_mean_what_they_mean_once(
    unit: str, template: str, num_times: int
) -> None:
    end = unit.replace("^", "$")
    once = template.format(unit, end)
    often = template.format(unit * num_times, end * num_times)
    dfa = build_dfa(parse_search(often), Budget())
    oracle = re.compile(once)
    for text in TEXTS[:200]:
        assert dfa.matches(text.encode()) == bool(oracle.search(text)), (often, text)


def test_too_many_places_of_an_anchor_are_refused() -> None:
    with pytest.raises(ConstraintError, match="anchors in more than"):
        parse_search("(^|)" * 250 + "b")


@pytest.mark.parametrize("read", [parse, parse_search])
def test_a_long_pattern_is_read_in_time_linear_in_its_length(read: Callable[[str], Node]) -> None:
    def seconds(length: int) -> float:
        started = time.thread_time()
        read("a" * length)
        return time.thread_time() - started

    seconds(1_000)
    assert seconds(128_000) < 60 * max(seconds(8_000) for _ in range(3))  # 256 if quadratic


_PIECES = (
    *"ab3,{}[]()|*+?\\^$. ", "{2}", "{1,", "[^", "-", "--", "&&", "(?:", "(?i)", "(?i:", "(?=",
    "\\b", "\\d", "\\p{L}", "\\1", "\\x41", "[:alpha:]", "\\N", "(?#", "(?P<n>", "\\u00e9", "\\z",
    "\\Z", "\\0", "\\ud83d", "\\ude00",
)  # fmt: skip


# what `re` and the engines read as characters that nobody meant
_MISREAD = ("a POSIX class", "a class in a class", "an operation on classes", "a repeat that is")


def _is_taken(pattern: str) -> bool:
    """Whether the engines take a pattern: all of them get it from the same reader."""
    try:
        return parse(pattern) != NEVER
    except ConstraintError:
        return False


def test_the_line_of_a_gen_refuses_exactly_what_no_engine_takes() -> None:
    """And nothing on that line ends in a warning of `re`, or in an error that isn't ours."""
    rng = random.Random(3)
    num_passed = num_anchors = 0
    for _ in range(30_000):
        pattern = "".join(rng.choices(_PIECES, k=rng.randrange(1, 8)))
        try:
            check_regex(pattern)
        except ConstraintError as error:
            num_anchors += "an anchor" in str(error)
            if not any(construct in str(error) for construct in _MISREAD):
                assert not (_is_taken(pattern) and _is_python(pattern)), pattern
            continue
        num_passed += 1
        assert _is_taken(pattern), pattern
    assert num_passed > 3000
    assert num_anchors > 300


def _is_python(pattern: str) -> bool:
    with contextlib.suppress(re.error), warnings.catch_warnings(action="ignore"):
        re.compile(pattern)
        return True
    return False


@pytest.mark.parametrize(
    ("pattern", "position", "words"),
    [
        ("a^b", 1, "something can come before it; leave it out"),
        ("(a|b$)c", 4, "something can follow it; leave it out"),
        ("a|(?:b\\A)", 6, "something can come before it"),
        ("(^a)+", 1, "something can come before it"),
        ("(?:a$)?b", 4, "something can follow it"),
        ("a(?:$)+", 1, "nothing to repeat but an anchor"),
    ],
)
def test_rule_1_an_anchor_inside_is_refused_on_the_line_of_its_gen(
    pattern: str, position: int, words: str
) -> None:
    with pytest.raises(ConstraintError) as caught:
        gen("x", regex=pattern)
    assert caught.value.where == f"position {position}"
    assert words in str(caught.value)
    gen("x", stop_regex=pattern)  # a stop is searched for


def test_rule_1_a_regex_without_a_text_is_refused_on_the_line_of_its_gen() -> None:
    with pytest.raises(ConstraintError, match="no text matches it"):
        gen("x", regex=r"a[^\s\S]|b[^\d\D]c")
    gen("x", regex=r"a[^\s\S]|b")  # the other option has texts


def test_a_deep_stack_leaves_the_pattern_to_the_engine() -> None:
    pattern = "(" * MAX_GROUP_DEPTH + "a" + ")" * MAX_GROUP_DEPTH

    def deeper(depth: int) -> None:
        check_regex(pattern) if not depth else deeper(depth - 1)

    check_regex.cache_clear()
    deeper(600)
