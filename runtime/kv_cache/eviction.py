"""Which leaf of the tree goes next: a heap whose stale entries are skipped; knows no slots.

Free leaves go before promised ones, in each class the least recently used first. Live leaves are
not queued: when nothing else is left, their programs have to let go.
"""

from __future__ import annotations

import heapq

from .radix_node import NodeClass, RadixNode


class LeafQueue:
    """Leaves that nobody has locked. Every operation is O(log n), amortised.

    A leaf's last entry counts, and no more once the leaf is live, locked, continued or removed: the
    change that ends this queues it anew.
    """

    def __init__(self) -> None:
        self._num_pushed = 0
        # (class, last use, order, node)
        self._heap: list[tuple[NodeClass, int, int, RadixNode]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: RadixNode, num_nodes: int) -> None:
        """Queue a node if it may go, or queue it anew; `num_nodes` are in the tree."""
        if not may_go(node):
            return
        if len(self._heap) > 2 * num_nodes + 64:  # mostly stale: start anew
            self._heap = [entry for entry in self._heap if _is_current(entry)]
            heapq.heapify(self._heap)
        node.queue_entry = self._num_pushed = self._num_pushed + 1
        heapq.heappush(self._heap, (node.node_class, node.last_used, self._num_pushed, node))

    def pop(self) -> RadixNode | None:
        """Take out the leaf that goes first; None if none may go."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if _is_current(entry):
                return entry[3]
        return None

    def current(self) -> list[RadixNode]:
        """Return the leaves that are queued."""
        return [entry[3] for entry in self._heap if _is_current(entry)]


def may_go(node: RadixNode) -> bool:
    """Whether a node is a leaf that nobody needs."""
    if node.lock_count or node.num_live or node.children:
        return False
    return node.computed and node.parent is not None


def _is_current(entry: tuple[NodeClass, int, int, RadixNode]) -> bool:
    node = entry[3]
    return node.queue_entry == entry[2] and may_go(node)
