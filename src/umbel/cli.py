"""The `umbel` command. Loads what a command needs when it runs, and nothing before."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import os
import signal
import sys
import traceback
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from umbel import __version__

DEFAULT_MODEL = "smollm2"
API_KEY = "UMBEL_API_KEY"  # the variable; on a command line other users would see the key
MAX_PORT = 65535  # of TCP
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # as a shell reports SIGINT
EXIT_BROKEN_PIPE = 141  # and SIGPIPE
_ENGINE = "engine."  # before the names of the engine's settings among all options

# packages that come with an extra, for the hint when one is missing
EXTRAS = dict.fromkeys(("httpx", "openai", "websockets"), "remote") | dict.fromkeys(
    (
        "fastapi",
        "gguf",
        "jinja2",
        "llguidance",
        "numpy",
        "outlines_core",
        "platformdirs",
        "prometheus_client",
        "safetensors",
        "tokenizers",
        "torch",
        "transformers",
        "uvicorn",
    ),
    "runtime",
)


class UsageError(Exception):
    """The command line asks for something that is not there."""


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors, and whose commands', are one line as all errors of umbel are."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where the usage is told; exit with status 2."""
        text = " ".join(message.split())
        self.exit(EXIT_ERROR, f"umbel: {text} (`{self.prog} --help` shows the usage)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 0, 2 for an error, 130 after Ctrl-C.

    Raises SystemExit after `--help`, `--version` and a command line that can't be read.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # these commands alone have options that load part of the runtime
    parser = make_parser(
        with_engine=any(name in arguments for name in ("run", "serve")),
        with_benchmarks="bench" in arguments,
    )
    options = parser.parse_args(arguments)
    try:
        status: int = options.command(options)
        return status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone: nothing to say, nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:  # the process's edge
        if options.debug:
            traceback.print_exc()
        print(f"umbel: {describe(error, getattr(options, 'program', ''))}", file=sys.stderr)
        return EXIT_ERROR


def make_parser(*, with_engine: bool, with_benchmarks: bool = False) -> argparse.ArgumentParser:
    """Return the parser of all commands; what the runtime knows of them is added on demand."""
    parser = OneLineParser(
        prog="umbel", description="Structured generation, and the runtime that serves it."
    )
    parser.add_argument("--version", action="version", version=f"umbel {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    common = OneLineParser(add_help=False)
    # not to undo a --debug that stands before the command
    common.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    pull = commands.add_parser(
        "pull",
        parents=[common],
        help="get a model by its alias",
        description="Get a model by its alias into the cache, and print where it is. Models "
        "without an alias are used by path or hub id, as REF of `umbel serve`.",
    )
    pull.add_argument(
        "alias", metavar="ALIAS", help=f"{DEFAULT_MODEL} (98 MB), so far the only one"
    )
    pull.set_defaults(command=pull_command)

    run = commands.add_parser(
        "run",
        parents=[common],
        help="run a program: its text to stdout as it grows, then its values to stderr",
    )
    _add_run_arguments(run)
    run.set_defaults(command=run_command)

    serve = commands.add_parser(
        "serve",
        parents=[common],
        help="serve a model over HTTP",
        description="Serve a model to programs (umbel.connect) and to clients of OpenAI's routes. "
        f"With a key in the environment variable {API_KEY}, only who sends that key is answered.",
    )
    _add_serve_arguments(serve)
    serve.set_defaults(command=serve_command)

    bench = commands.add_parser(
        "bench", parents=[common], help="measure the runtime and the language"
    )
    bench.set_defaults(command=bench_command)

    if with_benchmarks:
        add_benchmarks(bench, common)
    if with_engine:
        add_engine_options(run)
        add_engine_options(serve)
    return parser


def _add_run_arguments(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "program", metavar="FILE.py:PROGRAM", help="a file and the name of an @umbel.function in it"
    )
    run.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of the program: text, or JSON where the parameter's type is not str",
    )
    where = run.add_mutually_exclusive_group()
    where.add_argument(
        "--model",
        metavar="REF",
        help="an alias, a GGUF file, a folder, a hub id or dummy:CONFIG.json "
        f"(default: {DEFAULT_MODEL})",
    )
    where.add_argument(
        "--backend",
        metavar="URL",
        help=f"a server that `umbel serve` started; its key is read from {API_KEY}",
    )
    run.add_argument("--seed", type=int, help="repeat the random choices of an earlier run")
    run.add_argument("--timeout", type=float, metavar="SECONDS", help="limit of the whole run")


def _add_serve_arguments(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "model",
        metavar="REF",
        help="an alias, a GGUF file, a folder, a hub id or dummy:CONFIG.json",
    )
    serve.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    serve.add_argument(
        "--port", type=_port, default=8000, help="(default: %(default)s; 0: any that is free)"
    )
    serve.add_argument(
        "--drain",
        type=_seconds,
        default=30,
        metavar="SECONDS",
        help="that requests have to end when the server stops (default: %(default)s; 0: drop them)",
    )
    serve.add_argument(
        "--log-programs", action="store_true", help="a line of JSON for each program that ends"
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add one option for each field of EngineConfig; those that are not given stay unset.

    Without the runtime's extra there is no engine to set up, only servers to run programs on.
    """
    try:
        from umbel.runtime.config import EngineConfig
    except ModuleNotFoundError:
        return

    group = parser.add_argument_group("engine")
    hints = typing.get_type_hints(EngineConfig, include_extras=True)
    for field in dataclasses.fields(EngineConfig):
        hint, text = typing.get_args(hints[field.name])  # Annotated[type, what it is for]
        flag = "--" + field.name.replace("_", "-")
        text = text.replace("%", "%%")
        if field.default is not None:
            text += f" (default: {field.default})"
        parts = typing.get_args(hint)  # of a Literal its values, of a union its types
        if bool in (hint, *parts):
            group.add_argument(
                flag,
                dest=_ENGINE + field.name,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=text,
            )
            continue
        choices = parts if typing.get_origin(hint) is typing.Literal else None
        kind = next((kind for kind in (int, float) if kind in (hint, *parts)), str)
        group.add_argument(
            flag,
            dest=_ENGINE + field.name,
            type=kind,
            choices=choices,
            metavar=None if choices else kind.__name__.upper(),
            default=argparse.SUPPRESS,
            help=text,
        )


def add_benchmarks(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Add the benchmarks; without the runtime's extra each command says so."""
    try:
        from umbel.runtime.bench.command import add_benchmarks as add_all
    except ModuleNotFoundError as error:
        missing = error

        def refuse(*_: object) -> NoReturn:
            raise missing

        parser.add_argument("arguments", nargs=argparse.REMAINDER)
        parser.set_defaults(bench=refuse)
        return
    from umbel.interpreter.language_benchmark import add_command

    add_command(add_all(parser, common), common)


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's settings that were given."""
    return {
        name.removeprefix(_ENGINE): value
        for name, value in vars(options).items()
        if name.startswith(_ENGINE)
    }


def pull_command(options: argparse.Namespace) -> int:
    """Get a model; print where it is."""
    from umbel.runtime.model_store import pull

    print(pull(options.alias, progress=lambda step: print(step, file=sys.stderr)))
    return 0


def run_command(options: argparse.Namespace) -> int:
    """Run a program: stream its text to stdout, and tell its values on stderr."""
    from umbel import connect

    program = load_program(options.program)
    arguments = program_arguments(program, options.arg)
    settings = engine_options(options)
    if options.backend is not None and settings:
        names = ", ".join("--" + name.replace("_", "-") for name in settings)
        raise UsageError(f"{names} set up an engine here; with --backend the server has its own")
    if options.backend is None and sys.stderr.isatty():
        print(f"loading {options.model or DEFAULT_MODEL} ...", file=sys.stderr)
    if options.backend is not None and (key := os.environ.get(API_KEY)):
        settings["api_key"] = key  # for a server that the user names beside it
    backend = connect(options.backend or options.model or DEFAULT_MODEL, **settings)
    try:
        chosen = program.options(backend=backend, seed=options.seed, timeout=options.timeout)
        stream = chosen.stream(**arguments)
        end = "\n"
        try:
            for chunk in stream.lines():
                sys.stdout.write(chunk)
                sys.stdout.flush()
                end = chunk[-1:] or end
        except BaseException:  # Ctrl-C, a broken pipe: the run has no reader any more
            stream.cancel()
            raise
        finally:
            if end != "\n":
                print()
        print_values(stream.result())
    finally:
        backend.close()
    return 0


def print_values(result: Any) -> None:
    """Print the named values, one a line; beside the text, which stdout alone holds."""
    from umbel.lang.errors import UmbelError

    for name in result.names():
        try:
            value = repr(result[name])
        except UmbelError as error:  # a value cut short is no error of the run
            value = describe(error)
        print(f"{name} = {value}", file=sys.stderr)


def serve_command(options: argparse.Namespace) -> int:
    """Serve a model until interrupted; runs that go on may end first."""
    import logging

    import msgspec
    import uvicorn

    from umbel.interpreter.backends.local import LocalBackend
    from umbel.runtime.program_report import PROGRAM_LOGGER
    from umbel.runtime.server import bind, create_app, server_config, url_of

    signal.signal(signal.SIGTERM, _terminate)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    if options.log_programs:
        logging.getLogger(PROGRAM_LOGGER).setLevel(logging.INFO)
    # before the model is loaded, which takes long, see whether it can be served at all
    with bind(options.host, options.port) as listening:
        url = url_of(listening)
        with LocalBackend.from_model(options.model, **engine_options(options)) as backend:
            app = create_app(
                backend.engine,
                model_name=backend.engine.model_name,
                capabilities=msgspec.to_builtins(backend.capabilities),
                token_bytes=backend.engine.token_bytes,
                api_key=os.environ.get(API_KEY),
            )
            listening.listen()  # who connects once this is said waits, and is not refused
            print(f"umbel serves {options.model} at {url}", flush=True)
            uvicorn.Server(server_config(app, grace_s=options.drain)).run([listening])
    return 0


def _port(text: str) -> int:
    try:
        port = int(text)
    except ValueError:
        port = -1
    if not 0 <= port <= MAX_PORT:
        raise argparse.ArgumentTypeError(f"a port is a number from 0 to {MAX_PORT}, not {text!r}")
    return port


def _seconds(text: str) -> int:
    seconds = int(text)
    if seconds < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than no time")
    return seconds


def bench_command(options: argparse.Namespace) -> int:
    """Run a benchmark: its figures to stdout, how far it is to stderr."""
    print(options.bench(options, lambda line: print(line, file=sys.stderr, flush=True)))
    return 0


def load_program(place: str) -> Any:
    """Return the program that FILE.py:PROGRAM names; raises UsageError."""
    from umbel.lang.program import Program

    file, colon, name = place.rpartition(":")
    if not colon or not name.isidentifier():
        raise UsageError(f"a program is named FILE.py:PROGRAM, not {place!r}")
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"there is no file {file}")
    module = _load_module(path.resolve())
    program = getattr(module, name, None)
    if isinstance(program, Program):
        return program
    known = sorted(key for key, value in vars(module).items() if isinstance(value, Program))
    what = f"no program {name}" if program is None else f"{name}, but not as a program"
    raise UsageError(
        f"{file} has {what}; "
        + (f"its programs: {', '.join(known)}" if known else "put @umbel.function on a function")
    )


def _load_module(path: Path) -> types.ModuleType:
    """Run a file as a module, with its folder on the path, as `python FILE` does."""
    name = f"umbel_run_{path.stem}"  # not to hide an installed module of the file's name
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where types are looked up by those who read annotations
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def program_arguments(program: Any, given: Sequence[str]) -> dict[str, Any]:
    """Return a program's arguments, read by its parameters' types; raises UsageError."""
    body = inspect.unwrap(program)
    parameters = dict(list(inspect.signature(body).parameters.items())[1:])  # without the state
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    hints = typing.get_type_hints(body)
    arguments = {}
    for one in given:
        name, equals, text = one.partition("=")
        if not equals:
            raise UsageError(f"--arg takes NAME=VALUE, not {one!r}")
        if name not in parameters and not takes_any:
            raise UsageError(
                f"{program.__name__} has no parameter {name!r}; it has: {', '.join(parameters)}"
            )
        arguments[name] = _value(name, text, hints.get(name, str))
    missing = [
        name
        for name, p in parameters.items()
        if p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and name not in arguments
    ]
    if missing:
        raise UsageError(
            f"{program.__name__} needs " + " ".join(f"--arg {name}=..." for name in missing)
        )
    return arguments


def _value(name: str, text: str, hint: Any) -> Any:
    import msgspec

    if hint is str or hint is Any:
        return text
    try:
        return msgspec.json.decode(text, type=hint, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"--arg {name}={text}: {error}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        if str in typing.get_args(hint):  # str | None and the like: JSON or plain text
            return text
        raise UsageError(f"--arg {name}={text}: this is not JSON ({error})") from None


def describe(error: BaseException, program: str = "") -> str:
    """Return an error as one line: where in the user's program, what, and what to do."""
    from umbel.lang.errors import UmbelError

    text = " ".join(str(error).split())
    if isinstance(error, UsageError):
        return text
    if isinstance(error, ModuleNotFoundError):
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is not None:
            return f"{text}: this needs umbel[{extra}]: pip install 'umbel[{extra}]'"
    file = os.path.realpath(program.rpartition(":")[0])
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    where = f"{os.path.basename(file)}:{lines[-1]}: " if lines else ""
    if isinstance(error, UmbelError):
        return where + (text or type(error).__name__)
    return f"{where}{type(error).__name__}: {text} (--debug shows the traceback)"


def _terminate(*_: object) -> NoReturn:
    raise SystemExit(0)
