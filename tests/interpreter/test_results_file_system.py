"""Results files and the system: a process that is killed, a path that is no ordinary file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import umbel as ub
from umbel.lang.graph import node_seed

from .conftest import MakeBackend

JOB = """
import asyncio, json, sys
from pydantic import BaseModel
import umbel as ub
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import Reply
from umbel.lang.graph import node_seed

class Number(BaseModel):
    n: int

@ub.function
def program(s, x):
    s += f"{x}: " + ub.gen("y", schema=Number)
    return s["y"]

@ub.function
async def aprogram(s, x):
    s += f"{x}: " + ub.gen("y", schema=Number)
    return await s.get("y")

asked = []

def answer(call):
    asked.append(call.row)
    n = node_seed(call.seed, call.row, call.address)
    return Reply(text='{"n":%d}' % (n % 10**9), latency=0.02)

def rows():
    yield from range(200)

if __name__ == "__main__":
    way, path, seed = sys.argv[1:]
    chosen = {"sync": program, "loop": aprogram, "async": aprogram, "mixed": program}[way]
    with ScriptedBackend(answer) as backend:
        chosen = chosen.options(backend=backend, seed=int(seed) if seed else None)
        options = dict(results_file=path, max_in_flight=8)
        if way in ("sync", "loop"):
            results = chosen.run_batch(rows(), **options)
        else:
            results = asyncio.run(chosen.arun_batch(rows(), **options))
    found = [[r.row, r.seed, r["y"].n, r.value.n, r.text()] for r in results]
    print(json.dumps([sorted(asked), found]))
"""


@pytest.mark.parametrize("way", ["sync", "loop", "async", "mixed"])
def test_a_killed_process_loses_nothing_that_finished(tmp_path: Path, way: str) -> None:
    script, path = tmp_path / "job.py", tmp_path / "out.jsonl"
    script.write_text(JOB)

    def command(path: Path, seed: str = "") -> list[str]:
        return [sys.executable, str(script), way, str(path), seed]

    def finish(path: Path, seed: str = "") -> Any:
        done = subprocess.run(
            command(path, seed), check=True, capture_output=True, timeout=60, text=True
        )
        return json.loads(done.stdout)

    killed = subprocess.Popen(command(path), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < 30:
        assert time.monotonic() < deadline
        assert killed.poll() is None, "it ended before it was killed"
        time.sleep(0.005)
    killed.kill()
    assert killed.wait() == -9
    *whole, _ = path.read_bytes().split(b"\n")
    header, *lines = map(json.loads, whole)
    kept = {line["row"] for line in lines}
    assert 29 <= len(kept) < 200
    asked, resumed = finish(path)
    assert asked == sorted(set(range(200)) - kept)
    asked, uninterrupted = finish(tmp_path / "other.jsonl", str(header["seed"]))
    assert asked == list(range(200))
    assert resumed == uninterrupted
    row, seed, number, *_ = resumed[150]
    assert number == node_seed(seed, row, "1") % 10**9
    assert finish(path)[0] == []


@pytest.mark.parametrize("kind", ["pipe", "/dev/full", "/dev/null", "/dev/zero"])
def test_what_can_not_be_read_back_is_refused_at_once(
    scripted: MakeBackend, tmp_path: Path, kind: str
) -> None:
    scripted(lambda call: "a")

    @ub.function
    def program(s: ub.State, x: int) -> None:
        s += ub.gen("g")

    at = Path(kind)
    if kind == "pipe":
        at = tmp_path / "pipe"
        os.mkfifo(at)
    with pytest.raises(ub.ProgramError, match="ordinary file"):
        program.run_batch([1], results_file=at)
