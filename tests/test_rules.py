"""No rule of docs/semantics.md and no case of the language stands without a test that names it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RULES = [*map(str, range(1, 17)), "10a", "10b"]

#: inputs that other languages answered wrongly, each with its right answer in the test
CASES = {
    1: "a backend fails before a read: the cause is raised",
    2: "after a failure, another gen is read: an error at once",
    3: "an int, None or a function is appended: TypeError on the line",
    4: "parameters named like options: they reach the body",
    5: "an argument bound and given: the given one; rows are unchanged",
    6: "a turn inside a turn: both are named",
    7: "a capture read in its own block: an error",
    8: "names with capitals, and a name used three times",
    9: "a fork of an empty prompt",
    10: "one of three branches fails: raised, or in its place",
    11: "a branch without the name: an explicit marker",
    12: "texts are appended in the branches' order, whoever ends first",
    13: "an append after the join: an error, values readable",
    14: "a prefix that branches share is computed once",
    15: "independent gens overlap, lazy reads do not serialise",
    16: "fork(0), fork(-1): ValueError",
    17: "no choices: refused when it is built",
    18: "a choice twice: refused",
    19: "the scores of three methods, by hand",
    20: "a log-probability of exactly 0 counts",
    21: "a choice merges with the prompt's last token: one context for all",
    22: "two thousand choices: the tree's nodes bound the cost",
    23: "one choice: no pass of the model",
    24: "a stop that tokens split, in any order of stops",
    25: "an emoji over several tokens streams whole",
    26: "a slow consumer loses nothing",
    27: "an async reader blocks no loop",
    28: "patterns: what is fulfilled ends, what can't be enforced is refused",
    29: "schemas: references, unsatisfiable, unsupported, cut, white space",
    30: "a program is compiled, or a diagnostic points to its line",
}

_NAME = re.compile(r"test_(rule|case)_(\d+[ab]?)_")


def _named() -> dict[tuple[str, str], list[str]]:
    """Return the tests that name a rule or a case, by which one it is."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = _NAME.match(node.name)
                if name is not None:
                    found[name[1], name[2]].append(f"{path.relative_to(ROOT)}::{node.name}")
    return found


NAMED = _named()


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_has_a_test_that_names_it(rule: str) -> None:
    assert NAMED["rule", rule], f"no test_rule_{rule}_... is left: write one"


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_a_test_that_names_it(case: int) -> None:
    assert NAMED["case", str(case)], f"no test_case_{case}_... is left ({CASES[case]}): write one"


def test_no_test_names_a_rule_or_case_that_is_not_there() -> None:
    known = {("rule", rule) for rule in RULES} | {("case", str(case)) for case in CASES}
    strangers = {key: tests for key, tests in NAMED.items() if tests and key not in known}
    assert not strangers


def test_the_page_of_the_rules_has_these() -> None:
    page = (ROOT / "docs" / "semantics.md").read_text()
    assert re.findall(r"^(\d+)\. ", page, re.MULTILINE) == RULES[:16]
    tenth = page.split("\n10. ")[1].split("\n## ")[0]
    assert re.findall(r"\((a|b)\)", tenth) == ["a", "b"]
