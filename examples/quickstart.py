"""Triage support tickets: select, fork, join and a typed report, for one ticket and then eight.

python examples/quickstart.py                                  # the small model, in process
python examples/quickstart.py --backend http://127.0.0.1:8000  # on `umbel serve smollm2`
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

import umbel as ub

Line = Annotated[str, Field(min_length=3, max_length=60)]

Runs = Sequence[ub.Result[ub.Forks]]
Stats = Mapping[str, float]
COUNTERS = ("prompt_tokens", "tokens_prefilled", "tree_tokens", "least_prefill")


class Report(BaseModel):
    """What the support team reads."""

    title: Line
    team: Literal["billing", "shipping", "accounts", "engineering"]
    urgent: bool
    next_step: Line


SEVERITIES = ["a question", "a problem", "an emergency"]
QUESTIONS = {
    "wish": "In one short sentence: what does the customer want?",
    "mood": "In one or two words: how does the customer feel?",
    "cause": "In one short sentence: what may have gone wrong?",
}
TICKETS = [
    "I was charged twice for order 4471 and my account is overdrawn now. Please help today!",
    "My parcel has been in the depot for nine days. When will it arrive?",
    "I can't log in since the update, and the reset mail never comes.",
    "The app crashes every time I open the camera. I use an Android 14 phone.",
    "Please change the delivery address of my order, I moved last week.",
    "I love your newsletter, but once a month would be enough for me.",
    "Somebody else logged into my account and ordered a laptop. Stop it now!",
    "The invoice shows the wrong company name. I need a new one for my taxes.",
]


@ub.function
def triage(s: ub.State, ticket: str) -> ub.Forks:
    """Rate a ticket, look at it from three sides at once, and write a report.

    Nothing is read here, so the whole program is one graph; the branches are returned to be read
    when it has run.
    """
    s += ub.system("You are a support agent of a web shop. You answer briefly and exactly.")
    s += ub.user(f"A customer writes:\n{ticket}\n\nIs this a question, a problem or an emergency?")
    s += ub.assistant("This is " + ub.select("severity", choices=SEVERITIES) + ".")

    sides = s.fork(len(QUESTIONS))
    for side, question in zip(sides, QUESTIONS.values(), strict=True):
        side += ub.user(question)
        side += ub.assistant(ub.gen("note", max_tokens=20, stop="\n"))
    sides.join()

    with s.user():
        s += "Notes:"
        for side, name in zip(sides, QUESTIONS, strict=True):
            s += f"\n- {name}: " + side.var("note")
        s += "\nWrite the report as JSON."
    s += ub.assistant(ub.gen("report", schema=Report, max_tokens=160))
    return sides


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example and print what came out and what it cost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="alias, GGUF file, folder or hub id")
    parser.add_argument("--backend", help="URL of an umbel server, instead of a model in process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-cache", action="store_true", help="switch the prefix cache off")
    args = parser.parse_args(argv)

    started = time.perf_counter()
    engine_options: dict[str, Any] = {"prefix_cache": not args.no_cache, "track_bound": True}
    backend = ub.connect(args.backend or args.model, **({} if args.backend else engine_options))
    print(f"ready after {time.perf_counter() - started:.1f} s\n")
    before = backend.stats()  # a server counts since its own start
    program = triage.options(backend=backend, seed=args.seed)

    started = time.perf_counter()
    first = program.run(ticket=TICKETS[0])
    print("One ticket")
    for message in first.messages:
        print(f"  {message['role']:>9}  {message['content'].strip().replace(chr(10), ' / ')}")
    for name, side in zip(QUESTIONS, first.value, strict=True):
        print(f"       fork  {name}: {side['note'].strip()}")
    print(f"     report  {first['report']!r}")
    print(f"  ({time.perf_counter() - started:.1f} s)\n")

    print("Eight tickets")
    started = time.perf_counter()
    results = program.run_batch([{"ticket": ticket} for ticket in TICKETS])
    seconds = time.perf_counter() - started
    for ticket, result in zip(TICKETS, results, strict=True):
        report = result["report"]
        flag = "urgent" if report.urgent else "      "
        print(f"  {result['severity']:<12}  {report.team:<11}  {flag}  {ticket[:56]}")
    print_costs(before, backend.stats(), [first, *results], results, seconds)
    backend.close()
    return 0


def print_costs(before: Stats, after: Stats, runs: Runs, batch: Runs, seconds: float) -> None:
    """Print what the runtime did, with the least it could have done where that is counted."""
    prompt, prefilled, tree, least = (after[name] - before[name] for name in COUNTERS)
    has_bound = after["least_prefill"] > 0
    generated = sum(meta.usage.completion_tokens for meta in metas(batch))
    waits = [m.timings.first_token - m.timings.ready for m in metas(runs)]

    def line(what: str, got: str, best: str = "") -> None:
        print(f"  {what:<38} {got:>8}" + (f" {best:>15}" if best and has_bound else ""))

    print("\nWhat the runtime did                          got" + "   best possible" * has_bound)
    line("tokens prefilled", f"{prefilled:,.0f}", f"{least:,.0f}")
    line("select tree tokens", f"{tree:,.0f}")
    line("cache hit rate", f"{1 - prefilled / prompt:.1%}", f"{1 - least / prompt:.1%}")
    line("tokens generated in the batch", f"{generated:,}")
    line("tokens per second in the batch", f"{generated / seconds:.1f}")
    line("time to first token, median", f"{statistics.median(waits):.2f}s")
    if not has_bound:
        print("(`umbel serve --track-bound` counts the least that was possible, to compare with)")


def metas(runs: Runs) -> list[ub.NodeMeta]:
    """Return what is known of every gen of the runs."""
    gens = ([run.meta("report"), *(side.meta("note") for side in run.value)] for run in runs)
    return [meta for found in gens for meta in found]


if __name__ == "__main__":
    sys.exit(main())
