"""Which leaf of the tree goes next: a heap whose stale entries are skipped; knows no slots.

Free leaves go before promised ones, in each class the least recently used first. Live leaves are
queued too, and never given out: when nothing else is left, their programs have to let go.
"""

from __future__ import annotations

import heapq

from .radix_node import NodeClass, RadixNode


class LeafQueue:
    """Leaves that nobody has locked. Every operation is O(log n), amortised.

    An entry is stale when its leaf was used, marked, locked, continued or removed since: the
    change has queued it anew, if it may go at all.
    """

    def __init__(self) -> None:
        self._num_pushed = 0
        # (class, last use, order, node)
        self._heap: list[tuple[NodeClass, int, int, RadixNode]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: RadixNode, num_nodes: int) -> None:
        """Queue a node if it may go; `num_nodes` are in the tree."""
        if not is_loose_leaf(node):
            return
        if len(self._heap) > 2 * num_nodes + 64:  # mostly stale: start anew
            self._heap = [entry for entry in self._heap if _is_current(entry)]
            heapq.heapify(self._heap)
        self._num_pushed += 1
        heapq.heappush(self._heap, (node.node_class, node.last_used, self._num_pushed, node))

    def pop(self) -> RadixNode | None:
        """Take out the leaf that goes first; None if only live ones are left, or none at all."""
        while self._heap:
            entry = self._heap[0]
            if entry[0] is NodeClass.LIVE and _is_current(entry):
                return None
            heapq.heappop(self._heap)
            if _is_current(entry):
                return entry[3]
        return None

    def current(self) -> list[RadixNode]:
        """Return the leaves that are queued."""
        return [entry[3] for entry in self._heap if _is_current(entry)]


def is_loose_leaf(node: RadixNode) -> bool:
    """Whether a node could go now, but for its class."""
    return node.lock_count == 0 and not node.children and node.computed and node.parent is not None


def _is_current(entry: tuple[NodeClass, int, int, RadixNode]) -> bool:
    node_class, last_used, _, node = entry
    return node.last_used == last_used and is_loose_leaf(node) and node.node_class is node_class
