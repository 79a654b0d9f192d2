"""Check of the parameters before they are saved or exported: an update may write values that are not finite.

A bad step is recognized by its loss and gradients, so the results of the last update are seen only by the next step.
"""

from collections.abc import Callable

import torch
from torch import nn

from d9d_dist import DistributedContext, canonical_name, gather_json, local_tensor
from d9d_dist.errors import shorten
from d9d_loop.resilience.bad_steps import BadStepError


@torch.no_grad()
def check_finite(
    model: nn.Module,
    *,
    step: int,
    ctx: DistributedContext,
    dtype_of: Callable[[str], torch.dtype | None] = lambda _: None,
) -> None:
    """Check that all trained parameters are finite. Collective: an all-gather of names. One host-device sync.

    `dtype_of` returns the dtype of a parameter in an export by its name, `None` for its own; the values must be finite
    in this dtype too.

    Raises:
        BadStepError: On all ranks, if a parameter is not finite on any rank. The message names the parameters.
    """
    trained = {name: local_tensor(each) for name, each in model.named_parameters() if each.requires_grad}
    trained = {canonical_name(name): each for name, each in trained.items() if each.numel() > 0}
    bad: list[str] = []
    if trained:
        largest = torch._foreach_norm(list(trained.values()), torch.inf)
        limits = [torch.finfo(dtype_of(name) or each.dtype).max for name, each in trained.items()]
        values = torch.stack([each.float() for each in largest]).tolist()
        bad = [name for name, value, limit in zip(trained, values, limits, strict=True) if not value <= limit]
    names = sorted({name for each in gather_json(bad) for name in each})
    if names:
        raise BadStepError(
            f"after step {step}, {shorten(names)} are not finite, or beyond the range of their dtype, "
            "so the model is neither saved nor exported; earlier checkpoints are kept. The loss and the gradients were "
            "finite: lower optimizer.learning_rate, or raise optimizer.eps."
        )
