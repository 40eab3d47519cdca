"""What programs are told to begin with: kept in the cache while they come, and computed early.

A run may be told the trunk that other runs begin with too (`RunOptions.trunk`). As long as any run
that was told of it is open, what is cached of a trunk goes after all that nobody is known to read;
whoever expects more such runs keeps one open, without nodes. Where a trunk is not cached when the
first of them comes, it is computed by a request of its own, just ahead of that run's.

Knows graphs, rows and promises; nothing of pages, nor of what the runs do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from umbel.lang.errors import RequestRejectedError
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import RoleEnd, RoleStart, Text

from .kv_cache import Promise
from .program_run import ProgramRun
from .request import Request
from .request_queue import RequestQueue
from .token_row import RowBuilder, TokenRow

logger = logging.getLogger(__name__)

# what may follow a trunk: tokens that none of these changes are taken to be those of its rows
_PROBES = ("a", "Z", "0", " ", " a", ".", "\n", "\n\n", "(", "é", "日")


@dataclass(slots=True, eq=False)
class _Trunk:
    """A trunk that open runs were told of."""

    nodes: tuple[GraphNode, ...]
    token_ids: list[int]  # whole pages that are the same whatever follows; none if not worth it
    num_runs: int = 0
    promise: Promise | None = None
    request: Request | None = None  # that computes it, or did


class Trunks:
    """The trunks of one engine's open runs. Called on the engine's thread.

    At most `MOST_PROMISES` are kept at once, over `SHARE` of the pool; beyond that the one told
    longest ago is given up, until another run is told of it.
    """

    MOST_PROMISES = 32
    SHARE = 0.5

    def __init__(
        self,
        rows: RowBuilder,
        queue: RequestQueue,
        next_request_id: Callable[[], int],
        max_seq_len: int,
    ) -> None:
        self._rows = rows
        self._queue = queue
        self._next_request_id = next_request_id
        self._max_tokens = max_seq_len - 1
        self._trunks: dict[tuple[GraphNode, ...], _Trunk] = {}
        self._of_run: dict[int, _Trunk] = {}
        self._promised: dict[_Trunk, None] = {}  # told longest ago first

    def opened(self, run: ProgramRun) -> None:
        """Keep the trunk that a run was told of, and see to it that it is computed."""
        graph = run.options.trunk
        if graph is None:
            return
        nodes = _constants(graph)
        trunk = self._trunks.get(nodes)
        if trunk is None:
            trunk = self._trunks[nodes] = _Trunk(nodes, self._encode(nodes))
        trunk.num_runs += 1
        self._of_run[run.run_id] = trunk
        if trunk.promise is not None:
            self._promised[trunk] = self._promised.pop(trunk)
        elif trunk.token_ids:
            self._promise(trunk, run)

    def over(self, run: ProgramRun) -> None:
        """Note that a run is over; the last one takes its trunk along. Idempotent."""
        trunk = self._of_run.pop(run.run_id, None)
        if trunk is None:
            return
        trunk.num_runs -= 1
        if trunk.num_runs == 0:
            self._give_up(trunk)
            del self._trunks[trunk.nodes]

    def stop(self) -> list[Request]:
        """Forget everything, and return the requests to be aborted; touches no cache."""
        requests = [trunk.request for trunk in self._promised if trunk.request is not None]
        self._trunks.clear()
        self._of_run.clear()
        self._promised.clear()
        return requests

    def _promise(self, trunk: _Trunk, run: ProgramRun) -> None:
        self._promised[trunk] = None
        most = self._queue.prefix_room.num_tokens * self.SHARE
        num_tokens = sum(len(other.token_ids) for other in self._promised)
        for other in list(self._promised):
            if len(self._promised) <= self.MOST_PROMISES and num_tokens <= most:
                break
            num_tokens -= len(other.token_ids)
            self._give_up(other)
        trunk.promise = self._queue.holds.promise(trunk.token_ids)
        if trunk.promise.num_cached < len(trunk.token_ids):
            self._prefetch(trunk, run)

    def _prefetch(self, trunk: _Trunk, run: ProgramRun) -> None:
        """Queue a request for a trunk, in every policy's eyes one of its first run's, and first."""
        request = Request(
            request_id=self._next_request_id(),
            program_id=run.run_id,
            node_id=-1,
            token_ids=list(trunk.token_ids),
            limit=len(trunk.token_ids),
            arrival=run.run_id,
            depth=-1,
            priority=run.options.priority,
            is_prefetch=True,
        )
        try:
            self._queue.add(request)
        except RequestRejectedError as error:  # its runs compute what they can
            logger.debug("a trunk is not computed early: %s", error)
        else:
            trunk.request = request

    def _give_up(self, trunk: _Trunk) -> None:
        self._promised.pop(trunk, None)
        if trunk.promise is not None:
            self._queue.holds.unpromise(trunk.promise)
        if trunk.request is not None:
            self._queue.abort(trunk.request)
        trunk.promise = trunk.request = None

    def _encode(self, nodes: Iterable[GraphNode]) -> list[int]:
        """Return the tokens that all rows with this beginning share, as far as is worth keeping."""
        size, num_tokens = self._queue.prefix_room
        row = TokenRow()
        try:
            for node in nodes:
                row = self._append(row, node)
            token_ids = self._rows.encode(row)
            for probe in _PROBES:
                token_ids = _common(token_ids, self._rows.encode(row, then=probe))
        except Exception:  # each row's as well, which fails by it: here nobody waits for anything
            logger.debug("a trunk has no tokens", exc_info=True)
            return []
        num = min(len(token_ids), self._max_tokens, int(num_tokens * self.SHARE))
        return token_ids[: num - num % size]

    def _append(self, row: TokenRow, node: GraphNode) -> TokenRow:
        match node.op:
            case RoleStart(role):
                return self._rows.start_role(row, role)
            case RoleEnd():
                return self._rows.end_role(row)
            case Text(parts):
                return self._rows.append_text(row, "".join(map(str, parts)))
            case _:
                raise AssertionError("only constants are in a trunk")


def _constants(graph: RequestGraph) -> tuple[GraphNode, ...]:
    """Return the nodes from the start on that follow each other and are constant."""
    found: list[GraphNode] = []
    for node in graph.nodes:
        is_next = node.id == len(found) and node.parent == (node.id - 1 if node.id else None)
        if isinstance(node.op, Text):
            is_constant = all(isinstance(part, str) for part in node.op.parts)
        else:
            is_constant = isinstance(node.op, RoleStart | RoleEnd)
        if not is_next or not is_constant:
            break
        found.append(node)
    return tuple(found)


def _common(first: list[int], second: list[int]) -> list[int]:
    """Return what two rows begin with; they differ near the end."""
    num = min(len(first), len(second))
    while first[:num] != second[:num]:
        num -= 1
    return first[:num]
