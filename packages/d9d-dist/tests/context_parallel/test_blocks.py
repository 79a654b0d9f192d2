from dataclasses import replace

import pytest
import torch
from torch import Tensor

from d9d_dist.context_parallel.blocks import (
    AttentionBlock,
    BlockKernel,
    CpuFlashKernel,
    FlashKernel,
    MathKernel,
    MergedBlocks,
    default_kernel,
)


def _attend(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp, computed by differentiable operators."""
    repeats = block.q.shape[1] // block.k.shape[1]
    k, v = block.k.repeat_interleave(repeats, 1), block.v.repeat_interleave(repeats, 1)
    scores = torch.einsum("bhlk,bhsk->bhls", block.q, k) / block.q.shape[-1] ** 0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    seen = seen.tril() if block.causal else seen
    if block.query_documents is not None and block.key_documents is not None:
        seen = seen & (block.query_documents[:, None, :, None] == block.key_documents[:, None, None, :])
    scores = torch.where(seen, scores, -torch.inf)
    return torch.einsum("bhls,bhsk->bhlk", scores.softmax(-1), v), scores.logsumexp(-1)


def _block(kv_heads: int, *, causal: bool, keys: int = 6, head_dim: int = 5) -> AttentionBlock:
    generator = torch.Generator().manual_seed(keys)
    shapes = [(2, 4, 6, head_dim), (2, kv_heads, keys, head_dim), (2, kv_heads, keys, head_dim)]
    q, k, v = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return AttentionBlock(q, k, v, causal)


def _with_documents(block: AttentionBlock) -> AttentionBlock:
    queries = torch.tensor([[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 3]])
    return replace(block, query_documents=queries, key_documents=queries[:, : block.k.shape[2]])


CASES = [(CpuFlashKernel(), False), (MathKernel(), False), (MathKernel(), True)]


@pytest.mark.parametrize("keys", [0, 3])
def test_blocks_without_queries_have_empty_outputs_and_zero_gradients(keys: int) -> None:
    whole = _block(2, causal=False, keys=keys)
    block = replace(whole, q=whole.q[:, :, :0])
    kernel = default_kernel(block.q, has_documents=False)
    out, lse = kernel.forward(block)
    assert (out.shape, lse.shape) == (block.q.shape, block.q.shape[:3])
    gradients = kernel.backward(block, grad_BHLK=out, out_BHLK=out, lse_BHL=lse)
    assert [x.shape for x in gradients] == [x.shape for x in (block.q, block.k, block.v)]
    assert not any(x.any() for x in gradients)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("kernel", "has_documents"), CASES, ids=["flash", "math", "documents"])
def test_merged_outputs_and_gradients_of_blocks_equal_one_softmax(
    kernel: BlockKernel, has_documents: bool, kv_heads: int
) -> None:
    """Two merged blocks equal one softmax, also in their gradients. Each query of the first block sees a key."""
    own, before = _block(kv_heads, causal=True), _block(kv_heads, causal=False, keys=3)
    before = replace(before, q=own.q)
    if has_documents:
        own, before = _with_documents(own), _with_documents(before)
    merged = MergedBlocks(*kernel.forward(own))
    merged.add(*kernel.forward(before), queries=slice(None))

    leaves = [x.clone().requires_grad_() for x in (own.q, own.k, own.v, before.k, before.v)]
    q, k, v, k_before, v_before = leaves
    outs, lses = zip(
        _attend(replace(own, q=q, k=k, v=v)), _attend(replace(before, q=q, k=k_before, v=v_before)), strict=True
    )
    lse = torch.logaddexp(*lses)
    shares = [torch.exp(each - lse).unsqueeze(-1) for each in lses]
    out = sum(torch.where(share > 0, share * each, 0.0) for share, each in zip(shares, outs, strict=True))
    assert isinstance(out, Tensor)
    torch.testing.assert_close(merged.out_BHLK, out, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(merged.lse_BHL, lse, rtol=1e-12, atol=1e-13)

    if has_documents:
        return  # autograd of an empty softmax is NaN; gradients with documents are tested with whole rows
    grad = torch.randn(out.shape, dtype=torch.float64)
    expected = torch.autograd.grad(out, leaves, grad)
    for block, keys in ((own, expected[1:3]), (before, expected[3:5])):
        _, grad_k, grad_v = kernel.backward(block, grad_BHLK=grad, out_BHLK=merged.out_BHLK, lse_BHL=merged.lse_BHL)
        torch.testing.assert_close(grad_k, keys[0], rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(grad_v, keys[1], rtol=1e-11, atol=1e-13)
    grad_q = sum(
        kernel.backward(block, grad_BHLK=grad, out_BHLK=merged.out_BHLK, lse_BHL=merged.lse_BHL)[0]
        for block in (own, before)
    )
    torch.testing.assert_close(grad_q, expected[0], rtol=1e-11, atol=1e-13)


def test_a_query_without_keys_contributes_nothing() -> None:
    block = _block(2, causal=False)
    lonely = replace(block, query_documents=torch.tensor([[7] + 5 * [1]] * 2), key_documents=torch.ones(2, 6))
    out, lse = MathKernel().forward(lonely)
    assert torch.all(out[:, :, 0] == 0)
    assert torch.all(lse[:, :, 0] == -torch.inf)
    first_out, first_lse = MathKernel().forward(block)
    merged = MergedBlocks(first_out, first_lse)
    merged.add(out, lse, queries=slice(None))
    assert torch.equal(merged.out_BHLK[:, :, 0], first_out[:, :, 0])
    gradients = MathKernel().backward(
        lonely, grad_BHLK=torch.ones_like(out), out_BHLK=merged.out_BHLK, lse_BHL=merged.lse_BHL
    )
    assert torch.all(gradients[0][:, :, 0] == 0)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_half_precision_is_merged_in_float32() -> None:
    block = _block(2, causal=True)
    half = AttentionBlock(*(x.bfloat16() for x in (block.q, block.k, block.v)), causal=True)
    for kernel in (MathKernel(), CpuFlashKernel()):
        out, lse = kernel.forward(half)
        assert out.dtype == torch.bfloat16
        assert lse.dtype == torch.float32
        assert MergedBlocks(out, lse).out_BHLK.dtype == torch.float32


def test_the_default_kernel_depends_on_documents_device_dtype_and_head_dim() -> None:
    q = torch.zeros(1, 1, 2, 16)
    assert isinstance(default_kernel(q, has_documents=False), CpuFlashKernel)
    assert isinstance(default_kernel(q, has_documents=True), MathKernel)
    assert isinstance(default_kernel(q.to("meta"), has_documents=False), MathKernel)
    assert isinstance(default_kernel(q.to("meta", torch.bfloat16), has_documents=False), FlashKernel)
    assert isinstance(default_kernel(q[..., :7].to("meta", torch.bfloat16), has_documents=False), MathKernel)
