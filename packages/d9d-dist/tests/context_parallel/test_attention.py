from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from d9d_dist.context_parallel.attention import sdpa_attention
from d9d_dist.testing import assert_rounds_like


def _inputs(length: int, key_length: int, sizes: tuple[int, int, int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    heads, kv_heads, head_dim = sizes
    shapes = [(2, length, heads, head_dim)] + 2 * [(2, key_length, kv_heads, head_dim)]
    return [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]


def _documents(key_length: int) -> Tensor:
    return torch.tensor([[3] * 4 + [1] * (key_length - 4), [0] + [5] * (key_length - 3) + [2] * 2])


def _naive(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """Compute attention query by query: a softmax over the keys that the query sees."""
    repeats, before = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
    rows = []
    for row in range(q.shape[0]):
        queries = []
        for i in range(q.shape[1]):
            seen = [
                j for j in range(before + i + 1) if documents is None or documents[row, j] == documents[row, before + i]
            ]
            heads = []
            for head in range(q.shape[2]):
                scores = k[row, seen, head // repeats] @ q[row, i, head] / q.shape[3] ** 0.5
                heads.append(scores.softmax(0) @ v[row, seen, head // repeats])
            queries.append(torch.stack(heads))
        rows.append(torch.stack(queries))
    return torch.stack(rows)


def _error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("sizes", [(4, 4, 8), (4, 2, 5), (3, 1, 16)])
@pytest.mark.parametrize(("length", "key_length"), [(9, 9), (4, 9), (1, 7), (8, 9)])
def test_sdpa_attention_equals_a_loop_over_queries(
    length: int, key_length: int, sizes: tuple[int, int, int], has_documents: bool
) -> None:
    documents = _documents(key_length) if has_documents else None
    inputs = _inputs(length, key_length, sizes, torch.float64)
    got, expected = sdpa_attention(*inputs, documents_BS=documents), _naive(*inputs, documents)
    assert got.shape == expected.shape
    assert _error(got, expected) < 1e-13
    weight = torch.randn(got.shape, dtype=torch.float64)
    gradients = torch.autograd.grad((got * weight).sum(), inputs)
    for a, b in zip(gradients, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        assert _error(a, b) < 1e-13


@pytest.mark.parametrize(("length", "has_documents"), [(9, False), (4, False), (4, True)])
def test_bfloat16_errors_are_as_small_as_those_of_naive_attention(length: int, has_documents: bool) -> None:
    documents = _documents(9) if has_documents else None
    inputs = _inputs(length, 9, (4, 2, 8), torch.bfloat16)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    got, peer = sdpa_attention(*inputs, documents_BS=documents), _naive(*inputs, documents)
    exact = _naive(*doubles, documents)
    assert got.dtype == torch.bfloat16
    ours, theirs = (torch.autograd.grad(each.sum(), inputs) for each in (got, peer))
    assert {each.dtype for each in ours} == {torch.bfloat16}
    assert_rounds_like([got, *ours], [exact, *torch.autograd.grad(exact.sum(), doubles)], peer=[peer, *theirs])


class _Operators(TorchDispatchMode):
    """Records the names of the operators that run, and the size of their largest output."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204  (torch's signature)
        out = func(*args, **(kwargs or {}))
        self.names.append(func.name())
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def test_full_sequences_run_the_same_operators_as_torch() -> None:
    q, k, v = _inputs(9, 9, (4, 2, 8), torch.float32)
    with _Operators() as ours:
        sdpa_attention(q, k, v)
    with _Operators() as theirs:
        args = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        F.scaled_dot_product_attention(*args, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert ours.names == theirs.names


def test_prefix_keys_are_supported_without_a_flash_kernel() -> None:
    inputs = _inputs(4, 9, (4, 2, 8), torch.float64)
    with patch("d9d_dist.context_parallel.attention.has_flash_kernel", return_value=False):
        assert _error(sdpa_attention(*inputs), _naive(*inputs, None)) < 1e-13


def test_selective_checkpointing_does_not_change_gradients_with_prefix_keys() -> None:
    inputs = _inputs(4, 9, (4, 2, 8), torch.float64)
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    out = checkpoint(sdpa_attention, *inputs, use_reentrant=False, context_fn=contexts)
    for a, b in zip(
        torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(sdpa_attention(*inputs).sum(), inputs), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize(("batch", "length", "key_length"), [(0, 3, 3), (2, 0, 0), (2, 0, 3)])
def test_empty_rows_have_zero_gradients(batch: int, length: int, key_length: int, has_documents: bool) -> None:
    shapes = [(batch, length, 4, 8)] + 2 * [(batch, key_length, 2, 8)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    documents = torch.zeros(batch, key_length, dtype=torch.int64) if has_documents else None
    out = sdpa_attention(*inputs, documents_BS=documents)
    assert out.shape == shapes[0]
    assert not any(gradient.any() for gradient in torch.autograd.grad(out.sum(), inputs))


def test_a_prefix_needs_no_mask() -> None:
    inputs = _inputs(128, 1024, (1, 1, 8), torch.float32)
    with _Operators() as operators:
        sdpa_attention(*inputs).sum().backward()
    assert operators.largest <= 2 * 1024 * 8  # the size of the keys
