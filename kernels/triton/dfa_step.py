"""Steps of byte automata that live on the device: after sampling, each row walks its token's bytes.

Automata of many grammars share one table of transitions and one of mask rows; a row's state is an
index into both. Nothing here knows where a grammar's states begin.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..sampling_tensors import TokenBytes


@triton.jit
def _step_kernel(state_ptr, id_ptr, transition_ptr, start_ptr, byte_ptr):
    row = tl.program_id(0)
    state = tl.load(state_ptr + row)
    token_id = tl.load(id_ptr + row)
    if token_id >= 0:
        at = tl.load(start_ptr + token_id)
        end = tl.load(start_ptr + token_id + 1)
        while at < end:
            byte = tl.load(byte_ptr + at).to(tl.int64)
            state = tl.load(transition_ptr + state.to(tl.int64) * 256 + byte)
            at += 1
        tl.store(state_ptr + row, state)


def dfa_step_(states: Tensor, token_ids: Tensor, transitions: Tensor, tokens: TokenBytes) -> None:
    """Move each row's state over the bytes of its token, in place.

    states: int32 [num_rows]; token_ids: int64 [num_rows], -1 for a row without a token;
    transitions: int32 [num_states, 256]. A token without bytes (EOS) moves nothing.
    """
    if states.numel():
        _step_kernel[(len(states),)](
            states, token_ids, transitions, tokens.starts, tokens.data, num_warps=1
        )
