"""Steps of byte automata that live on the device: each row walks the bytes of what was sampled.

Automata of many grammars share one table of transitions and one of mask rows; a row's state is an
index into both. Nothing here knows where a grammar's states begin.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..sampling_tensors import TokenBytes
from .launch import launch


@triton.jit
def _step_kernel(source_ptr, last_ptr, id_ptr, transition_ptr, start_ptr, byte_ptr, out_ptr):
    row = tl.program_id(0)
    state = tl.load(source_ptr + row)
    if state < 0:
        place = -1 - state
        state = tl.load(last_ptr + place)
        token_id = tl.load(id_ptr + place)
        at = tl.load(start_ptr + token_id)
        end = tl.load(start_ptr + token_id + 1)
        byte = tl.load(byte_ptr + at, mask=at < end, other=0)
        while at < end:
            at += 1
            following = tl.load(byte_ptr + at, mask=at < end, other=0)  # needs no state: in time
            state = tl.load(transition_ptr + state.to(tl.int64) * 256 + byte.to(tl.int64))
            byte = following
    tl.store(out_ptr + row, state)


def dfa_step(
    sources: Tensor,
    last: Tensor,
    token_ids: Tensor,
    transitions: Tensor,
    tokens: TokenBytes,
    out: Tensor,
) -> None:
    """Write each row's state to `out`: the one given, or the one after what was sampled last.

    sources: int32 [num_rows]; a state, or -1 - p for the row at place p of the last samples, whose
    state was last[p] (int32) and whose id is token_ids[p] (int64): its bytes are walked, so that a
    token without bytes (EOS) moves nothing. transitions: int32 [num_states, 256].
    """
    if sources.numel():
        launch(_step_kernel, (len(sources),))(
            sources, last, token_ids, transitions, tokens.starts, tokens.data, out, num_warps=1
        )
