"""The arrows between the rooms, read from the source itself: who may import whom, and how."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("interpreter", "kernels", "lang", "runtime")

# What a room may import of the others, but for one file: the local backend starts the engine.
ARROWS: dict[str, frozenset[str]] = {
    "lang": frozenset(),
    "interpreter": frozenset({"lang"}),
    "runtime": frozenset({"lang", "kernels"}),
    "kernels": frozenset(),
}
LOCAL_BACKEND = Path("interpreter/backends/local.py")

# Run by path in a process of its own, so it has no package to be relative to.
SCRIPT = Path("runtime/grammar/compile_worker.py")

# runtime takes data from lang, and the readers of what constraints are written in: not its
# primitives, its state or its programs.
LANG_DATA = frozenset(
    {
        "choice_scoring",
        "constraints",
        "errors",
        "gbnf",
        "graph",
        "graph_state",
        "ir",
        "json_text",
        "lark_check",
        "lark_lexer",
        "regex_parser",
        "regex_syntax",
        "results",
        "sampling_params",
        "schema_check",
        "stop_strings",
        "text_places",
        "unicode_check",
        "wire",
    }
)

# Inside runtime a part imports only what stands in its own line or above it.
RUNTIME_ORDER: tuple[frozenset[str], ...] = (
    frozenset(
        {
            "deadlines",
            "defects",
            "engine_messages",
            "engine_session",
            "engine_stats",
            "metrics",
            "model_store",
            "program_report",
            "request",
            "stop_matcher",
            "vocabulary",
            "watchdog",
        }
    ),
    frozenset({"device_errors", "grammar", "kv_cache", "log_relay"}),
    frozenset({"chat_template", "config", "detokenizer", "models", "scheduler"}),
    frozenset({"pass_retry", "row_pieces", "text_pieces", "tokenizer", "tokenizer_files"}),
    frozenset({"model_runner"}),
    frozenset({"sampling"}),
    frozenset({"healing", "prompt_scores", "thinking"}),
    frozenset({"gen_task", "prefix_bound", "request_queue", "select_task", "token_row"}),
    frozenset({"graph_readers"}),
    frozenset({"program_run", "prompt_scorer"}),
    frozenset({"live_places", "node_places", "trunks"}),
    frozenset({"encode_ahead", "gen_start", "select_start"}),
    frozenset({"node_tasks"}),
    frozenset({"graph_executor"}),
    frozenset({"device_setup", "forward_pass", "warm_up"}),
    frozenset({"engine_core"}),
    frozenset({"engine", "engine_process", "model_loading"}),
    frozenset({"engine_worker"}),
    frozenset({"bench", "server"}),
)


class Import(NamedTuple):
    """One import: the dotted module it names, absolute, and how it was written."""

    file: Path  # relative to the root
    line: int
    module: str  # for a relative import, resolved: umbel.<room>...
    names: tuple[str, ...]
    is_relative: bool
    is_lazy: bool  # inside a function
    is_typing: bool  # inside `if TYPE_CHECKING:`

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"

    @property
    def room(self) -> str:
        return self.file.parts[0]

    @property
    def target(self) -> str:
        """The room that is imported, or '' for a module outside umbel."""
        parts = self.module.split(".")
        return parts[1] if parts[0] == "umbel" and len(parts) > 1 else ""


def _imports(file: Path, source: str) -> Iterator[Import]:
    package = ("umbel", *file.parts[:-1])

    def walk(node: ast.AST, is_lazy: bool, is_typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(file, child.lineno, alias.name, (), False, is_lazy, is_typing)
            elif isinstance(child, ast.ImportFrom):
                names = tuple(alias.name for alias in child.names)
                module = child.module or ""
                if child.level:
                    base = package[: len(package) - child.level + 1]
                    module = ".".join((*base, module) if module else base)
                is_relative = child.level > 0
                yield Import(file, child.lineno, module, names, is_relative, is_lazy, is_typing)
            else:
                is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                is_guard = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
                yield from walk(child, is_lazy or is_function, is_typing or is_guard)

    yield from walk(ast.parse(source), False, False)


ALL_IMPORTS = [
    found
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
    for found in _imports(path.relative_to(ROOT), path.read_text())
]


def _wrong_arrows(imports: list[Import]) -> list[str]:
    wrong = []
    for found in imports:
        allowed = ARROWS[found.room] | {found.room}
        if found.file == LOCAL_BACKEND:
            allowed |= {"runtime"}
        # `from umbel import x` hides which room x comes from; the version is of no room
        is_hidden = found.module == "umbel" and found.names != ("__version__",)
        if is_hidden or (found.target and found.target not in allowed):
            wrong.append(str(found))
    return wrong


def _wrong_forms(imports: list[Import]) -> list[str]:
    """Relative inside a room, absolute across."""
    return [
        str(found)
        for found in imports
        if found.target
        and found.file != SCRIPT
        and found.is_relative != (found.target == found.room)
    ]


def _wrong_order(imports: list[Import]) -> list[str]:
    rank = {name: i for i, layer in enumerate(RUNTIME_ORDER) for name in layer}
    wrong = []
    for found in imports:
        if found.room != "runtime" or found.target != "runtime" or found.is_typing:
            continue
        own = Path(found.file.parts[1]).stem
        if own == "__init__":
            continue
        parts = found.module.split(".")
        wrong += [
            f"{found}: {part} comes after {own}"
            for part in (parts[2:3] or found.names)
            if rank.get(part, -1) > rank.get(own, len(rank))
        ]
    return wrong


def test_every_room_is_reached_through_a_relative_link() -> None:
    for room in ROOMS:
        link = ROOT / "src" / "umbel" / room
        assert link.is_symlink()
        assert str(link.readlink()) == f"../../{room}"
        assert any((ROOT / room).rglob("*.py"))


def test_rooms_import_along_the_arrows() -> None:
    assert _wrong_arrows(ALL_IMPORTS) == []


def test_imports_are_relative_inside_a_room_and_absolute_across() -> None:
    assert _wrong_forms(ALL_IMPORTS) == []


def test_the_local_backend_is_loaded_on_demand() -> None:
    """So that a user of a server needs no torch."""
    eager = [
        str(found)
        for found in ALL_IMPORTS
        if found.room == "interpreter"
        and found.target == "interpreter"
        and not (found.is_lazy or found.is_typing)
        and ("local" in found.module.split(".") or "local" in found.names)
    ]
    assert eager == []


def test_the_runtime_takes_only_data_from_the_language() -> None:
    wrong = []
    for found in ALL_IMPORTS:
        if found.room != "runtime" or found.target != "lang":
            continue
        parts = found.module.split(".")
        modules = {parts[2]} if len(parts) > 2 else set(found.names)
        if not modules <= LANG_DATA:
            wrong.append(str(found))
    assert wrong == []


def test_the_runtime_is_built_in_one_order() -> None:
    assert _wrong_order(ALL_IMPORTS) == []


def test_the_order_names_every_part_of_the_runtime() -> None:
    named = frozenset().union(*RUNTIME_ORDER)
    parts = {p.stem for p in (ROOT / "runtime").glob("*.py")}
    parts |= {p.parent.name for p in (ROOT / "runtime").glob("*/__init__.py")}
    assert parts - {"__init__"} - named == set()


def test_the_language_imports_the_standard_library_and_msgspec() -> None:
    wrong = [
        str(found)
        for found in ALL_IMPORTS
        if found.room == "lang"
        and not found.target
        and not (found.is_lazy or found.is_typing)
        and found.module.split(".")[0] not in {*sys.stdlib_module_names, "msgspec"}
    ]
    assert wrong == []


def test_the_interpreter_needs_no_torch_and_no_web_framework() -> None:
    wrong = [
        str(found)
        for found in ALL_IMPORTS
        if found.room == "interpreter"
        and found.module.split(".")[0] in {"torch", "transformers", "fastapi", "uvicorn", "numpy"}
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("file", "source", "check"),
    [
        ("kernels/rope.py", "from umbel.lang.ir import Text", _wrong_arrows),
        ("lang/state.py", "import umbel.interpreter", _wrong_arrows),
        ("lang/state.py", "from umbel import gen", _wrong_arrows),
        ("interpreter/run.py", "def f():\n  from umbel.runtime import engine", _wrong_arrows),
        ("runtime/engine.py", "from umbel.interpreter import run", _wrong_arrows),
        ("interpreter/run.py", "from umbel.interpreter.base import x", _wrong_forms),
        ("runtime/scheduler/policy.py", "from ...lang import errors", _wrong_forms),
        ("runtime/kv_cache/radix_cache.py", "from ..scheduler import Batch", _wrong_order),
        ("runtime/scheduler/scheduler.py", "from .. import engine", _wrong_order),
    ],
)
def test_a_wrong_import_is_found(
    file: str, source: str, check: Callable[[list[Import]], list[str]]
) -> None:
    assert len(check(list(_imports(Path(file), source)))) == 1
