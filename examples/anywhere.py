"""Run one program on several backends: in this process, on a server, on both to compare them.

python examples/anywhere.py                                      # in process
umbel serve smollm2 &
python examples/anywhere.py --backend http://127.0.0.1:8000      # on the server
python examples/anywhere.py --model smollm2 --backend http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import umbel as ub


@ub.function
def review(s: ub.State, product: str) -> list[str]:
    """Judge a product, and say what speaks for it and against it, side by side."""
    s += ub.system("You review products. You are brief.")
    s += ub.user(f"Would you buy {product}?")
    s += ub.assistant(ub.select("verdict", ["yes", "no", "it depends"]) + ".")
    sides = s.fork(2)
    for side, question in zip(sides, ["What speaks for it?", "And against it?"], strict=True):
        side += ub.user(question)
        side += ub.assistant(ub.gen("reason", max_tokens=24, stop="\n", temperature=0.8))
    reasons = sides.join()["reason"]
    s += ub.user("Sum it up in a few words.")
    s += ub.assistant(ub.gen("summary", max_tokens=24, stop="\n", temperature=0.8))
    return [str(reason) for reason in reasons]


def run_on(ref: str, product: str, seed: int) -> ub.Result[list[str]]:
    """Run the program on the backend that `ref` leads to, and show what comes back as it comes."""
    backend = ub.connect(ref)
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
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    refs = [args.model] if args.model or args.backend else ["smollm2"]
    refs = [ref for ref in [*refs, *args.backend] if ref is not None]
    try:
        results = [run_on(ref, args.product, args.seed) for ref in refs]
    except ub.BackendError as error:  # nothing answers there, or it can't honour the program
        print(error, file=sys.stderr)
        return 1
    if len(results) > 1:
        same = len({(result.text(), *result.value) for result in results}) == 1
        print("the same everywhere" if same else "the backends differ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
