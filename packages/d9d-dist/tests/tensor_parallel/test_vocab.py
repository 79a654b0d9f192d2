import pytest
import torch
from torch.nn import functional as F

from d9d_dist import MeshConfig, UserError
from d9d_dist.tensor_parallel.vocab import VocabParallelCrossEntropy, embed_vocab_shard
from d9d_dist.testing import Device, run_ranks

NUM_TOKENS, VOCAB, SIZE = 13, 12, 5


def _logits() -> torch.Tensor:
    """Return logits, some so large that an exponential without subtraction of the maximum would overflow."""
    draws = torch.Generator().manual_seed(0)
    return torch.randn(NUM_TOKENS, VOCAB, dtype=torch.float64, generator=draws) * 300


def _labels() -> torch.Tensor:
    labels = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    labels[::4] = -100
    return labels


def _weights() -> torch.Tensor:
    return torch.arange(1.0, NUM_TOKENS + 1, dtype=torch.float64)


def _losses_on_ranks(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        mesh = ctx.mesh_for("dense")["tp"]
        logits = _logits().to(dtype).chunk(mesh.size(), dim=-1)[ctx.rank].to(ctx.device).requires_grad_()
        losses = VocabParallelCrossEntropy(mesh)(logits, _labels().to(ctx.device))
        (losses * _weights().to(losses)).sum().backward()
        assert logits.grad is not None
        return losses.detach().cpu(), logits.grad.cpu()


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.world_size(4))])
def test_losses_and_gradients_equal_torch(world_size: int, device: Device) -> None:
    logits = _logits().requires_grad_()
    expected = F.cross_entropy(logits, _labels(), reduction="none", ignore_index=-100)
    (expected * _weights()).sum().backward()
    assert logits.grad is not None
    ranks = run_ranks(_losses_on_ranks, torch.float64, world_size=world_size, device=device)
    for losses, _ in ranks:
        torch.testing.assert_close(losses, expected, rtol=1e-13, atol=1e-13)
    gradient = torch.cat([gradient for _, gradient in ranks], dim=-1)
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-13, atol=1e-13)


def test_losses_of_low_precision_logits_keep_the_dtype(device: Device) -> None:
    expected = F.cross_entropy(_logits(), _labels(), reduction="none")
    for losses, gradient in run_ranks(_losses_on_ranks, torch.bfloat16, device=device):
        assert losses.dtype == gradient.dtype == torch.bfloat16
        # The logits and the loss, a difference of two numbers of their size, are rounded to bfloat16.
        rounding = torch.finfo(torch.bfloat16).eps * _logits().abs().max().item()
        torch.testing.assert_close(losses.double(), expected, rtol=0, atol=2 * rounding)


def _embed_on_ranks() -> tuple[torch.Tensor, torch.Tensor]:
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        mesh = ctx.mesh_for("dense")["tp"]
        weight = _table().chunk(mesh.size())[ctx.rank].to(ctx.device).requires_grad_()
        rows = embed_vocab_shard(_ids().to(ctx.device), len(weight), mesh, lambda ids: F.embedding(ids, weight))
        (rows * _upstream().to(ctx.device)).sum().backward()
        assert weight.grad is not None
        return rows.detach().cpu(), weight.grad.cpu()


def _table() -> torch.Tensor:
    return torch.randn(VOCAB, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def _ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (3, 7), generator=torch.Generator().manual_seed(3))


def _upstream() -> torch.Tensor:
    return torch.randn(3, 7, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("world_size", [1, *(pytest.param(n, marks=pytest.mark.world_size(n)) for n in (3, 4))])
def test_embeddings_are_summed_over_ranks(world_size: int, device: Device) -> None:
    table = _table().requires_grad_()
    expected = F.embedding(_ids(), table)
    (expected * _upstream()).sum().backward()
    ranks = run_ranks(_embed_on_ranks, world_size=world_size, device=device)
    torch.testing.assert_close(sum(rows for rows, _ in ranks), expected.detach(), rtol=0, atol=0)
    assert table.grad is not None
    torch.testing.assert_close(torch.cat([gradient for _, gradient in ranks]), table.grad, rtol=1e-14, atol=0)


def _out_of_range() -> list[str]:
    messages = []
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        mesh = ctx.mesh_for("dense")["tp"]
        for function, wrong in ((VocabParallelCrossEntropy(mesh), VOCAB), (VocabParallelCrossEntropy(mesh), -1)):
            with pytest.raises(UserError) as caught:
                function(torch.zeros(2, VOCAB // mesh.size()), torch.tensor([wrong, -100]))
            messages.append(str(caught.value))
        with pytest.raises(UserError) as caught:
            embed_vocab_shard(torch.tensor([0, VOCAB]), VOCAB // mesh.size(), mesh, torch.nn.Identity())
        messages.append(str(caught.value))
    return messages


def test_ids_outside_the_vocabulary_are_refused() -> None:
    """Without the check they would count as zero on every rank."""
    labels = "expected labels within 0 ... 11 or -100."
    expected = [
        f"got labels from 12 to 12; {labels}",
        f"got labels from -1 to -1; {labels}",
        "got token ids from 12 to 12; expected token ids within 0 ... 11.",
    ]
    assert run_ranks(_out_of_range) == [expected] * 2
