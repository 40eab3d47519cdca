"""Launches become compilations in a dry run, once each, and stay launches on other threads."""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime import _async_compile

from umbel.kernels.triton.launch import _Threads, compile_ahead, launch

CPU = torch.device("cpu")
FOLDER = Path(__file__).resolve().parents[2] / "kernels" / "triton"


class Compiled:
    """What a compilation gives; notes on which thread it is made ready to be launched."""

    def __init__(self) -> None:
        self.made_on: list[str] = []

    @property
    def run(self) -> object:
        self.made_on.append(threading.current_thread().name)
        return object()


class Kernel:
    """Launches and compiles as Triton's kernels do, in its mode too, without doing either."""

    def __init__(self, compile_it: Callable[[], Compiled] = Compiled) -> None:
        self.compile = compile_it
        self.launches: list[Any] = []
        self.warmups: list[Any] = []
        self.cache: dict[Any, Compiled] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.launches.append((grid, args, options))

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.warmups.append((grid, args, options))
        key = (id(self), *options.items())
        if key not in self.cache:
            mode = _async_compile.active_mode.get()
            assert mode is not None
            mode.submit(key, self.compile, lambda made: self.cache.__setitem__(key, made))


@pytest.fixture
def compiles() -> Iterator[None]:
    """Let Triton be taken for the one that compiles, which the interpreter is not."""
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = False
        yield


def test_a_launch_launches() -> None:
    kernel = Kernel()
    launch(kernel, (2, 3))(1, x=2)
    assert (kernel.launches, kernel.warmups) == ([((2, 3), (1,), {"x": 2})], [])


@pytest.mark.usefixtures("compiles")
def test_a_dry_run_compiles_what_it_would_launch_and_launches_nothing() -> None:
    one, other = Kernel(), Kernel()

    def dry_run() -> None:
        launch(one, (1,))(5, BLOCK=64)
        launch(one, (1,))(5, BLOCK=128)
        launch(other, (1,))(5, BLOCK=64)

    assert compile_ahead(dry_run, CPU) == 3
    assert one.launches == other.launches == []
    assert [options for _grid, _args, options in one.warmups] == [{"BLOCK": 64}, {"BLOCK": 128}]
    made = [*one.cache.values(), *other.cache.values()]
    assert len(made) == 3
    launch(one, (1,))(5, BLOCK=64)
    assert len(one.launches) == 1


@pytest.mark.usefixtures("compiles")
def test_kernels_are_ready_to_be_launched_before_anybody_sees_them() -> None:
    kernel = Kernel()
    compile_ahead(lambda: launch(kernel, (1,))(), CPU)
    (made,) = kernel.cache.values()
    assert [name.rpartition("_")[0] for name in made.made_on] == ["umbel-compile"]


@pytest.mark.usefixtures("compiles")
def test_launches_alike_are_asked_for_once() -> None:
    kernel = Kernel()
    memory = torch.zeros(64, dtype=torch.int32)
    # the same to a kernel: another place of the same alignment; not: another type or alignment,
    # another number, True for 1
    args: list[tuple[Any, ...]] = [
        (memory, 1), (memory[16:], 1), (memory[1:], 1), (memory[17:], 1),
        (memory.float(), 1), (memory, 16), (memory, True), (memory, None), (memory, None),
    ]  # fmt: skip

    def dry_run() -> None:
        for each in args:
            launch(kernel, (1,))(*each)

    compile_ahead(dry_run, CPU)
    assert [list(map(id, found)) for _grid, found, _options in kernel.warmups] == [
        list(map(id, args[i])) for i in (0, 2, 4, 5, 6, 7)
    ]


@pytest.mark.usefixtures("compiles")
def test_other_threads_go_on_launching() -> None:
    ours, theirs = Kernel(), Kernel()

    def dry_run() -> None:
        thread = threading.Thread(target=lambda: launch(theirs, (1,))())
        thread.start()
        thread.join()
        launch(ours, (1,))()

    compile_ahead(dry_run, CPU)
    assert (len(ours.launches), len(ours.warmups)) == (0, 1)
    assert (len(theirs.launches), len(theirs.warmups)) == (1, 0)


@pytest.mark.usefixtures("compiles")
def test_kernels_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other: one after the other, the first would wait in vain."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    both = threading.Barrier(2)

    def compile_it() -> Compiled:
        both.wait(timeout=60)
        return Compiled()

    def dry_run() -> None:
        for kernel in (Kernel(compile_it), Kernel(compile_it)):
            kernels.append(kernel)
            launch(kernel, (1,))()

    kernels: list[Kernel] = []
    assert compile_ahead(dry_run, CPU) == 2


def fail() -> Any:
    raise RuntimeError("no room on this device")


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize(
    "dry_run",
    [fail, lambda: launch(Kernel(fail), (1,))()],
    ids=["the dry run", "a compilation"],
)
def test_what_fails_is_raised_and_leaves_nothing_behind(dry_run: Callable[[], None]) -> None:
    with pytest.raises(RuntimeError, match="no room"):
        compile_ahead(dry_run, CPU)
    kernel = Kernel()
    launch(kernel, (1,))()
    assert len(kernel.launches) == 1
    assert _async_compile.active_mode.get() is None
    assert compile_ahead(lambda: launch(kernel, (1,))(), CPU) == 1


def test_what_nobody_waits_for_any_more_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    goes_on = threading.Event()

    def compile_it() -> Compiled:
        assert goes_on.wait(timeout=60)
        return Compiled()

    threads = _Threads(CPU)
    first, second = threads.submit(compile_it), threads.submit(compile_it)
    while not first.running():
        time.sleep(0.001)
    threads.shutdown(wait=False)
    assert second.cancelled()
    goes_on.set()
    assert first.result(timeout=60).made_on


def test_the_interpreter_compiles_nothing() -> None:
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        assert compile_ahead(fail, CPU) is None


def test_every_kernel_is_launched_by_the_one_function() -> None:
    """So that a dry run launches all of a pass or nothing."""
    direct = [
        f"{path.name}:{node.lineno}"
        for path in sorted(FOLDER.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]
    assert direct == []
