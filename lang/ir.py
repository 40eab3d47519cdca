"""The operations of a request graph as frozen data: what is asked for, never how it is done."""

from __future__ import annotations

from typing import Literal

import msgspec

from .constraints import Constraint
from .sampling_params import SamplingParams

SelectMethod = Literal[
    "token_length_normalized",
    "greedy_token_selection",
    "unconditional_likelihood_normalized",
    "sum",
    "byte_normalized",
]
JoinMode = Literal["gather", "append"]
JoinPolicy = Literal["all", "collect", "any"]


class Ref(msgspec.Struct, frozen=True, gc=False, tag="ref"):
    """The text of another node's value, put in when that node has finished."""

    node: int


class Text(msgspec.Struct, frozen=True, gc=False, tag="text"):
    """Appended text; never parsed for special tokens."""

    parts: tuple[str | Ref, ...]


class RoleStart(msgspec.Struct, frozen=True, gc=False, tag="role_start"):
    """Opens a turn; the executing backend renders it with the model's own template."""

    role: str


class RoleEnd(msgspec.Struct, frozen=True, gc=False, tag="role_end"):
    """Closes the turn that the nearest RoleStart opened."""

    role: str


MAX_SAMPLES = 1024  # of one gen: each is a sequence of its own


class Gen(msgspec.Struct, frozen=True, gc=False, tag="gen", omit_defaults=True):
    """Generates text; a constraint restricts it, `n` asks for that many samples."""

    name: str
    sampling: SamplingParams = SamplingParams()
    constraint: Constraint | None = None
    n: int = 1
    timeout: float | None = None  # seconds from the moment the node is ready
    heal: bool = False
    thinking: bool = False
    max_thinking_tokens: int = 1024  # of a think block, its end included

    def __post_init__(self) -> None:
        """Refuse a number of samples that no backend should be asked for."""
        if not 1 <= self.n <= MAX_SAMPLES:
            raise ValueError(f"n must be from 1 to {MAX_SAMPLES}, not {self.n}")


class Select(msgspec.Struct, frozen=True, gc=False, tag="select", omit_defaults=True):
    """Scores every choice after the text so far and appends the winner."""

    name: str
    choices: tuple[str, ...]
    method: SelectMethod = "token_length_normalized"
    temperature: float = 0.0
    terminator: str | None = None
    timeout: float | None = None


class Branch(msgspec.Struct, frozen=True, gc=False, tag="branch", omit_defaults=True):
    """Starts one of `of` sequences at the parent's end; siblings share `gang`.

    `meets` tells a scheduler that a join waits for all of them: one alone is of no use.
    """

    index: int
    of: int
    gang: str
    meets: bool = False


class Join(msgspec.Struct, frozen=True, gc=False, tag="join", omit_defaults=True):
    """Ends a fork. `branches` holds each branch's last node, in branch order.

    `append` mode appends the branches' texts (what each wrote after its Branch node) in branch
    order, as plain literals. Policy `any` finishes when `k` branches have, and cancels the rest.
    """

    branches: tuple[int, ...]
    policy: JoinPolicy = "all"
    mode: JoinMode = "gather"
    k: int = 1


class Pick(msgspec.Struct, frozen=True, gc=False, tag="pick"):
    """Continues one of the samples of its parent, a Gen with n > 1, which itself appends nothing.

    The value is that sample's text; the sample's kept ids join the row.
    """

    sample: int


class Image(msgspec.Struct, frozen=True, gc=False, tag="image"):
    """Reserved: no backend takes images yet."""

    path: str


Op = Text | RoleStart | RoleEnd | Gen | Select | Branch | Join | Pick | Image
