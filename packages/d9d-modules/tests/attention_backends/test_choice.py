from typing import Any, Unpack

import pytest
import torch
from torch import Tensor

from d9d_dist import UserError
from d9d_modules import (
    AttentionBackend,
    AttentionOptions,
    AttentionRequest,
    EagerBackend,
    choose_attention_backend,
    chosen_attention,
    default_attention_backends,
)
from d9d_modules.attention_backends.backend import AttentionFeatures
from d9d_modules.attention_backends.sdpa import SdpaBackend


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("D9D_ATTENTION", raising=False)


def _request(device: str = "cpu", **changes: Any) -> AttentionRequest:
    settings: dict[str, Any] = {"dtype": torch.bfloat16, "head_dim": 64, **changes}
    return AttentionRequest(device=torch.device(device), **settings)


def _torch_backends() -> list[AttentionBackend]:
    return [backend for backend in default_attention_backends() if not backend.name.startswith(("flash", "varlen"))]


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (_request(), "sdpa"),
        (_request(has_documents=True), "sdpa"),
        (_request(has_sinks=True), "sdpa"),
        (_request(options=AttentionOptions(window=8)), "sdpa"),
        (_request(options=AttentionOptions(window=8), has_sinks=True), "eager"),
        (_request(options=AttentionOptions(softcap=2.0), needs_gradient=False), "eager"),
        (_request("cuda"), "sdpa"),
        (_request("cuda", has_documents=True), "flex"),
        (_request("cuda", options=AttentionOptions(window=8), has_sinks=True), "flex"),
        (_request("cuda", options=AttentionOptions(softcap=2.0)), "flex"),
        (_request("cuda", has_documents=True, head_dim=8), "sdpa"),
        (_request("cuda", has_documents=True, has_sinks=True, dtype=torch.float64), "eager"),
    ],
)
def test_selects_the_first_fast_backend_else_the_first_supported(request_: AttentionRequest, name: str) -> None:
    assert choose_attention_backend(request_, _torch_backends()).name == name


def test_in_given_order_the_first_backend_is_selected_even_if_slow() -> None:
    backends = [EagerBackend(), SdpaBackend()]
    assert choose_attention_backend(_request(), backends).name == "sdpa"
    assert choose_attention_backend(_request(), backends, in_given_order=True).name == "eager"


def test_without_a_supported_backend_the_error_lists_every_reason() -> None:
    q = torch.randn(1, 3, 2, 8, requires_grad=True)
    attend = chosen_attention(AttentionOptions(softcap=3.0), backends=["flash4", "flex", "sdpa"])
    message = (
        r"no allowed attention backend supports causal attention with a softcap of 3\.0 \(head dim 8, "
        r"torch\.float32, cpu, with backward\):\n"
        r"- flash4 (is not installed: pip install .*|does not support cpu)\n"
        r"- flex has no backward on cpu\n"
        r"- sdpa has no softcap\n"
        r"Allow another backend, or unset `backends` and D9D_ATTENTION: eager supports every request\."
    )
    with pytest.raises(UserError, match=message):
        attend(q, q, q)


def test_a_window_longer_than_the_row_needs_no_mask() -> None:
    attend = chosen_attention(AttentionOptions(window=4), sinks=lambda: torch.zeros(2), backends=["sdpa"])
    rows = torch.randn(1, 5, 2, 8)
    assert attend(rows[:, :4], rows[:, :4], rows[:, :4]).shape == (1, 4, 2, 8)
    with pytest.raises(UserError, match=r"a window of 4, sinks .*\n- sdpa supports sinks only"):
        attend(rows, rows, rows)


