"""One request's life: what was asked, where it stands, what it holds; knows no scheduler."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from umbel.lang.errors import RequestRejectedError

if TYPE_CHECKING:
    from .kv_cache import RadixNode


UNKNOWN_TOKEN = -1  # stands in a row for an id that was sampled and has not reached the host


class RequestStatus(Enum):
    """A request's place in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A row of tokens whose KV is wanted, up to the last one, which is then sampled from.

    Three lengths over one row: `num_cached` tokens were found in the cache at the last admission,
    `num_computed` have their KV, `limit` is where the row may end. There is no prefill or decode
    phase: each step computes `token_ids[num_computed:end]`; when `end` reaches the end of the row,
    the step also gives logits. A select's row is its context followed by its token tree:
    `num_context` is the context's length, and rows from there on are never shared while the request
    runs; a gen's context is the row that it was last admitted with.

    Slots: `slots[i]` is the KV slot of row i, as a 64-bit integer that each pass copies as it is.
    The first `num_shared` belong to the radix cache (the path to `cache_node`, which is locked by
    this request); the rest are its own.
    """

    request_id: int
    program_id: int  # requests of one program are siblings to the policy
    node_id: int
    token_ids: list[int]
    limit: int
    arrival: int = 0  # order in which the programs came
    depth: int = 0  # nodes that need the model before this one in its program
    priority: int = 0
    gang: str = ""  # the fork whose siblings should run together
    starts_together: bool = True  # with its gang: a join waits for all of them, or nobody knows
    is_prefetch: bool = False  # its row is computed for others to find; nothing is sampled
    namespace: str = ""  # cache entries are shared only within one
    # a select's token tree (empty for a gen): for each tree row its parent row, as an index into
    # token_ids (num_context - 1 for a root)
    tree_parents: list[int] = field(default_factory=list)
    num_context: int = -1  # without a tree: set to the row's length when made and when admitted
    # rows from num_context on are computed again although the cache may have them: their logits
    # are wanted (a prompt's log-probabilities)
    recomputes: bool = False

    status: RequestStatus = RequestStatus.WAITING
    num_cached: int = 0
    num_computed: int = 0
    slots: array[int] = field(default_factory=lambda: array("q"))
    num_shared: int = 0
    cache_node: RadixNode | None = None
    num_prompt: int = 0  # row length when first added; what follows was sampled
    num_retractions: int = 0
    # place of the last id, UNKNOWN_TOKEN in the row, among the samples of the pass that drew it
    sampled_at: int = -1
    num_prefilled: int = 0  # tokens computed that were not sampled by this request, over its life
    #: (request id, retractions): while it is the same, slots only grow
    slots_key: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        """Fill in what follows from the row."""
        self.num_prompt = len(self.token_ids)
        self.slots_key = (self.request_id, self.num_retractions)
        if not self.has_private_rows:
            self.num_context = len(self.token_ids)

    def retracted(self) -> None:
        """Count a retraction: the slots of the rows from here on are others."""
        self.num_retractions += 1
        self.slots_key = (self.request_id, self.num_retractions)

    @property
    def has_private_rows(self) -> bool:
        """Whether rows from `num_context` on are never shared while the request runs."""
        return self.recomputes or bool(self.tree_parents)

    @property
    def num_known(self) -> int:
        """Tokens of the row that the host knows: all, or all but the last."""
        return len(self.token_ids) - (self.token_ids[-1] == UNKNOWN_TOKEN)

    @property
    def num_pending(self) -> int:
        """Tokens of the row whose KV is not computed yet."""
        return len(self.token_ids) - self.num_computed


def check_length(num_tokens: int, max_seq_len: int) -> None:
    """Raise RequestRejectedError for a prompt that, with one token more, is too long."""
    if num_tokens > max_seq_len:
        raise RequestRejectedError(
            f"prompt has {num_tokens - 1:,} tokens; this engine takes {max_seq_len - 1:,} and one "
            "more: shorten it, or raise max_seq_len, by default the most that the model takes",
            reason="too_long",
        )
