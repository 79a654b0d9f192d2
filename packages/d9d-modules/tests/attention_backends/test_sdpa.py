from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_modules import AttentionOptions, AttentionRequest, EagerBackend
from d9d_modules.attention_backends.sdpa import SdpaBackend


def _request(device: str = "cpu", **changes: Any) -> AttentionRequest:
    settings: dict[str, Any] = {"dtype": torch.bfloat16, "head_dim": 64, **changes}
    return AttentionRequest(device=torch.device(device), **settings)


def test_rejection_names_the_unsupported_feature() -> None:
    sdpa, window = SdpaBackend(), AttentionOptions(window=3)
    assert sdpa.rejection(_request(options=window, has_documents=True, has_prefix_keys=True)) is None
    assert sdpa.rejection(_request(has_sinks=True, has_prefix_keys=True)) is None
    assert sdpa.rejection(_request(options=AttentionOptions(softcap=2.0))) == "has no softcap"
    for request in (_request(has_sinks=True, options=window), _request(has_sinks=True, has_documents=True)):
        assert (
            sdpa.rejection(request)
            == "supports sinks only for causal attention without a window, a mask or packed documents"
        )


@pytest.mark.parametrize(
    ("request_", "is_fast"),
    [
        (_request(), True),
        (_request(has_prefix_keys=True, has_sinks=True), True),
        (_request(has_documents=True), True),
        (_request(options=AttentionOptions(window=3)), False),
        (_request("cuda"), True),
        (_request("cuda", has_documents=True), False),
        (_request("cuda", dtype=torch.float32), True),
        (_request("cuda", dtype=torch.float32, has_prefix_keys=True), False),
        (_request("cuda", head_dim=20, has_sinks=True), False),
    ],
)
def test_sdpa_is_slow_with_a_mask_or_all_scores(request_: AttentionRequest, is_fast: bool) -> None:
    assert SdpaBackend().is_fast(request_) is is_fast


class _Largest(TorchDispatchMode):
    """Largest output tensor of any operator."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204  (torch's signature)
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("length", [1024, 300])
@pytest.mark.parametrize("case", ["documents", "sinks"])
def test_no_tensor_of_the_size_of_a_mask_is_allocated(length: int, case: str) -> None:
    inputs = [torch.randn(1, n, 1, 8, requires_grad=True) for n in (length, 1024, 1024)]
    documents = torch.arange(1024).unsqueeze(0) // 100 if case == "documents" else None
    sinks = torch.zeros(1) if case == "sinks" else None
    with _Largest() as largest:
        out = SdpaBackend().attend(*inputs, options=AttentionOptions(), documents_BS=documents, sinks_H=sinks)
        out.sum().backward()
    assert largest.numel <= 2 * 1024 * 8  # the keys themselves


@pytest.mark.parametrize("is_equal", [True, False])
def test_rows_with_equal_documents_share_the_calls(is_equal: bool) -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1], [4, 4, 4, 2, 2], [7, 7, 7, 7 if not is_equal else 8, 8]])
    q, k, v = (torch.randn(3, 5, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    real = F.scaled_dot_product_attention
    with mock.patch.object(F, "scaled_dot_product_attention", side_effect=real) as calls:
        out = SdpaBackend().attend(q, k, v, options=AttentionOptions(), documents_BS=documents, sinks_H=None)
    assert calls.call_count == (2 if is_equal else 6)
    for row in range(3):
        one = (each[row : row + 1] for each in (q, k, v))
        alone = EagerBackend().attend(
            *one, options=AttentionOptions(), documents_BS=documents[row : row + 1], sinks_H=None
        )
        torch.testing.assert_close(out[row : row + 1], alone, rtol=1e-12, atol=1e-12)


def test_attention_runs_on_meta() -> None:
    q, k, v = (torch.empty(2, 6, heads, 8, device="meta") for heads in (4, 2, 2))
    for documents, sinks in (
        (None, None),
        (torch.empty(2, 6, device="meta"), None),
        (None, torch.empty(4, device="meta")),
    ):
        out = SdpaBackend().attend(q, k, v, options=AttentionOptions(), documents_BS=documents, sinks_H=sinks)
        assert out.shape == (2, 6, 4, 8)
