"""Linear layers whose weight is laid out once for the kernels of the CPU.

oneDNN reads a packed weight 1.3 (a row) to 2 times (4 to 8 rows) faster than the row-major one
that torch's own linear takes. Knows nothing of layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference

_DTYPES = (torch.float32, torch.bfloat16)
_ROWS_HINT = 8  # the row count that oneDNN packs for; good at every other, too
_EXACT_ROWS = 16  # counts up to this have a kernel each; above, every octave has half as many
_READY_ROWS = 64  # kernels for up to so many rows, as decode steps have, are made with a layer
_READY_SIZE = 1 << 24  # numbers in a weight; to run larger ones for their kernels alone takes long


class PackedLinears:
    """Makes linear layers, and with the first of each shape oneDNN's kernels for few rows.

    oneDNN makes a kernel for each count of rows that it meets and keeps a thousand of them, 0.6 MiB
    each, for the whole process: it would grow by hundreds of MiB as passes of new sizes come. So
    rows are padded to one of few counts, at most an eighth more; a row's result stays the same.
    """

    def __init__(self) -> None:
        self._ready: set[tuple[torch.Size, torch.dtype, bool, int]] = set()

    def linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Return x -> x W^T + b with a packed copy of `weight`, which the caller may then drop.

        Where oneDNN is absent or has no such dtype it is the reference.
        """
        has_mkldnn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if weight.dtype not in _DTYPES or not has_mkldnn:
            return reference.linear(weight, bias)
        # The operators that torch.compile's CPU code calls; the public to_mkldnn converts x as well
        packed = torch.ops.mkldnn._reorder_linear_weight.default(weight, _ROWS_HINT)
        product = torch.ops.mkldnn._linear_pointwise.default

        def run(x: Tensor) -> Tensor:
            num_rows = len(x)
            more = padded_rows(num_rows) - num_rows
            if more:
                x = F.pad(x, (0, 0, 0, more))
            out: Tensor = product(x, packed, bias, "none", [], "")
            return out[:num_rows] if more else out

        shape = (weight.shape, weight.dtype, bias is not None, torch.get_num_threads())
        if weight.numel() <= _READY_SIZE and shape not in self._ready:
            # now, and not while a program waits for its first step
            self._ready.add(shape)
            for num_rows in sorted({padded_rows(n) for n in range(1, _READY_ROWS + 1)}):
                run(weight.new_zeros(num_rows, weight.shape[1]))
        return run


def padded_rows(num_rows: int) -> int:
    """Return the least count of rows, no less than `num_rows`, that there is a kernel for."""
    if num_rows <= _EXACT_ROWS:
        return num_rows
    step = 2 * (1 << (num_rows - 1).bit_length() - 1) // _EXACT_ROWS
    return -(-num_rows // step) * step
