"""What a read costs on a server: the bytes of a run that grows and the time of each read.

    python examples/benchmarks/growing_runs.py [--reads 20] [--words 400] [--tokens 16] ...

The program writes a prompt and then reads, once for each step, what a gen of a few tokens made. The
engine has no model, so what is left of a read is the way there and back, and the host's time. The
server is a process of its own. Bytes are counted by a relay between the two, handshakes and HTTP
heads included; times are taken without the relay, and hold the opening of each run.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import threading
import time
from subprocess import PIPE
from typing import Self

import umbel as ub
from umbel.interpreter.backends.base import Backend
from umbel.interpreter.backends.local import LocalBackend
from umbel.interpreter.backends.remote import RemoteBackend, SocketUse
from umbel.runtime.bench.engines import NULL, BenchmarkModel
from umbel.runtime.config import EngineConfig
from umbel.runtime.server import BackgroundServer, create_app


@ub.function
def growing(s: ub.State, prompt: str, reads: int, tokens: int) -> None:
    s += prompt
    for i in range(reads):
        s += f"\nStep {i}: " + ub.gen(f"step{i}", max_tokens=tokens)
        assert len(s[f"step{i}"]) == tokens


class Relay:
    """Forwards connections to a server on loopback and counts the bytes both ways."""

    def __init__(self, target: str) -> None:
        self.num_sent = self.num_received = 0
        self._port = int(target.rsplit(":", 1)[1])
        self._loop = asyncio.new_event_loop()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self._is_up.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._relay, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._is_up.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.05))
        self._loop.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(
            self._pump(reader, to_server, is_up=True), self._pump(from_server, writer, is_up=False)
        )

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_up: bool
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                if is_up:
                    self.num_sent += len(data)
                else:
                    self.num_received += len(data)
                writer.write(data)
        except (OSError, asyncio.CancelledError):
            return
        finally:
            writer.close()


def count_bytes(relay: Relay, backend: Backend, arguments: tuple[str, int, int]) -> tuple[int, int]:
    """Return the bytes that one run sends and receives."""
    before = relay.num_sent, relay.num_received
    growing.options(backend=backend, seed=1).run(*arguments)
    return relay.num_sent - before[0], relay.num_received - before[1]


def read_ms(backend: Backend, arguments: tuple[str, int, int], repeats: int) -> str:
    """Return the milliseconds of one read: the least and the median over runs."""
    times = []
    for seed in range(repeats):
        start = time.perf_counter()
        growing.options(backend=backend, seed=seed).run(*arguments)
        times.append((time.perf_counter() - start) * 1000 / arguments[1])
    return f"{min(times):8.2f} {statistics.median(times):8.2f} ms a read"


def serve() -> None:
    """Serve an engine without a model until the parent closes our stdin."""
    with new_engine() as engine:
        app = create_app(engine.engine, model_name=NULL, capabilities={})
        with BackgroundServer(app) as server:
            print(server.url, flush=True)
            sys.stdin.read()


def new_engine() -> LocalBackend:
    return LocalBackend(BenchmarkModel(NULL, EngineConfig()).new_engine(threaded=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reads", type=int, default=20)
    parser.add_argument("--words", type=int, default=400, help="of the prompt")
    parser.add_argument("--tokens", type=int, default=16, help="of each gen")
    parser.add_argument("--repeats", type=int, default=51)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    arguments = ("lorem " * options.words, options.reads, options.tokens)
    print(f"{'':<12} {'out':>11} {'in':>11} {'least':>8} {'median':>8}")
    with new_engine() as local:
        print(f"{'in process':<12} {'':>23} {read_ms(local, arguments, options.repeats)}")
    command = [sys.executable, __file__, "--serve"]
    server = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    uses: tuple[SocketUse, ...] = ("required", "never")
    with Relay(url) as relay:
        for name, socket in zip(("socket", "requests"), uses, strict=True):
            with RemoteBackend(relay.url, socket=socket) as backend:
                sent, received = count_bytes(relay, backend, arguments)
            with RemoteBackend(url, socket=socket) as backend:
                ms = read_ms(backend, arguments, options.repeats)
            print(f"{name:<12} {sent:9,} B {received:9,} B {ms}")
    server.stdin.close()
    server.wait()


if __name__ == "__main__":
    main()
