import pytest
import torch
from torch import Tensor, nn

from d9d_dist import MeshConfig, parallelize_hsdp
from d9d_dist.testing import run_ranks
from d9d_loop.optimizers import LocalAdamW, ScheduleFreeAdamW, evaluation_weights


def _reference(start: Tensor, gradients: Tensor, lrs: list[float]) -> tuple[Tensor, Tensor]:
    """Compute algorithm 1 of arXiv:2405.15682 for betas (0.9, 0.8), eps 1e-3, wd 0.2; return the last y and x."""
    x, z, v, weight_sum, largest = start, start, torch.zeros_like(start), 0.0, 0.0
    for t, (g, lr) in enumerate(zip(gradients, lrs, strict=True), 1):
        y = 0.1 * z + 0.9 * x
        v = 0.8 * v + 0.2 * g**2
        z = z - lr * (g / ((v / (1 - 0.8**t)).sqrt() + 1e-3) + 0.2 * y)
        largest = max(largest, lr)
        weight_sum += largest**2
        c = largest**2 / weight_sum if weight_sum else 0.0
        x = (1 - c) * x + c * z
    return 0.1 * z + 0.9 * x, x


def _train(lrs: list[float]) -> tuple[nn.Linear, ScheduleFreeAdamW, tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(0)
    model = nn.Linear(3, 4, bias=False, dtype=torch.float64)
    gradients = torch.randn(len(lrs), 4, 3, generator=draws, dtype=torch.float64)
    expected = _reference(model.weight.detach().clone(), gradients, lrs)
    optimizer = ScheduleFreeAdamW(model.parameters(), betas=(0.9, 0.8), eps=1e-3, weight_decay=0.2)
    for gradient, lr in zip(gradients, lrs, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        model.weight.grad = gradient.clone()
        optimizer.step()
        assert torch.equal(model.weight.grad, gradient)
    return model, optimizer, expected


@pytest.mark.parametrize(
    "lrs", [[0.1] * 5, [0.0, 0.05, 0.1, 0.1, 0.05]], ids=["constant", "warm-up from 0, and a fall"]
)
def test_updates_equal_the_paper(lrs: list[float]) -> None:
    model, optimizer, (y, x) = _train(lrs)
    torch.testing.assert_close(model.weight.detach(), y, rtol=1e-12, atol=1e-12)
    before = model.weight.detach().clone()
    with evaluation_weights(model, optimizer):
        torch.testing.assert_close(model.weight.detach(), x, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(x, y)
    assert torch.equal(model.weight, before)


def test_training_weights_are_restored_after_an_error() -> None:
    model, optimizer, _ = _train([0.1])
    before = model.weight.detach().clone()
    with pytest.raises(KeyError), evaluation_weights(model, optimizer):
        raise KeyError
    assert torch.equal(model.weight, before)
    fresh = ScheduleFreeAdamW(model.parameters())
    with evaluation_weights(model, fresh):
        assert torch.equal(model.weight, before)


def test_a_step_on_evaluation_weights_is_refused() -> None:
    model, optimizer, _ = _train([0.1])
    with evaluation_weights(model, optimizer), pytest.raises(AssertionError, match="outside of evaluation_weights"):
        optimizer.step()


def test_other_optimizers_evaluate_their_training_weights() -> None:
    model = nn.Linear(2, 2)
    with evaluation_weights(model, LocalAdamW(model.parameters())):
        pass


def _outputs_around_an_evaluation() -> tuple[Tensor, Tensor, Tensor]:
    """Return losses of training, evaluation and training again, while FSDP keeps parameters gathered after forward."""
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        torch.manual_seed(0)
        model = nn.Linear(4, 4, bias=False)
        parallelize_hsdp(
            model, ctx.mesh_for("dense")["dp_cp_shard",], shard_axis="dp_cp_shard", reshard_after_forward=False
        )
        optimizer = ScheduleFreeAdamW(model.parameters(), lr=0.5)
        x = torch.eye(4)
        for _ in range(3):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            before = model(x).clone()
            with evaluation_weights(model, optimizer):
                inside = model(x).clone()
            return before, inside, model(x).clone()


def test_gathered_parameters_are_not_reused() -> None:
    for before, inside, after in run_ranks(_outputs_around_an_evaluation, world_size=2):
        assert torch.equal(before, after)
        assert not torch.allclose(before, inside)
