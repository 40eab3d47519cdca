"""The request graph: operations with prefix and value edges and stable addresses.

Holds no values and no state; `graph_state` says where a running graph stands.
"""

from __future__ import annotations

import hashlib

import msgspec

from .errors import ProgramError
from .ir import Gen, Join, Op, Ref, Select, Text


class GraphNode(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One operation, its place and its edges.

    `id` counts the nodes of one run, over all its pieces. `parent` is the prefix edge: this node
    continues that node's text (None: the empty prompt). `address` is the position in the program,
    for example ``2.fork0[1].0``: the same program on the same arguments gives the same addresses.
    """

    id: int
    address: str
    op: Op
    parent: int | None = None

    @property
    def label(self) -> str:
        """What messages call the node: its name, where it has one, and its address."""
        if isinstance(self.op, Gen | Select) and self.op.name:
            return f"{self.op.name!r} ({self.address})"
        return self.address

    @property
    def deps(self) -> tuple[int, ...]:
        """Nodes whose values this node reads (data edges), in order of use."""
        op = self.op
        if type(op) is Text:
            parts = op.parts
            if len(parts) == 1 and type(parts[0]) is str:
                return ()
            return tuple(part.node for part in parts if isinstance(part, Ref))
        return op.branches if type(op) is Join else ()


class RequestGraph(msgspec.Struct, frozen=True, gc=False):
    """A piece of a run: nodes in topological order with consecutive ids from `base` on.

    Edges may lead to nodes of earlier pieces of the same run (ids below `base`).
    """

    nodes: tuple[GraphNode, ...]
    base: int = 0

    def check(self) -> None:
        """Raise ProgramError unless the nodes' ids and edges are in order.

        Ids are consecutive, edges lead backwards, and a join's edges to different nodes.
        """
        for i, node in enumerate(self.nodes):
            if node.id != self.base + i:
                raise ProgramError(f"node {node.id} stands where {self.base + i} is due")
            for edge in (*node.deps, *(() if node.parent is None else (node.parent,))):
                if not 0 <= edge < node.id:
                    raise ProgramError(f"node {node.id} ({node.address}) has an edge to {edge}")
            op = node.op
            if isinstance(op, Join) and len({node.parent, *op.branches}) <= len(op.branches):
                raise ProgramError(f"node {node.id} ({node.address}) joins a node twice")

    @property
    def num_chars(self) -> int:
        """How many characters of literal text the nodes append."""
        texts = (node.op.parts for node in self.nodes if isinstance(node.op, Text))
        return sum(len(part) for parts in texts for part in parts if isinstance(part, str))

    def digest(self) -> str:
        """Return a hash of the graph's content, equal for equal graphs in any process."""
        return hashlib.blake2b(encode(self), digest_size=16).hexdigest()


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(RequestGraph)


def encode(graph: RequestGraph) -> bytes:
    """Serialise to msgpack."""
    return _encoder.encode(graph)


def decode(data: bytes) -> RequestGraph:
    """Read what `encode` wrote and check it; raises msgspec.ValidationError or ProgramError."""
    graph = _decoder.decode(data)
    graph.check()
    return graph


def node_seed(run_seed: int, row: int, address: str, sample: int = 0, attempt: int = 0) -> int:
    """Return the 64-bit seed of one sample of one node (rule 16 of the semantics)."""
    key = f"{run_seed}\0{row}\0{address}\0{sample}\0{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
