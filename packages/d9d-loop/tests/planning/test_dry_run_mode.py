"""Dry run mode: results have the metadata that torch's own fake tensors have, also from the cache."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from d9d_loop.planning.dry_run_mode import DryRunMode

CASES: dict[str, list[Callable[[], object]]] = {
    "dtype": [lambda: torch.zeros(4, 6).abs(), lambda: torch.zeros(4, 6, dtype=torch.int32).abs()],
    "shape": [lambda: torch.exp(torch.zeros(12)[:4]), lambda: torch.exp(torch.zeros(12)[:8])],
    "stride": [lambda: torch.zeros(6, 6).exp(), lambda: torch.zeros(6, 6).t().exp()],
    "device": [lambda: torch.zeros(4, 6).exp(), lambda: torch.zeros(4, 6, device="xla:1").exp()],
    "offset": [lambda: torch.zeros(8)[0:4].unsqueeze(0), lambda: torch.zeros(8)[4:8].unsqueeze(0)],
    "conjugate": [
        lambda: torch.zeros(3, dtype=torch.complex64).view(1, 3),
        lambda: torch.zeros(3, dtype=torch.complex64).conj().view(1, 3),
    ],
    "negative": [
        lambda: torch.zeros(3, dtype=torch.complex64).imag.view(1, 3),
        lambda: torch.zeros(3, dtype=torch.complex64).conj().imag.view(1, 3),
    ],
    "number": [lambda: torch.zeros(2, dtype=torch.int64) * 1, lambda: torch.zeros(2, dtype=torch.int64) * 1.0],
    "list": [lambda: torch.cat([torch.zeros(2), torch.zeros(3)]), lambda: torch.cat([torch.zeros(2), torch.zeros(4)])],
    "nesting": [
        lambda: torch.ops.aten.avg_pool2d(torch.zeros(1, 1, 6, 6), [2], [2, 1]),
        lambda: torch.ops.aten.avg_pool2d(torch.zeros(1, 1, 6, 6), [2, 2], [1]),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_results_have_the_metadata_of_fake_tensors(name: str) -> None:
    def run(mode: FakeTensorMode) -> list[object]:
        with mode:
            return [_metadata(case()) for case in CASES[name] * 2]

    expected = run(FakeTensorMode())
    assert expected[0] != expected[1]
    assert run(DryRunMode()) == expected


def test_an_equal_operator_is_a_cache_hit() -> None:
    with DryRunMode() as mode:
        x = torch.zeros(3, 5)
        x.sinh()
        before = mode.cache_info()
        x.sinh()
        torch.zeros(3, 5).sinh()
        after = mode.cache_info()
    assert after.hits - before.hits >= 2
    assert after.misses == before.misses


def _metadata(tensor: object) -> object:
    assert isinstance(tensor, Tensor)
    place = tensor.device, tensor.storage_offset(), tensor.untyped_storage().nbytes()
    return tensor.dtype, tensor.shape, tensor.stride(), place, tensor.is_conj(), tensor.is_neg()
