"""An engine's process on a device: the same outcomes, a kill that everybody hears of, a next one.

On a CPU the same runs as on a GPU.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.device_programs import OPTIONS, SHAPES, programs, run, start, write_config
from tests.support.engine_harness import Collector, GraphMaker

from umbel.lang.errors import EngineStoppedError
from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Gen, Text
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.engine import Engine
from umbel.runtime.engine_process import EngineClient

pytestmark = pytest.mark.slow
WAIT_S = 120.0
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
StartClient = Callable[[str, str], EngineClient]


@pytest.fixture
def new_client(tmp_path: Path) -> Iterator[StartClient]:
    """Start engines' processes with a shape on a device; they are closed in the end."""
    clients: list[EngineClient] = []

    def start(shape: str, device: str) -> EngineClient:
        ref = f"dummy:{write_config(shape, tmp_path)}"
        clients.append(EngineClient.from_model(ref, device=device, **OPTIONS))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


def endless() -> RequestGraph:
    maker = GraphMaker()
    prompt = maker.add(Text(("on and on, ",)), None)
    maker.add(Gen("x", SamplingParams(max_tokens=2000, ignore_eos=True)), prompt)
    return maker.graph()


def outcomes(collectors: Sequence[Collector]) -> list[Any]:
    """All of the results but timings, and what the cache held: that depends on who came when."""
    found = []
    for collector in collectors:
        assert not collector.errors
        results = msgspec.to_builtins({n: collector.results[n] for n in sorted(collector.results)})
        for result in results.values():
            result.pop("timings", None)
            result.get("usage", {}).pop("cached_tokens", None)
        found.append((results, collector.deltas, sorted(collector.started)))
    return found


def assert_close(one: Any, two: Any) -> None:
    """Compare to the letter, but for the rounding of sums in passes of other sizes."""
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            assert_close(one[key], two[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert_close(a, b)
    elif isinstance(one, float):
        assert one == pytest.approx(two, abs=1e-4)
    else:
        assert one == two


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("device", DEVICES)
def test_a_process_gives_what_an_engine_in_the_thread_gives(
    device: str, shape: str, new_client: StartClient, tmp_path: Path
) -> None:
    """Where this process uses the device too: its engine comes first."""
    graphs = list(programs())
    ref = f"dummy:{write_config(shape, tmp_path)}"
    engine = Engine.from_model(ref, device=device, **OPTIONS)
    try:
        expected = outcomes(run(engine, graphs))
    finally:
        engine.close()
    assert_close(outcomes(run(new_client(shape, device), graphs)), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_killed_process_fails_who_waits_and_the_next_one_has_the_device(
    device: str, new_client: StartClient
) -> None:
    client, graphs = new_client("llama", device), list(programs())[:3]
    expected = outcomes(run(client, graphs))
    runs = start(client, [endless()] * 6)
    wait_until(lambda: all(1 in collector.started for collector in runs))
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            while True:
                client.count_tokens("abc")
        except EngineStoppedError as error:
            failed.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    os.kill(client.process_id, signal.SIGKILL)
    for collector in runs:
        collector.wait(2, WAIT_S)
        assert collector.errors == {1: "EngineStoppedError"}
        assert "killed by SIGKILL (9)" in collector.causes[1]
    asking.join(WAIT_S)
    assert len(failed) == 1
    client.close()
    assert_close(outcomes(run(new_client("llama", device), graphs)), expected)


PARENT = """
import sys, torch
from pathlib import Path
from tests.support.device_programs import OPTIONS, programs, run
from umbel.runtime.engine_process import EngineClient

client = EngineClient.from_model(sys.argv[1], device=sys.argv[2], **OPTIONS)
for collector in run(client, list(programs())[:2]):
    assert not collector.errors
print(torch.cuda.is_initialized())
print(Path(f"/proc/{client.process_id}/cmdline").read_text().split(chr(0))[:2])
client.close()
"""


@pytest.mark.parametrize("device", DEVICES)
def test_the_process_is_a_new_interpreter_and_its_parent_leaves_the_device_alone(
    device: str, tmp_path: Path
) -> None:
    """A context of CUDA does not survive a fork, and takes hundreds of MiB where nobody uses it."""
    ref = f"dummy:{write_config('llama', tmp_path)}"
    parent = subprocess.run(
        [sys.executable, "-c", PARENT, ref, device],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
    )
    assert parent.returncode == 0, parent.stderr
    assert parent.stdout.splitlines() == ["False", str([sys.executable, "-c"])]
