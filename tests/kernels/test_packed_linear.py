"""Packed linear layers: their rows are the reference's, and they need few kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from umbel.kernels import reference
from umbel.kernels.packed_linear import PackedLinears, padded_rows

_IN, _OUT = 96, 40

needs_mkldnn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    reason="torch has no oneDNN here",
)


def test_row_counts_are_few_and_waste_at_most_an_eighth() -> None:
    counts = [padded_rows(n) for n in range(1, 4097)]
    assert counts == sorted(counts)
    assert all(n <= count <= 9 * n / 8 for n, count in enumerate(counts, 1))
    assert all(padded_rows(count) == count for count in counts)
    assert len(set(counts)) == 16 + 8 * 8
    assert counts[:16] == list(range(1, 17))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_references_however_many_there_are(dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(_OUT, _IN, dtype=dtype), torch.randn(140, _IN, dtype=dtype)
    bias = torch.randn(_OUT, dtype=dtype) if has_bias else None
    product = PackedLinears().linear(weight, bias)
    expected = reference.linear(weight, bias)(x)
    for num_rows in (*range(1, 36), 63, 64, 65, 127, 129, 140):
        torch.testing.assert_close(product(x[:num_rows]), expected[:num_rows])


@needs_mkldnn
def test_a_pass_makes_no_kernel_for_its_own_row_count(capfd: pytest.CaptureFixture[str]) -> None:
    weight = torch.randn(_OUT + 1, _IN)  # a shape that no other test has
    made = _kernels_made(capfd, lambda: PackedLinears().linear(weight, None))
    assert made >= len({padded_rows(n) for n in range(1, 65)})
    product = PackedLinears().linear(weight, None)
    assert _kernels_made(capfd, lambda: [product(torch.randn(n, _IN)) for n in range(1, 65)]) == 0
    large = lambda: [product(torch.randn(n, _IN)) for n in range(65, 129)]  # noqa: E731
    assert _kernels_made(capfd, large) == 8


def _kernels_made(capfd: pytest.CaptureFixture[str], do: Callable[[], object]) -> int:
    """Return how many kernels oneDNN had to make, as it tells when it is asked to."""
    capfd.readouterr()
    level = torch.backends.mkldnn.VERBOSE_ON_CREATION
    with torch.backends.mkldnn.verbose(level):  # type: ignore[no-untyped-call]
        do()
    return capfd.readouterr().out.count("create:cache_miss")
