"""Extract typed records from a column of a CSV file, all rows side by side, as JSON lines.

python examples/extract_csv.py
python examples/extract_csv.py mails.csv --column body --backend http://127.0.0.1:8000 > out.jsonl
python examples/extract_csv.py mails.csv --column body --results done.jsonl > out.jsonl

With --results the same command goes on where a run broke off or rows failed:
it runs what is missing, and prints all rows.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field

import umbel as ub

MESSAGES = Path(__file__).resolve().parent / "messages.csv"


class Order(BaseModel):
    """What is extracted from a message."""

    product: Annotated[str, Field(max_length=40)]
    quantity: Annotated[int, Field(ge=0, le=999)]
    wish: Literal["order", "return", "question"]
    express: bool


class Row(BaseModel):
    """A line of the output."""

    row: int
    order: Order | None = None
    error: str | None = None


@ub.function
def extract(s: ub.State, text: str) -> None:
    """Fill in an order. The instructions are the same for each row, so they are prefilled once."""
    s += ub.system(
        "You read messages to a shop and note as JSON: the product, how many of it, whether the "
        "customer wants to order, to return or to ask something, and whether it is urgent."
    )
    s += ub.user("Send me two red lamps as soon as you can!")
    s += ub.assistant('{"product":"red lamp","quantity":2,"wish":"order","express":true}')
    s += ub.user(text)
    s += ub.assistant(ub.gen("order", schema=Order, max_tokens=96))


def read_column(path: Path, column: str) -> Iterator[str]:
    """Yield a column's cells; rows are read when the batch has room for them."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if column not in (reader.fieldnames or ()):
            raise SystemExit(f"{path} has no column {column!r}; it has {reader.fieldnames}")
        for record in reader:
            yield record[column]


def to_row(result: ub.Result[None]) -> Row:
    """Return a result as a line: the order, or why there is none."""
    try:
        return Row(row=result.row, order=result["order"])
    except ub.UmbelError as error:  # the row's failure, or an order that max_tokens cut
        return Row(row=result.row, error=str(error))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("csv", nargs="?", type=Path, default=MESSAGES)
    parser.add_argument("--column", default="message")
    parser.add_argument("--max-in-flight", type=int, default=64, help="rows that run at once")
    parser.add_argument("--retries", type=int, default=3, help="for a busy or lost server")
    parser.add_argument("--results", type=Path, help="file that keeps what is done, to go on from")
    parser.add_argument("--model", default="smollm2", help="alias, GGUF file, folder or hub id")
    parser.add_argument("--backend", help="URL of an umbel server, instead of a model in process")
    args = parser.parse_args(argv)

    backend = ub.connect(args.backend or args.model)
    num_failed = 0
    try:
        # iter_batch is run_batch, row by row as they come: nothing is kept for the end
        for result in extract.options(backend=backend).iter_batch(
            read_column(args.csv, args.column),
            max_in_flight=args.max_in_flight,
            on_error="collect",
            retries=args.retries,
            results_file=args.results,
        ):
            row = to_row(result)
            num_failed += row.error is not None
            print(row.model_dump_json(exclude_none=True), flush=True)
    finally:
        backend.close()
    if num_failed:
        print(f"{num_failed} rows failed", file=sys.stderr)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