@pytest.mark.parametrize(
    ("settings", "is_standard_sdpa"),
    [
        ({}, True),
        ({"backends": ["sdpa", "eager"]}, True),
        ({"backends": ["eager", "sdpa"]}, False),
        ({"options": AttentionOptions(scale=1.0)}, False),
        ({"sinks": lambda: torch.zeros(2)}, False),
    ],
)
def test_only_plain_attention_is_standard_sdpa(settings: dict[str, Any], is_standard_sdpa: bool) -> None:
    settings = {"options": AttentionOptions(), **settings}
    assert chosen_attention(settings.pop("options"), **settings).is_standard_sdpa is is_standard_sdpa


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("batch", "length", "key_length"), [(0, 3, 3), (2, 0, 0), (2, 0, 3)])
def test_empty_rows_have_outputs_and_gradients(batch: int, length: int, key_length: int, has_sinks: bool) -> None:
    sinks = torch.zeros(4, requires_grad=True)
    attend = chosen_attention(AttentionOptions(), sinks=(lambda: sinks) if has_sinks else None)
    q, k, v = (
        torch.randn(batch, n, heads, 8, requires_grad=True)
        for n, heads in ((length, 4), (key_length, 2), (key_length, 2))
    )
    for documents in (None, torch.zeros(batch, key_length, dtype=torch.int64)):
        out = attend(q, k, v, documents_BS=documents)
        assert out.shape == q.shape
        for gradient in torch.autograd.grad(out.sum(), [q, k, v, *([sinks] if has_sinks else [])]):
            assert not gradient.any()


class _Own:
    """Custom backend of a user."""

    name = "own"

    def rejection(self, request: AttentionRequest) -> str | None:
        return None if request.head_dim == 8 else "knows one head dim only"

    def is_fast(self, request: AttentionRequest) -> bool:
        return request.head_dim == 8

    def attend(self, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, **features: Unpack[AttentionFeatures]) -> Tensor:
        assert features["options"].is_standard_sdpa
        assert features["documents_BS"] is features["sinks_H"] is None
        return 2 * q_BLHK + 0 * (k_BSGK + v_BSGK)


def test_backends_may_be_custom_objects_and_names() -> None:
    attend = chosen_attention(AttentionOptions(), backends=[_Own(), "eager"])
    q = torch.randn(1, 3, 2, 8)
    assert torch.equal(attend(q, q, q), 2 * q)
    wide = torch.randn(1, 3, 2, 16)
    assert not torch.equal(attend(wide, wide, wide), 2 * wide)


def test_the_environment_overrides_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D9D_ATTENTION", " flex, eager,")
    attend = chosen_attention(AttentionOptions(), backends=["sdpa"])
    assert [backend.name for backend in attend.backends] == ["flex", "eager"]
    assert attend.in_given_order
    assert not attend.is_standard_sdpa
    monkeypatch.setenv("D9D_ATTENTION", "")
    attend = chosen_attention(AttentionOptions(), backends=["sdpa"])
    assert [backend.name for backend in attend.backends] == ["sdpa"]
    assert not chosen_attention(AttentionOptions()).in_given_order


def test_unknown_names_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    known = "flash4, flash2, sdpa, eager, flex, varlen"
    with pytest.raises(UserError, match=rf"backends names no attention backend; expected some of {known}\."):
        chosen_attention(AttentionOptions(), backends=[])
    monkeypatch.setenv("D9D_ATTENTION", "fast,sdpa,best")
    with pytest.raises(UserError, match=rf"D9D_ATTENTION names 'fast', 'best'; expected some of {known}\."):
        chosen_attention(AttentionOptions())


def test_number_of_sinks_must_match_the_heads() -> None:
    attend = chosen_attention(AttentionOptions(), sinks=lambda: torch.zeros(4))
    assert attend(*(torch.randn(1, 3, heads, 8) for heads in (4, 2, 2))).shape == (1, 3, 4, 8)
    attend.of_heads(slice(0, 2))(*(torch.randn(1, 3, heads, 8) for heads in (2, 2, 2)))
    with pytest.raises(UserError, match=r"got sinks of shape \(4,\) for 2 heads; .* Shard them like the query heads"):
        attend(*(torch.randn(1, 3, heads, 8) for heads in (2, 2, 2)))
