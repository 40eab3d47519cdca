"""Rows to sample as the tensors that a kernel is given."""

from __future__ import annotations

import numpy as np
import torch

from umbel.kernels import SamplingTensors
from umbel.runtime.sampling import SamplingRow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def as_int64(words: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.asarray(words, np.uint64).view(np.int64)).to(DEVICE)


def tensors(rows: list[SamplingRow]) -> SamplingTensors:
    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        values = [getattr(row.params, name) for row in rows]
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    return SamplingTensors(
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int32),
        top_p=column("top_p", torch.float32),
        min_p=column("min_p", torch.float32),
        seeds=as_int64([row.seed for row in rows]),
        counters=as_int64([row.num_sampled for row in rows]),
        is_filtered=any(row.is_filtered for row in rows),
    )
