"""A linear layer that decoders are made of: without bias, initialised from a normal distribution.

It stays a `torch.nn.Linear`, so that whatever targets those (LoRA, quantisation, tensor parallelism) finds it.
"""

from typing import final

from torch import nn


@final
class Linear(nn.Linear):
    """`x @ weight.T` with `weight ~ Normal(0, init_std)` instead of torch's Kaiming-uniform start.

    Args:
        in_features: Size of the last dim of the input.
        out_features: Size of the last dim of the output.
        init_std: Standard deviation of the initial weight.
    """

    def __init__(self, in_features: int, out_features: int, *, init_std: float = 0.02) -> None:
        self.init_std = init_std  # before the parent's __init__, which calls reset_parameters
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weight from `Normal(0, init_std)`."""
        nn.init.normal_(self.weight, std=self.init_std)
