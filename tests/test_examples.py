"""The examples run to their end on scripted backends, and on a server over HTTP."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.support.fake_endpoint import FakeEndpoint, Sent, text, whole
from tests.support.fake_engine import FakeEngine

import umbel as ub
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import Answer, Reply, ScriptedCall
from umbel.lang.ir import Select
from umbel.runtime.server import BackgroundServer, create_app

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
Load = Callable[[str], ModuleType]
Connect = Callable[..., list[str]]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Import an example by its name."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Connect:
    """Let `umbel.connect` give scripted backends; returns the list of what was connected to."""

    def scripted(script: Any) -> list[str]:
        refs: list[str] = []

        def connect(ref: str) -> ScriptedBackend:
            refs.append(ref)
            return ScriptedBackend(script)

        monkeypatch.setattr(ub, "connect", connect)
        return refs

    return scripted


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_is_short_and_says_how_it_is_started(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 150
    assert f"\npython examples/{path.name}" in text
    assert '"--model"' in text
    assert '"--backend"' in text


# --- quickstart ---------------------------------------------------------------------------------


class _Counting(ScriptedBackend):
    """A scripted backend whose counters are those of a server that others used before."""

    def __init__(self, script: Any, counters: list[tuple[float, ...]]) -> None:
        super().__init__(script)
        self._counters = iter(counters)

    def stats(self) -> dict[str, float]:
        names = ("prompt_tokens", "tokens_prefilled", "tree_tokens", "least_prefill")
        return dict(zip(names, next(self._counters), strict=True))


@pytest.mark.parametrize(
    ("counters", "prefilled", "rate", "is_hinted"),
    [
        ([(9000, 9000, 900, 0), (9400, 9100, 930, 0)], ["100"], ["75.0%"], True),
        ([(9000, 9000, 900, 70), (9400, 9100, 930, 90)], ["100", "20"], ["75.0%", "95.0%"], False),
    ],
    ids=["a server without the bound", "one with it"],
)
def test_the_quickstart_tells_what_its_own_runs_cost(
    load: Load,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    counters: list[tuple[float, ...]],
    prefilled: list[str],
    rate: list[str],
    is_hinted: bool,
) -> None:
    report = '{"title":"Late","team":"shipping","urgent":true,"next_step":"Call them"}'
    script = {"severity": "a problem", "note": "none", "report": report}
    monkeypatch.setattr(ub, "connect", lambda _: _Counting(script, counters))
    assert load("quickstart").main(["--backend", "http://server"]) == 0
    out = capsys.readouterr().out
    lines = {line[:40].strip(): line[40:].split() for line in out.splitlines()}
    assert lines["tokens prefilled"] == prefilled
    assert lines["cache hit rate"] == rate
    assert lines["select tree tokens"] == ["30"]
    assert ("best possible" in out) is not is_hinted
    assert ("--track-bound" in out) is is_hinted


# --- agent with tools ---------------------------------------------------------------------------


def test_the_agent_uses_tools_until_it_answers(
    load: Load, scripted: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    refs = scripted(
        {
            "next": ["look_up", "calculate", "answer"],
            "call": ['{"item":"kettle"}', '{"left":3,"operator":"*","right":39}'],
            "answer": " They cost 117 euros.",
        }
    )
    assert load("agent_with_tools").main(["What do three kettles cost?"]) == 0
    assert refs == ["smollm2"]
    assert capsys.readouterr().out.splitlines() == [
        "     user  What do three kettles cost?",
        'assistant  Next: look_up Arguments: {"item":"kettle"}',
        "     user  Result: the kettle costs 39 euros; 4 are in stock",
        'assistant  Next: calculate Arguments: {"left":3,"operator":"*","right":39}',
        "     user  Result: 3 * 39 = 117",
        "assistant  Next: answer",
        "     user  Now answer in one sentence.",
        "assistant  Answer: They cost 117 euros.",
    ]


def test_the_agent_stops_after_its_steps(load: Load) -> None:
    script = {"next": "look_up", "call": '{"item":"lamp"}', "answer": "No."}
    agent = load("agent_with_tools").agent
    with ScriptedBackend(script) as backend:
        result = agent.options(backend=backend).run("Is the lamp there?", max_steps=2)
    assert result.value == "No."
    assert result.text().count("0 are in stock") == 2


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ('{"left":1,"operator":"/","right":0}', "error: division by zero"),
        (Reply(text='{"left":1,"oper', accepting=False), "error: 'call'"),
    ],
)
def test_the_agent_is_told_what_went_wrong(load: Load, call: str | Reply, told: str) -> None:
    script: dict[str, Answer | list[Answer]] = {
        "next": ["calculate", "answer"],
        "call": [call],
        "answer": "No idea.",
    }
    agent = load("agent_with_tools").agent
    with ScriptedBackend(script) as backend:
        result = agent.options(backend=backend).run("What is it?")
    assert result.value == "No idea."
    assert f"Result: {told}" in result.text()


# --- RAG over a folder --------------------------------------------------------------------------


def test_rag_answers_from_the_passages_that_help(
    load: Load, scripted: Connect, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "cats.txt").write_text("Cats sleep for sixteen hours.")
    (tmp_path / "sub" / "dogs.md").write_text("Dogs sleep less than cats do.")
    (tmp_path / "tax.txt").write_text("Taxes are due in May.")
    (tmp_path / "cats.csv").write_text("cats,sleep")
    prompts = []

    def answers(call: ScriptedCall) -> str:
        prompts.append(call.prompt)
        if call.name == "helps":
            return "yes" if "sixteen" in call.prompt else "no"
        return {"note": "16 hours", "answer": "Sixteen hours."}[call.name]

    scripted(answers)
    assert load("rag_over_folder").main(["How long do cats sleep?", "--folder", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Sixteen hours.\n\nread: ")
    assert {"cats.txt:1", "sub/dogs.md:1"} == set(
        out.split("read: ")[1].splitlines()[0].split(", ")
    )
    assert out.endswith("used: cats.txt:1\n")
    assert "Notes:\n- cats.txt:1: 16 hours\nAnswer" in prompts[-1]
    assert "Dogs sleep" not in prompts[-1], "what a branch read stays in the branch"


def test_rag_says_when_no_passage_helps(load: Load) -> None:
    rag = load("rag_over_folder")
    passages = [rag.Passage("a:1", "one"), rag.Passage("b:1", "two")]
    with ScriptedBackend({"helps": "no", "note": "x", "answer": "I don't know."}) as backend:
        result = rag.answer.options(backend=backend).run("What?", passages)
    assert result.value == []
    assert "Notes: none." in result.messages[2]["content"]


@pytest.mark.parametrize("question", ["zebra?", "???", '"'])
def test_rag_finds_nothing(
    load: Load, scripted: Connect, tmp_path: Path, capsys: pytest.CaptureFixture[str], question: str
) -> None:
    refs = scripted(None)
    (tmp_path / "a.txt").write_text("Cats sleep.")
    assert load("rag_over_folder").main([question, "--folder", str(tmp_path)]) == 1
    assert "nothing in" in capsys.readouterr().err
    assert refs == [], "no model is loaded for nothing"


def test_rag_splits_text_without_losing_any(load: Load) -> None:
    text = "one\n\n" + "x" * 45 + "\n\n\ntwo\n  \nthree"
    passages = list(load("rag_over_folder").split(text, 20))
    assert passages == ["one", "x" * 20, "x" * 20, "xxxxx\ntwo\nthree"]


# --- extraction over a CSV ----------------------------------------------------------------------


def test_extraction_gives_a_line_for_each_row(
    load: Load, scripted: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    def answers(call: ScriptedCall) -> str:
        number = call.row + 1
        return json.dumps(
            {"product": f"p{number}", "quantity": number, "wish": "order", "express": False}
        )

    refs = scripted(answers)
    assert load("extract_csv").main(["--backend", "http://somewhere"]) == 0
    assert refs == ["http://somewhere"]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["row"], line["order"]["product"]) for line in lines] == [
        (i, f"p{i + 1}") for i in range(6)
    ]


def test_extraction_goes_on_after_rows_that_fail(
    load: Load, scripted: Connect, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good = '{"product":"lamp","quantity":1,"wish":"order","express":false}'

    def answers(call: ScriptedCall) -> Reply:
        if "broken" in call.prompt:
            return Reply(error=ub.BackendError("out of order"))
        if "long" in call.prompt:
            return Reply(text='{"product":"la', accepting=False)
        return Reply(text=good)

    scripted(answers)
    table = tmp_path / "mails.csv"
    table.write_text('body,id\n"broken",1\n"a long one",2\n"fine",3\n')
    assert load("extract_csv").main([str(table), "--column", "body"]) == 1
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert [sorted(line) for line in lines] == [
        ["error", "row"],
        ["error", "row"],
        ["order", "row"],
    ]
    assert "out of order" in lines[0]["error"]
    assert "max_tokens" in lines[1]["error"]
    assert lines[2]["order"] == json.loads(good)
    assert captured.err == "2 rows failed\n"


def test_extraction_goes_on_from_a_results_file(
    load: Load, scripted: Connect, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[int] = []

    def answers(call: ScriptedCall) -> Reply:
        asked.append(call.row)
        if call.row == 3 and asked.count(3) == 1:
            return Reply(error=ub.BackendError("out of order"))
        order = {"product": f"p{call.row}", "quantity": 1, "wish": "order", "express": False}
        return Reply(text=json.dumps(order))

    scripted(answers)
    command = ["--results", str(tmp_path / "done.jsonl")]
    assert load("extract_csv").main(command) == 1
    assert load("extract_csv").main(command) == 0
    assert sorted(asked) == [0, 1, 2, 3, 3, 4, 5]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()[6:]]
    assert [line["order"]["product"] for line in lines] == [f"p{i}" for i in range(6)]


def test_extraction_says_which_columns_there_are(load: Load) -> None:
    extract = load("extract_csv")
    with pytest.raises(SystemExit, match=r"no column 'body'; it has \['id', 'message'\]"):
        next(extract.read_column(extract.MESSAGES, "body"))


# --- tree of thought ----------------------------------------------------------------------------


def is_solution(numbers: tuple[int, ...], path: Any) -> bool:
    for move in path:
        before, after = move.text.split(" = ")
        a, sign, b = before.split()
        result = int(after.split()[0])
        assert eval(f"{a} {sign} {b}") == result
        left = list(numbers)
        left.remove(int(a))
        left.remove(int(b))
        numbers = tuple(sorted([*left, result]))
        assert numbers == move.left
    return numbers == (24,)


def test_the_tree_finds_24(
    load: Load, scripted: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(None)
    tree = load("tree_of_thought")
    assert tree.main(["4", "6", "8", "3"]) == 0
    assert capsys.readouterr().out.endswith("(left: 24)\n")
    with ScriptedBackend() as backend:
        path = tree.solve.options(backend=backend).run((4, 6, 8, 3)).value
    assert is_solution((4, 6, 8, 3), path)


def test_the_tree_follows_the_moves_that_the_model_prefers(load: Load) -> None:
    tree = load("tree_of_thought")
    wanted = ["8 + 4 = 12 (left: 4 6 12)", "6 - 4 = 2 (left: 2 12)"]
    seen = []

    def answers(call: ScriptedCall) -> Reply:
        seen.append(call.prompt)
        assert isinstance(call.op, Select)
        return Reply(
            scores={c: [-0.01 if c in wanted else -9.0] for c in call.op.choices},
        )

    with ScriptedBackend(answers) as backend:
        path = tree.solve.options(backend=backend).run((4, 4, 6, 8), width=1).value
    assert [move.text for move in path] == [*wanted, "12 * 2 = 24 (left: 24)"]
    assert len(seen) == 3
    assert seen[-1].endswith("\n".join(wanted) + "\n")


def test_the_tree_stops_without_waiting_for_the_round(load: Load) -> None:
    tree = load("tree_of_thought")
    best = "6 * 1 = 6 (left: 4 6)"
    stalled = []

    def answers(call: ScriptedCall) -> Reply:
        assert isinstance(call.op, Select)
        if best in call.op.choices:
            return Reply(scores={c: [-0.01 if c == best else -9.0] for c in call.op.choices})
        if call.prompt.endswith(best + "\n"):
            return Reply()
        stalled.append(call.address)
        return Reply(stalls=True)

    with ScriptedBackend(answers) as backend:  # what stalls would take the run's 20 s, and fail it
        path = tree.solve.options(backend=backend, timeout=20).run((4, 6, 1), width=3).value
    assert [move.text for move in path] == [best, "6 * 4 = 24 (left: 24)"]
    assert len(stalled) == 2


def test_the_tree_gives_up(
    load: Load, scripted: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(None)
    assert load("tree_of_thought").main(["1", "1", "1", "--max-rounds", "50"]) == 1
    assert capsys.readouterr().out == "no way to 24 was found\n"


# --- the same program anywhere ------------------------------------------------------------------


def test_the_same_program_runs_on_each_backend(
    load: Load, scripted: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    refs = scripted({"verdict": "no", "reason": "Wheels.", "summary": "A long ride."})
    assert load("anywhere").main(["--model", "m", "--backend", "http://a", "--backend", "b"]) == 0
    assert refs == ["m", "http://a", "b"]
    out = capsys.readouterr().out
    assert out.count("A long ride.\n  verdict: no\n  for:     Wheels.\n") == 3
    assert out.endswith("the same everywhere\n")


@pytest.mark.parametrize(
    ("argv", "used"), [([], ["smollm2"]), (["--backend", "http://a"], ["http://a"])]
)
def test_the_model_is_the_default_and_no_more(
    load: Load, scripted: Connect, argv: list[str], used: list[str]
) -> None:
    refs = scripted({"verdict": "no", "reason": "", "summary": ""})
    assert load("anywhere").main(argv) == 0
    assert refs == used


def test_two_servers_give_the_same(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    capabilities = {"token_native": True, "select_methods": ["token_length_normalized"]}
    app = create_app(engine, model_name="fake", capabilities=capabilities)
    with BackgroundServer(app) as one, BackgroundServer(app) as two:
        assert load("anywhere").main(["--backend", one.url, "--backend", two.url]) == 0
    engine.close()
    out = capsys.readouterr().out
    assert out.count("verdict: yes") == 2
    assert out.endswith("the same everywhere\n")


def test_an_openai_endpoint_runs_it_too(
    load: Load, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    likeliest = [{"token": t, "logprob": p} for t, p in [("no", -0.1), ("yes", -3), ("maybe", -4)]]

    def answer(body: dict[str, Any]) -> Sent:
        if body.get("stream"):
            return text("A long", " ride.")
        token = {**likeliest[0], "top_logprobs": likeliest}
        message = {"role": "assistant", "content": "no"}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        return whole({"id": "x", "choices": [choice | {"logprobs": {"content": [token]}}]})

    anywhere = load("anywhere")
    with FakeEndpoint(answer) as endpoint:
        assert anywhere.main(["--openai", "m", "--openai-url", endpoint.url]) == 0
        assert [body["messages"][0]["role"] for body in endpoint.requests] == ["system"] * 4
        out = capsys.readouterr().out
        assert out.startswith(f"m on {endpoint.url}\n  A long ride.\n  verdict: no\n")
    assert anywhere.main(["--openai", "m"]) == 1
    assert "OPENAI_API_KEY" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_an_error(
    load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load("anywhere").main(["--backend", "http://127.0.0.1:9"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err
