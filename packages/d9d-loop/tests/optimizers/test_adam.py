from collections.abc import Callable

import pytest
import torch
from torch.optim import Optimizer

from d9d_loop.optimizers import LocalAdam, LocalAdamW, LocalSGD


def _steps(make: Callable[..., Optimizer], **settings: object) -> torch.Tensor:
    draws = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=draws, dtype=torch.float64).requires_grad_() for shape in ((3, 4), (5,))]
    optimizer = make(weights, lr=0.1, weight_decay=0.2, **settings)
    for _ in range(4):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=draws, dtype=torch.float64)
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in weights])


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (LocalAdam, torch.optim.Adam, {"betas": (0.8, 0.9)}),
        (LocalAdamW, torch.optim.AdamW, {"betas": (0.8, 0.9)}),
        (LocalAdamW, torch.optim.AdamW, {"fused": True}),
        (LocalSGD, torch.optim.SGD, {}),
        (LocalSGD, torch.optim.SGD, {"momentum": 0.9}),
        (LocalSGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    ],
)
def test_updates_equal_torch(ours: type[Optimizer], theirs: type[Optimizer], settings: dict[str, object]) -> None:
    torch.testing.assert_close(_steps(ours, **settings), _steps(theirs, **settings), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("settings", [{}, {"maximize": True}, {"amsgrad": True}])
def test_updates_of_joined_groups_equal_torch_bitwise(settings: dict[str, object]) -> None:
    """Groups with and without decay share kernels; one has another learning rate, and one parameter no gradient."""

    def trained(make: Callable[..., Optimizer]) -> torch.Tensor:
        draws = torch.Generator().manual_seed(0)
        weights = [torch.randn(7, generator=draws).requires_grad_() for _ in range(5)]
        groups = [
            {"params": weights[:2]},
            {"params": weights[2:3], "weight_decay": 0.0},
            {"params": weights[3:4], "lr": 0.01},
            {"params": weights[4:]},
        ]
        optimizer = make(groups, lr=0.1, weight_decay=0.2, foreach=True, **settings)
        for _ in range(4):
            for weight in weights[:4]:
                weight.grad = torch.randn(weight.shape, generator=draws)
            optimizer.step()
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1, 1, 1]
        return torch.cat([weight.detach() for weight in weights])

    assert torch.equal(trained(LocalAdamW), trained(torch.optim.AdamW))


@pytest.mark.parametrize("closure", [None, lambda: 0.0])
@pytest.mark.parametrize(("ours", "theirs"), [(LocalAdam, torch.optim.Adam), (LocalAdamW, torch.optim.AdamW)])
def test_step_hooks_run_once_whatever_optimizers_the_process_has(
    ours: Callable[..., torch.optim.Adam], theirs: Callable[..., Optimizer], closure: Callable[[], float] | None
) -> None:
    """Torch wraps the `step` of each class whose optimizers a process constructs."""
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)
    torch.optim.Adam([weight])
    theirs([weight])
    calls: list[Optimizer] = []
    optimizer = ours([weight])
    optimizer.register_step_post_hook(lambda each, *_: calls.append(each))
    optimizer.step(closure)
    assert calls == [optimizer]
