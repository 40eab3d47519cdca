"""What the radix tree is made of, and what its operations return; knows no tree as a whole."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

#: what a child is found by: its first token, or with larger pages the tokens of its first page
PageKey = int | tuple[int, ...]


class NodeClass(IntEnum):
    """Who needs a node; the least goes first."""

    FREE = 0  # nobody that is known of
    PROMISED = 1  # it is the constant prefix of a registered program
    LIVE = 2  # a live program will read it


class Mark:
    """One reason to keep the path to a node: it makes the path live, or promised.

    `node` moves up when the end of the path is lost, and is None when nothing of it is left.
    """

    __slots__ = ("kind", "node")

    def __init__(self, node: RadixNode, kind: NodeClass) -> None:
        self.node: RadixNode | None = node
        self.kind = kind


class RadixNode:
    """A run of tokens that continues its parent's; a root (no parent) is empty.

    Runs are whole pages, and `slots` are the tokens' KV slots: those of a page are consecutive.
    """

    __slots__ = (
        "children",
        "computed",
        "key",
        "last_used",
        "lock_count",
        "marks",
        "num_live",
        "num_promised",
        "parent",
        "queue_entry",
        "slots",
    )

    def __init__(
        self, parent: RadixNode | None, key: list[int], slots: array[int], computed: bool
    ) -> None:
        self.parent = parent
        self.key = key
        self.slots = slots
        self.computed = computed
        self.children: dict[PageKey, RadixNode] = {}
        self.lock_count = 0
        self.last_used = 0
        self.queue_entry = 0  # the one of its entries in the eviction queue that counts
        self.marks: tuple[Mark, ...] = ()  # that end here
        self.num_live = 0  # marks of the class that end here or below
        self.num_promised = 0

    @property
    def node_class(self) -> NodeClass:
        """The strongest reason to keep the node."""
        if self.num_live:
            return NodeClass.LIVE
        return NodeClass.PROMISED if self.num_promised else NodeClass.FREE

    def path(self, below: RadixNode | None = None) -> list[RadixNode]:
        """Return the nodes from below the root, or from below an ancestor, to this one."""
        nodes: list[RadixNode] = []
        node = self
        while node is not below and node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def depth(self) -> int:
        """Return how many tokens the path to this node's end holds."""
        return sum(len(node.key) for node in self.path())


class PrefixMatch(NamedTuple):
    """The longest prefix that is in the cache."""

    num_tokens: int  # whole pages
    node: RadixNode  # ends exactly at the match; lock it before anything is evicted
    slots: array[int]


class PrefixProbe(NamedTuple):
    """How far a prefix is in the cache, without a change to the tree."""

    num_tokens: int
    node: RadixNode | None  # the deepest node reached, perhaps only its first tokens


class InsertResult(NamedTuple):
    """What an insertion found."""

    num_present: int  # leading tokens that were in the tree: their new slots are not used
    node: RadixNode  # ends at the last token; the caller has a lock on it


def page_key(tokens: Sequence[int], at: int, page_size: int) -> PageKey:
    """Return what the child that starts with `tokens[at]` is found by; its page must be whole."""
    return tokens[at] if page_size == 1 else tuple(tokens[at : at + page_size])


def common_length(key: list[int], tokens: list[int], start: int, limit: int) -> int:
    """Return how many leading tokens of `key` continue `tokens[:start]`, at most to `limit`.

    Compares slices (at C speed) and halves the range that holds the first difference.
    """
    end = min(len(key), limit - start)
    if tokens[start : start + end] == (key if end == len(key) else key[:end]):
        return end
    low, high = 0, end  # equal before low; a difference before high
    while high - low > 1:
        middle = (low + high) // 2
        if tokens[start + low : start + middle] == key[low:middle]:
            low = middle
        else:
            high = middle
    return low
