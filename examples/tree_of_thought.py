"""Play the game of 24: make 24 of four numbers. The model scores the moves, a tree is searched.

python examples/tree_of_thought.py 4 6 8 3
python examples/tree_of_thought.py 1 5 7 11 --width 8 --backend http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Iterator, Sequence
from itertools import count, permutations
from math import log
from typing import NamedTuple

import umbel as ub

GOAL = 24


class Move(NamedTuple):
    """One operation, and the numbers that are there after it."""

    text: str
    left: tuple[int, ...]


class Thought(NamedTuple):
    """A leaf of the tree: a state that holds all moves so far. The least one is tried first."""

    cost: float  # mean -log p of its moves
    order: int  # between equals, the older one
    state: ub.State
    numbers: tuple[int, ...]
    moves: tuple[Move, ...]


def legal_moves(numbers: tuple[int, ...]) -> Iterator[Move]:
    """Yield each move once; numbers stay whole and positive."""
    seen = set()
    for i, j in permutations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        rest = tuple(n for k, n in enumerate(numbers) if k not in (i, j))
        results = {"-": a - b, "/": a // b if a % b == 0 else 0}
        if a >= b:  # these two don't mind the order
            results |= {"+": a + b, "*": a * b}
        for sign, result in results.items():
            left = tuple(sorted((*rest, result)))
            text = f"{a} {sign} {b} = {result} (left: {' '.join(map(str, left))})"
            if result > 0 and text not in seen:
                seen.add(text)
                yield Move(text, left)


@ub.function
def solve(
    s: ub.State, numbers: Sequence[int], width: int = 4, max_rounds: int = 16
) -> tuple[Move, ...] | None:
    """Expand the `width` best thoughts side by side, round by round, until one makes 24.

    Each expansion scores all of a thought's moves in one forward pass. Nothing ends up in `s`: the
    solution is returned, or None.
    """
    s += ub.system("You play the game of 24: combine two numbers in each move, and make 24.")
    s += ub.user("Numbers: 4 4 6 8\nMoves:")
    s += ub.assistant("8 + 4 = 12 (left: 4 6 12)\n6 - 4 = 2 (left: 2 12)\n12 * 2 = 24 (left: 24)")
    s += ub.user(f"Numbers: {' '.join(map(str, numbers))}\nMoves:") + ub.assistant_begin()
    order = count()
    leaves = [Thought(0.0, next(order), s, tuple(numbers), ())]
    for _ in range(max_rounds):
        tried = [heapq.heappop(leaves) for _ in range(min(width, len(leaves)))]
        options = [tuple(legal_moves(thought.numbers)) for thought in tried]
        probes = [thought.state.copy() for thought in tried]
        for probe, moves in zip(probes, options, strict=True):
            probe += ub.select("move", [move.text for move in moves])
        # all probes are written, none is read yet: the first read sends them off together
        for thought, probe, moves in zip(tried, probes, options, strict=True):
            for move, score in zip(moves, probe.meta("move").scores, strict=True):
                path = (*thought.moves, move)
                if move.left == (GOAL,):
                    for other in probes:  # early stop: nobody will read these
                        other.cancel()
                    return path
                if len(move.left) > 1:
                    cost = thought.cost * len(thought.moves) - log(max(score.probability, 1e-12))
                    child = thought.state.copy()
                    child += move.text + "\n"
                    leaf = Thought(cost / len(path), next(order), child, move.left, path)
                    heapq.heappush(leaves, leaf)
    return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("numbers", nargs="*", type=int, default=[4, 6, 8, 3])
    parser.add_argument("--width", type=int, default=4, help="thoughts expanded at once")
    parser.add_argument("--max-rounds", type=int, default=16)
    parser.add_argument("--model", default="smollm2", help="alias, GGUF file, folder or hub id")
    parser.add_argument("--backend", help="URL of an umbel server, instead of a model in process")
    args = parser.parse_args(argv)

    backend = ub.connect(args.backend or args.model)
    try:
        program = solve.options(backend=backend)
        path = program.run(args.numbers, width=args.width, max_rounds=args.max_rounds).value
    finally:
        backend.close()
    if path is None:
        print("no way to 24 was found")
        return 1
    print("\n".join(move.text for move in path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
