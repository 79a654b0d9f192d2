"""Every backend that runs on this machine agrees with the eager one, forward and backward."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from d9d_modules import AttentionBackend, AttentionOptions, EagerBackend, default_attention_backends
from d9d_modules.attention_backends.backend import request_of
from d9d_modules.attention_backends.flex import FlexBackend
from d9d_modules.attention_backends.sdpa import SdpaBackend

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    seed: int = 0
    heads: tuple[int, int] = (4, 2)
    lengths: tuple[int, int] = (7, 7)
    head_dim: int = 8
    dtype: torch.dtype = torch.float64
    options: AttentionOptions = field(default_factory=AttentionOptions)
    documents: str | None = None
    has_sinks: bool = False
    has_mask: bool = False


def _documents(kind: str, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    drawn = torch.randint(0, 3, shape, generator=generator)
    return drawn if kind == "scattered" else (drawn == 0).cumsum(dim=1)


def _call(case: Case, device: str) -> tuple[list[Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(case.seed)
    (length, key_length), (heads, kv_heads) = case.lengths, case.heads
    shapes = [(2, length, heads, case.head_dim)] + 2 * [(2, key_length, kv_heads, case.head_dim)] + [(heads,)]
    *inputs, sinks = (
        torch.randn(shape, dtype=torch.float64, generator=generator).to(device, case.dtype).requires_grad_()
        for shape in shapes
    )
    documents = None
    if case.documents is not None:
        documents = _documents(case.documents, (2, key_length), generator).to(device)
    mask = torch.rand((2, length, key_length), generator=generator) < 0.5
    mask[0, length // 2] = False  # a query without a visible key
    return [*inputs, sinks], {
        "options": case.options,
        "documents_BS": documents,
        "sinks_H": sinks if case.has_sinks else None,
        "mask_BLS": mask.to(device) if case.has_mask else None,
    }


def _error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1.0)).item()


def _compare(backend: AttentionBackend, case: Case, device: str) -> None:
    inputs, rest = _call(case, device)
    if backend.rejection(request_of(*inputs[:3], **rest)) is not None:
        return
    leaves = inputs if case.has_sinks else inputs[:3]
    results = []
    for each in (backend, EagerBackend()):
        out = each.attend(*inputs[:3], **rest)
        assert out.dtype == case.dtype
        weight = torch.linspace(-1, 1, out.numel(), dtype=case.dtype, device=device).view_as(out)
        results.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
    for got, expected in zip(*results, strict=True):
        assert _error(got, expected) < TOLERANCE[case.dtype], (backend.name, case)


CASES = st.builds(
    Case,
    seed=st.integers(0, 10**6),
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    lengths=st.sampled_from([(1, 1), (9, 9), (4, 9), (1, 8)]),
    head_dim=st.sampled_from([5, 8]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    options=st.builds(
        AttentionOptions,
        is_causal=st.booleans(),
        window=st.sampled_from([None, 2, 20]),
        scale=st.sampled_from([None, 0.2]),
        softcap=st.none(),
    ),
    documents=st.sampled_from([None, None, "packed", "scattered"]),
    has_sinks=st.booleans(),
    has_mask=st.booleans(),
)


@settings(max_examples=120)
@given(case=CASES)
def test_sdpa_agrees_with_eager(case: Case) -> None:
    _compare(SdpaBackend(), case, "cpu")


@pytest.mark.parametrize("backend", [EagerBackend(), SdpaBackend()], ids=["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [True, False])
def test_left_padding_has_output_zero_and_no_gradient(
    backend: AttentionBackend, dtype: torch.dtype, is_causal: bool
) -> None:
    """The other positions equal a row without padding, also in their gradients."""
    padding = 3
    (*inputs, _), rest = _call(Case(dtype=dtype, options=AttentionOptions(is_causal=is_causal)), "cpu")
    is_token = torch.arange(inputs[0].shape[1]) >= padding
    mask = (is_token.unsqueeze(-1) & is_token).unsqueeze(0)
    masked: dict[str, Any] = {**rest, "mask_BLS": mask}
    out = backend.attend(inputs[0], inputs[1], inputs[2], **masked)
    whole = [out, *torch.autograd.grad(out.sum(), inputs)]
    cut = [each[:, padding:].detach().requires_grad_() for each in inputs]
    expected = backend.attend(cut[0], cut[1], cut[2], **rest)
    for got, wanted in zip(whole, [expected, *torch.autograd.grad(expected.sum(), cut)], strict=True):
        assert not got[:, :padding].any()
        assert _error(got[:, padding:], wanted) < TOLERANCE[dtype]


# Each case is traced again, without code generation. torch has no backward of FlexAttention on the CPU.
@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=(4, 9), options=AttentionOptions(window=3, scale=0.4), documents="scattered", has_sinks=True),
        Case(heads=(3, 1), dtype=torch.float32, options=AttentionOptions(softcap=2.0), documents="packed"),
        Case(lengths=(4, 9), options=AttentionOptions(is_causal=False, window=3), has_mask=True),
    ],
    ids=["window, documents, sinks", "softcap, documents", "bidirectional, window, mask"],
)
def test_flex_forward_agrees_with_eager(case: Case) -> None:
    inputs, rest = _call(case, "cpu")
    with torch.no_grad():
        assert FlexBackend().rejection(request_of(*inputs[:3], **rest)) is None
        got, expected = (each.attend(*inputs[:3], **rest) for each in (FlexBackend(), EagerBackend()))
    assert got.dtype == case.dtype
    assert _error(got, expected) < TOLERANCE[case.dtype]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("documents", [None, "packed"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("is_causal", "has_mask"), [(True, False), (False, False), (False, True)])
def test_all_backends_agree_with_eager_on_an_accelerator(
    *,
    documents: str | None,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    is_causal: bool,
    has_mask: bool,
) -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    for backend in default_attention_backends():
        for lengths in ((300, 300), (130, 300)):
            case = Case(
                lengths=lengths,
                head_dim=64,
                dtype=torch.bfloat16,
                options=AttentionOptions(is_causal=is_causal, window=window, softcap=softcap),
                documents=documents,
                has_sinks=has_sinks,
                has_mask=has_mask,
            )
            _compare(backend, case, accelerator.type)
