"""Run one program on several backends: in this process, on a server, on OpenAI's API, to compare.

python examples/anywhere.py                                      # in process
umbel serve smollm2 &
python examples/anywhere.py --backend http://127.0.0.1:8000      # on the server
python examples/anywhere.py --model smollm2 --backend http://127.0.0.1:8000
python examples/anywhere.py --openai gpt-4.1-mini                # the key: OPENAI_API_KEY
python examples/anywhere.py --openai my-model --openai-url http://127.0.0.1:9000/v1
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence

import umbel as ub
from umbel.interpreter.backends.base import Backend


@ub.function
def review(s: ub.State, product: str) -> list[str]:
    """Judge a product, and say what speaks for it and against it, side by side."""
    s += ub.system("You review products. You are brief.")
    s += ub.user(f"Would you buy {product}?")
    # one token each, and nothing before them: an OpenAI endpoint lists the likeliest next tokens
    s += ub.assistant(ub.select("verdict", ["yes", "no", "maybe"]) + ".")
    sides = s.fork(2)
    for side, question in zip(sides, ["What speaks for it?", "And against it?"], strict=True):
        side += ub.user(question)
        side += ub.assistant(ub.gen("reason", max_tokens=24, stop="\n", temperature=0.8))
    reasons = sides.join()["reason"]
    s += ub.user("Sum it up in a few words.")
    s += ub.assistant(ub.gen("summary", max_tokens=24, stop="\n", temperature=0.8))
    return [str(reason) for reason in reasons]


def openai(model: str, url: str | None, emulate: bool) -> Backend:
    """Return an OpenAI-compatible endpoint; it needs the `remote` extra."""
    from umbel.interpreter.backends.openai import OpenAIBackend

    return OpenAIBackend(model, base_url=url, emulate=emulate)


def run_on(
    ref: str, connect: Callable[[], Backend], product: str, seed: int
) -> ub.Result[list[str]]:
    """Run the program on a backend, and show what comes back as it comes."""
    backend = connect()
    try:
        started = time.perf_counter()
        stream = review.options(backend=backend, seed=seed).stream(product)
        print(f"{ref}\n  ", end="")
        for chunk in stream.text("summary"):
            print(chunk, end="", flush=True)
        result = stream.result()
        seconds = time.perf_counter() - started
    finally:
        backend.close()
    print(f"\n  verdict: {result['verdict']}\n  for:     {result.value[0].strip()}")
    print(f"  against: {result.value[1].strip()}\n  ({seconds:.1f} s)\n")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("product", nargs="?", default="a tandem bicycle")
    parser.add_argument("--model", help="alias, GGUF file, folder or hub id (default: smollm2)")
    parser.add_argument("--backend", action="append", default=[], help="URL; may be repeated")
    parser.add_argument("--openai", metavar="MODEL", help="a model on OpenAI's API")
    parser.add_argument("--openai-url", metavar="URL", help="another endpoint that speaks it")
    parser.add_argument("--emulate", action="store_true", help="ask it in words for what it lacks")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    is_elsewhere = args.backend or args.openai
    refs = [args.model or "smollm2"] if args.model or not is_elsewhere else []
    backends: dict[str, Callable[[], Backend]] = {
        ref: functools.partial(ub.connect, ref) for ref in [*refs, *args.backend]
    }
    if args.openai:
        backends[f"{args.openai} on {args.openai_url or 'OpenAI'}"] = functools.partial(
            openai, args.openai, args.openai_url, args.emulate
        )
    try:
        results = [
            run_on(ref, connect, args.product, args.seed) for ref, connect in backends.items()
        ]
    except (ub.BackendError, ub.ProgramError) as error:  # nobody there, no key, not honoured
        print(error, file=sys.stderr)
        return 1
    if len(results) > 1:
        same = len({(result.text(), *result.value) for result in results}) == 1
        print("the same everywhere" if same else "the backends differ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
