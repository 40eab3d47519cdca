"""The command line: what it prints, where, and with which status."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
from tests.support.fake_engine import FakeEngine

from umbel import __version__
from umbel.cli import EXIT_ERROR, UsageError, load_program, main, make_parser, program_arguments
from umbel.interpreter.backends.local import LocalBackend
from umbel.runtime.config import EngineConfig
from umbel.runtime.kv_cache import EVICTION_POLICIES
from umbel.runtime.model_store import ALIASES
from umbel.runtime.scheduler.policy import POLICIES
from umbel.runtime.server import BackgroundServer, create_app

PROGRAM = """
import dataclasses
import umbel as ub

@dataclasses.dataclass
class Point:
    x: int

@ub.function
def story(s, topic: str, times: int = 1, point: Point | None = None):
    s += f"About {topic}:" * times
    s += ub.gen("tale", max_tokens=4)

@ub.function
def wrong(s):
    s += "x"
    s += ub.select("pick", choices=[])

@ub.function
def bug(s):
    return 1 / 0

@ub.function
def waits(s):
    s += "waiting"
    s += ub.gen("held")

@ub.function
def turns(s):
    s += ub.system("Be brief.\\n") + ub.user("Why?") + ub.assistant(ub.gen("why", max_tokens=4))
    with s.fork(2) as branches:
        branches += ub.user("not shown")
    s += ub.user("Sure?") + ub.assistant(ub.select("sure", ["yes", "no"]))

not_a_program = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "programs.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def url() -> Iterator[str]:
    engine = FakeEngine(["held"])
    app = create_app(engine, model_name="fake", capabilities=_capabilities())
    with BackgroundServer(app) as server:
        yield server.url
    engine.close()


def _capabilities() -> dict[str, object]:
    return {"token_native": True, "select_methods": list(LocalBackend.capabilities.select_methods)}


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that is to fail; return its one line."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("umbel: ")
    assert err.count("\n") == 1
    return err.removeprefix("umbel: ").rstrip("\n")


def is_refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Give a command line that can't be read; return the one line that says so."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == EXIT_ERROR
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("umbel: ")
    assert err.count("\n") == 1
    return err.removeprefix("umbel: ").rstrip("\n")


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"umbel {__version__}\n"


def test_help_names_the_commands_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, umbel.cli\n"
        "try: umbel.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'httpx', 'pydantic', 'platformdirs'}\n"
        "print('LOADED', sorted(heavy & set(sys.modules)))\n"
        "print('RUNTIME', [m for m in sys.modules if m.startswith('umbel.runtime')])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for command in ("pull", "run", "serve"):
        assert re.search(rf"^ +{command} ", run.stdout, re.MULTILINE)
    assert "LOADED []" in run.stdout
    assert "RUNTIME []" in run.stdout


def test_every_setting_of_the_engine_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    for name in EngineConfig.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in text


def test_a_run_streams_what_the_program_writes(
    capsys: pytest.CaptureFixture[str], file: Path, url: str
) -> None:
    command = ["run", f"{file}:story", "--arg", "topic=rain", "--backend", url, "--seed", "3"]
    assert main(command) == 0
    first, err = capsys.readouterr()
    assert first.startswith("About rain:")
    assert len(first) > len("About rain:\n")
    tale = ast.literal_eval(err.removeprefix("tale = "))
    assert first in (f"About rain:{tale}", f"About rain:{tale}\n")
    assert main([*command, "--arg", "times=2"]) == 0
    assert capsys.readouterr().out.startswith("About rain:About rain:")
    assert main(command) == 0
    assert capsys.readouterr().out == first


def test_a_run_breaks_lines_between_turns_and_tells_the_values_apart(
    capsys: pytest.CaptureFixture[str], file: Path, url: str
) -> None:
    assert main(["run", f"{file}:turns", "--backend", url]) == 0
    out, err = capsys.readouterr()
    pairs = [line.split(" = ") for line in err.rstrip("\n").split("\n")]
    assert [name for name, _ in pairs] == ["why", "sure"]
    why, sure = (ast.literal_eval(value) for _, value in pairs)
    gap = "" if why.endswith("\n") else "\n"
    assert out == f"Be brief.\nWhy?\n{why}{gap}Sure?\n{sure}\n"


