"""Linear layers whose weight is laid out once for the kernels of the CPU.

oneDNN reads a packed weight 1.3 (a row) to 2 times (4 to 8 rows) faster than the row-major one
that torch's own linear takes. Knows nothing of layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import reference

_DTYPES = (torch.float32, torch.bfloat16)
_ROWS_HINT = 8  # the row count that oneDNN packs for; good at every other, too


def linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return x -> x W^T + b with a packed copy of `weight`, which the caller may then drop.

    Where oneDNN is absent or has no such dtype it is the reference.
    """
    has_mkldnn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.dtype not in _DTYPES or not has_mkldnn:
        return reference.linear(weight, bias)
    # The operators that torch.compile's CPU code calls; the public to_mkldnn converts x as well.
    packed = torch.ops.mkldnn._reorder_linear_weight.default(weight, _ROWS_HINT)
    product = torch.ops.mkldnn._linear_pointwise.default

    def run(x: Tensor) -> Tensor:
        out: Tensor = product(x, packed, bias, "none", [], "")
        return out

    return run
