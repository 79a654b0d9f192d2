"""The kernels need GPUs, so stand-ins replace the packages and compute with the eager backend."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from d9d_dist import UserError
from d9d_modules import AttentionBackend, AttentionOptions, AttentionRequest, EagerBackend
from d9d_modules.attention_backends import flash
from d9d_modules.attention_backends.flash import Flash2Backend, Flash4Backend, VarlenBackend

BOTH: list[Callable[[], AttentionBackend]] = [Flash2Backend, Flash4Backend]


def _attend(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
    left, right = settings["window_size"]
    assert right == (left if left in {-1, None} or not settings["causal"] else 0)
    options = AttentionOptions(
        is_causal=settings["causal"],
        window=None if left in {-1, None} else left + 1,
        scale=settings["softmax_scale"],
        softcap=settings["softcap"] or None,
    )
    return EagerBackend().attend(q, k, v, options=options, documents_BS=None, sinks_H=settings.get("learnable_sink"))


def _attend_by_lengths(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
    borders = [settings.pop(f"cu_seqlens_{side}") for side in "qk"]
    longest = [settings.pop(f"max_seqlen_{side}") for side in "qk"]
    assert all(x.dtype == torch.int32 for x in borders)
    assert [x.diff().max() for x in borders] == longest
    parts = []
    for q_start, q_end, k_start, k_end in zip(borders[0], borders[0][1:], borders[1], borders[1][1:], strict=False):
        if q_end > q_start:
            keys = slice(int(k_start), int(k_end))
            parts.append(_attend(q[None, int(q_start) : int(q_end)], k[None, keys], v[None, keys], **settings)[0])
    return torch.cat(parts)


def _varlen(q: Tensor, k: Tensor, v: Tensor, *lengths: Any, enable_gqa: bool = False, **settings: Any) -> Tensor:
    inspect.signature(varlen_attn).bind(q, k, v, *lengths, **settings)
    assert enable_gqa, "the query heads share key/value heads"
    left, right = settings["window_size"]
    is_causal = right == 0
    return _attend_by_lengths(
        q,
        k,
        v,
        **dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), lengths, strict=True)),
        window_size=(-1, -1) if left == -1 else (left, right),
        causal=is_causal,
        softmax_scale=settings["scale"],
        softcap=0.0,
    )


def _packages() -> dict[str, ModuleType]:
    package, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    stand_ins = {"flash_attn_func": _attend, "flash_attn_varlen_func": _attend_by_lengths}
    for name, function in stand_ins.items():
        setattr(package, name, function)
        setattr(cute, name, lambda *args, _function=function, **settings: (_function(*args, **settings), None))
    varlen: Any = ModuleType("torch.nn.attention.varlen")
    varlen.varlen_attn = _varlen
    return {"flash_attn": package, "flash_attn.cute": cute, varlen.__name__: varlen}


@pytest.mark.parametrize("make", [*BOTH, VarlenBackend])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(),
        AttentionOptions(window=3, scale=0.3, softcap=2.0),
        AttentionOptions(is_causal=False),
        AttentionOptions(is_causal=False, window=3),
        AttentionOptions(window=3, scale=0.3),
    ],
)
@pytest.mark.parametrize("length", [9, 4])
def test_calls_of_the_flash_packages_equal_eager_attention(
    make: Callable[[], AttentionBackend], has_documents: bool, options: AttentionOptions, length: int
) -> None:
    q, k, v = (torch.randn(2, n, heads, 8, dtype=torch.float64) for n, heads in ((length, 4), (9, 2), (9, 2)))
    backend = make()
    if backend.name == "varlen" and options.softcap is not None:
        options = replace(options, softcap=None)
    rest: dict[str, Any] = {
        "options": options,
        "documents_BS": torch.tensor([[0] * 4 + [1] * 5, [7] * 6 + [2] + [3] * 2]) if has_documents else None,
        "sinks_H": torch.randn(4, dtype=torch.float64) if backend.name == "flash4" else None,
    }
    with patch.dict(sys.modules, _packages()):
        got = backend.attend(q, k, v, **rest)
    torch.testing.assert_close(got, EagerBackend().attend(q, k, v, **rest), rtol=1e-12, atol=1e-12)


def test_document_lengths_are_read_once_for_the_layers_of_a_batch() -> None:
    q = torch.randn(1, 3, 1, 8)
    documents = torch.tensor([[0, 0, 1]])
    with (
        patch.dict(sys.modules, _packages()),
        patch.object(flash, "document_runs", wraps=flash.document_runs) as read,
    ):
        for backend in (Flash2Backend(), Flash4Backend(), VarlenBackend()):
            backend.attend(q, q, q, options=AttentionOptions(), documents_BS=documents, sinks_H=None)
        assert read.call_count == 1
        documents[0, 1] = 1
        changed = VarlenBackend().attend(q, q, q, options=AttentionOptions(), documents_BS=documents, sinks_H=None)
    expected = EagerBackend().attend(q, q, q, options=AttentionOptions(), documents_BS=documents, sinks_H=None)
    torch.testing.assert_close(changed, expected)


@pytest.mark.parametrize("make", [*BOTH, VarlenBackend])
def test_a_non_contiguous_document_raises(make: Callable[[], AttentionBackend]) -> None:
    q = torch.randn(1, 3, 1, 8)
    documents = torch.tensor([[0, 1, 0]])
    with (
        patch.dict(sys.modules, _packages()),
        pytest.raises(UserError, match=r"a document id that reappears .* use the backend flex, sdpa or eager"),
    ):
        make().attend(q, q, q, options=AttentionOptions(), documents_BS=documents, sinks_H=None)


def _request(**changes: Any) -> AttentionRequest:
    settings: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cuda"), "head_dim": 128, **changes}
    return AttentionRequest(**settings)


def _rejection(make: Callable[[], AttentionBackend], request: AttentionRequest, capability: int = 9) -> str | None:
    with (
        patch("d9d_modules.attention_backends.flash._is_installed", return_value=True),
        patch("torch.cuda.get_device_capability", return_value=(capability, 0)),
    ):
        return make().rejection(request)


def test_the_rejection_for_a_missing_package_has_the_install_command() -> None:
    with patch("d9d_modules.attention_backends.flash._is_installed", return_value=False):
        assert Flash2Backend().rejection(_request()) == (
            "is not installed: pip install flash-attn --no-build-isolation"
        )
        assert Flash4Backend().rejection(_request()) == "is not installed: pip install --pre flash-attn-4"


@pytest.mark.parametrize("make", BOTH)
def test_both_flash_versions_reject_unsupported_requests(make: Callable[[], AttentionBackend]) -> None:
    everything: dict[str, Any] = {
        "options": AttentionOptions(window=4, softcap=2.0),
        "has_documents": True,
        "has_prefix_keys": True,
    }
    assert _rejection(make, _request(**everything)) is None
    for device in ("cpu", "meta", "mps"):
        assert _rejection(make, _request(device=torch.device(device))) == f"does not support {device}"
    with patch("torch.xpu.get_device_capability", return_value={}):  # other devices return other types
        assert _rejection(make, _request(device=torch.device("xpu"))) == "does not support xpu"
    assert _rejection(make, _request(dtype=torch.float32)) == ("supports bfloat16 and float16, not torch.float32")
    assert "needs a head dim that is a multiple of 8 and at most" in str(_rejection(make, _request(head_dim=20)))
    assert _rejection(make, _request(has_mask=True)) == "takes no mask"
    assert "a multiple of 8 and at most" in str(_rejection(make, _request(head_dim=264)))
    assert "needs a device of compute capability" in str(_rejection(make, _request(), capability=7))
    assert make().is_fast(_request())
    assert not make().is_fast(_request(has_documents=True))


def test_varlen_rejects_unsupported_requests() -> None:
    assert _rejection(VarlenBackend, _request(options=AttentionOptions(window=4), has_documents=True)) is None
    assert _rejection(VarlenBackend, _request(options=AttentionOptions(softcap=2.0))) == "has no softcap"
    assert "log-sum-exp" in str(_rejection(VarlenBackend, _request(has_sinks=True)))
    assert _rejection(VarlenBackend, _request(device=torch.device("cpu"))) == "does not support cpu"


def test_only_flash_attention_4_supports_sinks() -> None:
    assert _rejection(Flash4Backend, _request(has_sinks=True)) is None
    assert _rejection(Flash2Backend, _request(has_sinks=True)) == (
        "does not support sinks, because its log-sum-exp has no gradient"
    )