def test_loading_a_model_is_told_to_a_terminal(
    capsys: pytest.CaptureFixture[str], file: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(["run", f"{file}:turns", "--model", "nowhere.gguf"]) == 2
    assert capsys.readouterr().err.startswith("loading nowhere.gguf ...\numbel: ")
    assert main(["run", f"{file}:turns", "--backend", url]) == 0
    assert "loading" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("{file}", "a program is named FILE.py:PROGRAM"),
        ("{file}:", "a program is named FILE.py:PROGRAM"),
        ("{file}x:story", "there is no file"),
        ("{file}:novel", "has no program novel; its programs: bug, story, turns, waits, wrong"),
        ("{file}:not_a_program", "has not_a_program, but not as a program"),
    ],
)
def test_a_program_that_is_not_there(
    capsys: pytest.CaptureFixture[str], file: Path, place: str, words: str
) -> None:
    assert words in fails(capsys, "run", place.format(file=file))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "story needs --arg topic=..."),
        (["topic"], "--arg takes NAME=VALUE, not 'topic'"),
        (["topic=a", "color=red"], "has no parameter 'color'; it has: topic, times, point"),
        (["topic=a", "times=many"], "this is not JSON"),
        (["topic=a", "times=1.5"], "Expected `int`"),
    ],
)
def test_arguments_that_do_not_fit(
    capsys: pytest.CaptureFixture[str], file: Path, given: list[str], words: str
) -> None:
    flags = [part for one in given for part in ("--arg", one)]
    assert words in fails(capsys, "run", f"{file}:story", *flags)


def test_arguments_are_read_by_their_types(file: Path) -> None:
    program = load_program(f"{file}:story")
    arguments = program_arguments(program, ["topic=7", "times=7", 'point={"x": 7}'])
    assert arguments["topic"] == "7"
    assert arguments["times"] == 7
    assert arguments["point"].x == 7
    # the last one wins, and a value may hold the sign
    assert program_arguments(program, ["topic=a", "topic=b=c"])["topic"] == "b=c"
    with pytest.raises(UsageError, match="needs --arg topic"):
        program_arguments(program, ["times=1"])


def test_an_error_of_the_program_names_its_line(
    capsys: pytest.CaptureFixture[str], file: Path, url: str
) -> None:
    line = PROGRAM.splitlines().index('    s += ub.select("pick", choices=[])') + 1
    assert main(["run", f"{file}:wrong", "--backend", url]) == 2
    assert capsys.readouterr().err.startswith(f"umbel: programs.py:{line}: ")
    line = PROGRAM.splitlines().index("    return 1 / 0") + 1
    assert main(["run", f"{file}:bug", "--backend", url]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"umbel: programs.py:{line}: ZeroDivisionError: division by zero")
    assert "Traceback" not in err
    for command in (["--debug", "run"], ["run", "--debug"]):
        assert main([*command, f"{file}:bug", "--backend", url]) == 2
        assert "Traceback" in capsys.readouterr().err


def test_a_file_that_is_not_python_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text("def (:\n")
    assert "SyntaxError" in fails(capsys, "run", f"{tmp_path}/bad.py:x")
    (tmp_path / "notes.txt").write_text("")
    assert "not a Python file" in fails(capsys, "run", f"{tmp_path}/notes.txt:x")


def test_no_server_and_no_model_are_one_line_each(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path
) -> None:
    run = ["run", f"{file}:story", "--arg", "topic=a"]
    assert "can't connect to" in fails(capsys, *run, "--backend", "http://127.0.0.1:9")
    assert "nowhere.gguf" in fails(capsys, *run, "--model", str(tmp_path / "nowhere.gguf"))
    assert "nowhere" in fails(capsys, "pull", "nowhere")
    assert "max_running must be at least 1" in fails(capsys, *run, "--max-running", "0")
    text = fails(capsys, *run, "--backend", "http://127.0.0.1:9", "--max-running", "4")
    assert text.startswith("--max-running")


def test_a_port_in_use_is_told_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], url: str
) -> None:
    port = url.rsplit(":", 1)[1]
    assert f"can't listen on 127.0.0.1:{port}" in fails(capsys, "serve", "smollm2", "--port", port)


