"""Answer a question from a folder of text files: search, read each passage in a branch, answer.

python examples/rag_over_folder.py "How do I cancel a branch?"
python examples/rag_over_folder.py "When is it due?" --folder ~/notes --backend http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import re
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import umbel as ub

DOCS = Path(__file__).resolve().parent.parent / "docs"
SUFFIXES = {".md", ".rst", ".txt"}


class Passage(NamedTuple):
    """A piece of a file that fits into a prompt."""

    source: str
    text: str


def index_folder(folder: Path, max_chars: int) -> sqlite3.Connection:
    """Return a full-text index of a folder's text files, in memory."""
    store = sqlite3.connect(":memory:")
    store.execute("CREATE VIRTUAL TABLE passages USING fts5(source, text, tokenize = 'porter')")
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)
    rows = (
        (f"{path.relative_to(folder)}:{number}", text)
        for path in files
        for number, text in enumerate(split(path.read_text("utf-8", "replace"), max_chars), 1)
    )
    store.executemany("INSERT INTO passages VALUES (?, ?)", rows)
    return store


def split(text: str, max_chars: int) -> Iterator[str]:
    """Yield paragraphs, short ones together, long ones cut."""
    passage = ""
    for paragraph in re.split(r"\n\s*\n", text):
        for start in range(0, len(paragraph), max_chars):
            piece = paragraph[start : start + max_chars].strip()
            if passage and len(passage) + len(piece) > max_chars:
                yield passage
                passage = ""
            passage = f"{passage}\n{piece}".strip()
    if passage:
        yield passage


def search(store: sqlite3.Connection, question: str, limit: int) -> list[Passage]:
    """Return the passages that fit best (BM25); any word of the question may match."""
    words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", question))
    if not words:
        return []
    query = "SELECT source, text FROM passages WHERE passages MATCH ? ORDER BY rank LIMIT ?"
    return [Passage(*row) for row in store.execute(query, (words, limit))]


@ub.function
def answer(s: ub.State, question: str, passages: list[Passage]) -> list[str]:
    """Take a note of each passage side by side, then answer from the notes that help.

    Returns the sources that were used. All branches share the question's KV, and none sees another
    branch's passage: the prompt never grows with the number of passages.
    """
    s += ub.system("You answer questions from notes. You are brief, and say what you do not know.")
    s += ub.user(f"My question is: {question}")

    readers = s.fork(len(passages))
    for reader, passage in zip(readers, passages, strict=True):
        reader += ub.user(f"A passage of {passage.source}:\n{passage.text}\n\nDoes it help?")
        reader += ub.assistant(
            ub.select("helps", ["yes", "no"])
            + ". It says: "
            + ub.gen("note", max_tokens=40, stop="\n")
        )
    readers.join()

    helpful = [i for i, reader in enumerate(readers) if reader["helps"] == "yes"]
    with s.user():
        s += "Notes:"
        for i in helpful:
            s += f"\n- {passages[i].source}: " + readers[i].var("note")
        s += (
            "\nAnswer my question in one sentence."
            if helpful
            else " none. Say that you found none."
        )
    s += ub.assistant(ub.gen("answer", max_tokens=64, stop="\n"))
    return [passages[i].source for i in helpful]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("question", nargs="?", default="How are branches joined?")
    parser.add_argument("--folder", type=Path, default=DOCS, help="searched with its subfolders")
    parser.add_argument("--passages", type=int, default=4, help="how many to read")
    parser.add_argument("--passage-chars", type=int, default=800)
    parser.add_argument("--model", default="smollm2", help="alias, GGUF file, folder or hub id")
    parser.add_argument("--backend", help="URL of an umbel server, instead of a model in process")
    args = parser.parse_args(argv)

    store = index_folder(args.folder, args.passage_chars)
    passages = search(store, args.question, args.passages)
    if not passages:
        print(f"nothing in {args.folder} has a word of {args.question!r}", file=sys.stderr)
        return 1
    backend = ub.connect(args.backend or args.model)
    try:
        stream = answer.options(backend=backend).stream(args.question, passages)
        for chunk in stream.text("answer"):
            print(chunk, end="", flush=True)
        used = stream.result().value
    finally:
        backend.close()
    print(f"\n\nread: {', '.join(p.source for p in passages)}\nused: {', '.join(used) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
