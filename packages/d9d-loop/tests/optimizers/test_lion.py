import torch

from d9d_loop.optimizers import Lion


def test_follows_the_paper() -> None:
    """Algorithm 2 of arXiv:2302.06675, one element at a time."""
    draws = torch.Generator().manual_seed(0)
    start = torch.randn(7, generator=draws, dtype=torch.float64)
    gradients = torch.randn(5, 7, generator=draws, dtype=torch.float64)
    weight = start.clone().requires_grad_()
    optimizer = Lion([weight], lr=0.1, betas=(0.7, 0.8), weight_decay=0.3)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    for found, w, column in zip(weight.tolist(), start.tolist(), gradients.T.tolist(), strict=True):
        m = 0.0
        for g in column:
            c = 0.7 * m + 0.3 * g
            w = w - 0.1 * ((1.0 if c > 0 else -1.0) + 0.3 * w)  # noqa: PLW2901
            m = 0.8 * m + 0.2 * g
        assert abs(found - w) < 1e-13