@pytest.mark.parametrize("port", ["65536", "99999999", "-1", "80.5", "eighty", "9" * 5000])
def test_a_port_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], port: str) -> None:
    words = f"argument --port: a port is a number from 0 to 65535, not '{port}' ("
    assert is_refused(capsys, "serve", "smollm2", "--port", port).startswith(words)


@pytest.mark.parametrize("port", [0, 65535])
def test_the_first_and_the_last_port_are_ports(port: int) -> None:
    parser = make_parser(with_engine=False)
    assert parser.parse_args(["serve", "smollm2", "--port", str(port)]).port == port


def test_ctrl_c_ends_a_run_at_once(file: Path, url: str) -> None:
    command = [sys.executable, "-m", "umbel", "run", f"{file}:waits", "--backend", url]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # tests that a shell runs in the background hand on that the signal is ignored
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.read(len("waiting")) == b"waiting"
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
            assert process.stderr.read() == b""
        finally:
            process.kill()  # else leaving the block waits for a process that does not end


def test_a_closed_pipe_ends_a_run_quietly(file: Path, url: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "umbel", "run", f"{file}:story", "--arg", "topic=a"]
    run = subprocess.run(
        [*command, "--backend", url], stdout=write_end, stderr=subprocess.PIPE, timeout=30
    )
    os.close(write_end)
    assert run.returncode == 141
    assert run.stderr == b""


TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@contextmanager
def served(
    tmp_path: Path, *options: str, env: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`umbel serve` with a tiny model, and its address."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    model = f"dummy:{tmp_path / 'config.json'}"
    command = [sys.executable, "-m", "umbel", "serve", model, "--port", "0"]
    with subprocess.Popen(
        [*command, "--kv-tokens", "1024", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    ) as process:
        try:
            assert process.stdout is not None
            match = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
            assert match is not None, process.communicate()[1]
            url = match.group()
            deadline = time.monotonic() + 20
            while httpx.get(f"{url}/health", trust_env=False).status_code != 200:
                assert time.monotonic() < deadline
            yield process, url
        finally:
            process.kill()


@pytest.mark.parametrize("options", [["--no-prefix-cache"], ["--process", "--log-programs"]])
def test_serve_answers_until_it_is_stopped(tmp_path: Path, file: Path, options: list[str]) -> None:
    env = {**os.environ, "UMBEL_API_KEY": "a-key"}
    with served(tmp_path, *options, env=env) as (process, url):
        program = [sys.executable, "-m", "umbel", "run", f"{file}:story", "--backend", url]
        program += ["--arg", "topic=rain"]
        run = subprocess.run(program, capture_output=True, text=True, timeout=60)
        assert run.returncode == 2
        assert "this server wants a key" in run.stderr
        other = {**env, "UMBEL_API_KEY": "another"}
        run = subprocess.run(program, capture_output=True, text=True, timeout=60, env=other)
        assert "the key that was sent is not this server's" in run.stderr
        run = subprocess.run(program, capture_output=True, text=True, timeout=60, env=env)
        assert run.returncode == 0, run.stderr
        assert run.stdout.startswith("About rain:")
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)
        assert process.returncode == 0
        assert ('INFO umbel.programs: {"run": ' in log) == ("--log-programs" in options)


@pytest.mark.parametrize("drain", ["30", "0"])
def test_serve_lets_requests_end_when_it_stops_or_drops_them(tmp_path: Path, drain: str) -> None:
    with served(tmp_path, "--drain", drain) as (process, url):
        body = {
            "model": httpx.get(f"{url}/v1/models").json()["data"][0]["id"],
            "prompt": "a",
            "max_tokens": 900,
            "ignore_eos": True,
            "stream": True,
        }
        received = ""
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            try:
                for chunk in answer.iter_text():
                    if not received:
                        process.send_signal(signal.SIGTERM)
                    received += chunk
            except httpx.TransportError:
                pass
        assert ("[DONE]" in received) == (drain == "30")
        assert process.wait(30) == 0


def test_bench_prints_a_table_and_says_on_stderr_how_far_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--size", "small", "--repeats", "1", "--arms", "default,no-graph"]
    assert main(["bench", "programs", "judge", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == "judge: six branches, then a verdict\n"
    assert out.startswith("judge: ")
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["arm", "default", "no-graph"]


def test_bench_gives_json_to_machines(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--size", "small", "--repeats", "1", "--arms", "default", "--json"]
    assert main(["bench", "programs", "select", *arguments]) == 0
    (figures,) = json.loads(capsys.readouterr().out)
    assert figures["workload"] == "select"
    assert figures["figures"]["prefilled"] == figures["least_prefill"]
    for command in (
        ["scheduler", "--running", "4", "--waiting", "8", "--steps", "2", "--repeats", "1"],
        ["storm", "--programs", "5", "--span", "0.1"],
        ["soak", "--programs", "20"],
        ["offline", "throughput", "stream", "--scale", "0.01", "--repeats", "1"],
    ):
        assert main(["bench", *command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)
        assert main(["bench", *command]) == 0
        assert capsys.readouterr().out


@pytest.mark.parametrize("what", [["nothing"], ["judge", "--arms", "default,nothing"]])
def test_bench_says_what_there_is(what: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "programs", *what]) == EXIT_ERROR
    assert "nothing; there are: " in capsys.readouterr().err
    assert main(["bench", "offline", "nothing"]) == EXIT_ERROR
    assert "nothing; there are: throughput" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "command", ["programs", "step", "offline", "storm", "soak", "grammar device", "grammar fills"]
)
def test_bench_says_that_there_is_no_gpu(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *command.split(), "--device", "cuda"]) == EXIT_ERROR
    assert capsys.readouterr().err == ("umbel: device must be cpu here: no CUDA device was found\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_attention_benchmark_says_that_there_is_no_gpu() -> None:
    pytest.importorskip("triton")
    with pytest.raises(SystemExit, match="no CUDA device was found"):
        runpy.run_module("umbel.kernels.bench_attention", run_name="__main__")


def test_bench_says_how_to_get_a_runtime_that_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("umbel.runtime.bench")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["bench", "programs", "--size", "small"]) == EXIT_ERROR
    assert "umbel[runtime]" in capsys.readouterr().err


def test_bench_measures_the_language(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--programs", "50", "--repeats", "2"]
    assert main(["bench", "language", *arguments, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["num_programs"], figures["num_in_flight"]) == (50, 50)
    assert [figures[key]["results_are_kept"] for key in ("dropped", "kept")] == [False, True]
    assert all(len(figures[key]["each_wall_us"]) == 2 for key in ("dropped", "kept"))
    assert figures["threads_without_reads"] <= 4
    assert figures["threads_with_reads"] <= figures["max_def_threads"] + 1
    assert main(["bench", "language", *arguments]) == 0
    out, err = capsys.readouterr()
    assert "earlier results kept" in out
    assert "time of a program, results dropped" in err


@pytest.mark.parametrize("command", ["run", "serve"])
def test_help_names_the_values_and_the_key(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    told = " ".join(capsys.readouterr().out.split())
    told = told.replace("- ", "-")  # where a name was wrapped at its dash
    assert "UMBEL_API_KEY" in told
    for name in [*POLICIES, *EVICTION_POLICIES]:
        assert name in told
    assert "--no-overlap" in told


def test_pull_names_every_alias(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["pull", "--help"])
    told = capsys.readouterr().out
    assert all(alias in told for alias in ALIASES)


def test_a_switch_takes_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    text = is_refused(capsys, "run", "x.py:y", "--overlap", "foo")
    assert text.startswith("unrecognized arguments: foo")


@pytest.mark.parametrize(
    ("arguments", "words", "parser"),
    [
        ([], "required: COMMAND", "umbel"),
        (["nothing"], "invalid choice: 'nothing'", "umbel"),
        (["serve"], "required: REF", "umbel serve"),
        (["run", "x.py:y", "--seed", "a\nb"], "argument --seed", "umbel run"),
        (["bench", "scheduler", "--steps", "0"], "argument --steps", "umbel bench scheduler"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_one_line_that_names_the_help(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str, parser: str
) -> None:
    text = is_refused(capsys, *arguments)
    assert words in text
    assert text.endswith(f"(`{parser} --help` shows the usage)")
