"""Average of the weights of any optimizer, beside the weights that are trained."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from d9d_dist import UserError, canonical_name, local_tensor
from d9d_loop.optimizers.averaging import Averaging
from d9d_loop.optimizers.ema import Ema
from d9d_loop.optimizers.joined import parts_of


@final
class WeightAverage:
    """Exponential moving average of a model's trainable parameters, in at least float32, sharded as they are.

    Implements `Averaging`. Buffers and frozen parameters have no average. No method has collectives.

    Args:
        model: This rank's part of the model, with its initial weights.
    """

    def __init__(self, model: nn.Module, config: Ema) -> None:
        self._config = config
        self._parameters = {canonical_name(name): each for name, each in model.named_parameters() if each.requires_grad}
        device = next((local_tensor(each).device for each in self._parameters.values()), None)
        self._num_steps = torch.zeros((), dtype=torch.int64, device=device)  # a skipped step is known on the device
        self._averages = {name: self._wide(each) for name, each in self._parameters.items()}

    @torch.no_grad()
    def update(self, taken: Tensor) -> None:
        """Add the weights after a step, if `taken`, a 0-dim bool tensor on the device; else nothing changes."""
        taken = taken.to(self._num_steps.device)
        self._num_steps += taken
        number = self._num_steps.double()
        decay = torch.full_like(number, self._config.decay)
        if self._config.warmup:
            decay = torch.minimum(decay, number / (9 + number))
        weight = torch.where(taken, torch.where(number == 1, 1.0, 1.0 - decay), 0.0)
        for name, parameter in self._parameters.items():
            average = local_tensor(self._averages[name])
            average.lerp_(local_tensor(parameter.detach()).to(average.dtype), weight.to(average.dtype))

    @contextmanager
    @torch.no_grad()
    def evaluation_weights(self) -> Generator[None]:
        """Swap in the averages for the body of the `with` block; see `Averaging`. The host waits for the device."""
        if not self._num_steps:
            yield
            return
        kept = {name: local_tensor(each.detach()).clone() for name, each in self._parameters.items()}
        self._set({name: local_tensor(each) for name, each in self._averages.items()})
        try:
            yield
        finally:
            self._set(kept)

    @torch.no_grad()
    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            local_tensor(parameter).copy_(values[name])

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by the names of their parameters."""
        return dict(self._averages)

    def state_dict(self) -> int:
        """Return the number of averaged steps, which waits for the device."""
        return int(self._num_steps)

    @torch.no_grad()
    def load_state_dict(self, num_steps: int, *, loaded: set[str]) -> None:
        """Set the number of averaged steps; averages that were not `loaded` start at the current weights."""
        self._num_steps.fill_(num_steps)
        for name, average in self._averages.items():
            if name not in loaded:
                local_tensor(average).copy_(local_tensor(self._parameters[name].detach()))

    @staticmethod
    def _wide(parameter: nn.Parameter) -> Tensor:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        return parameter.detach().to(dtype, copy=True)


def average_of(model: nn.Module, optimizer: Optimizer, config: Ema | None) -> WeightAverage | None:
    """Return the average of a model's weights; `None` without a configuration.

    Raises `UserError` if the optimizer averages the weights itself.
    """
    if config is None:
        return None
    if own := [type(each).__name__ for each in parts_of(optimizer) if isinstance(each, Averaging)]:
        raise UserError(
            f"got average = Ema(...) with {own[0]}, which averages the weights itself; expected one average. Remove "
            "the average, or choose another optimizer."
        )
    return WeightAverage(model, config)
