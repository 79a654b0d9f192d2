"""Linear layer: a subclass of `torch.nn.Linear`, which LoRA, quantization and tensor parallelism recognize."""

from typing import final

from torch import nn


@final
class Linear(nn.Linear):
    """`torch.nn.Linear` initialized from `Normal(0, init_std)` instead of Kaiming uniform, by default without bias."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, init_std: float = 0.02) -> None:
        self.init_std = init_std  # before the parent's __init__, which calls reset_parameters
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the weight from `Normal(0, init_std)`, and set the bias to 0."""
        nn.init.normal_(self.weight, std=self.init_std)
        if (bias := self._parameters.get("bias")) is not None:
            nn.init.zeros_(bias)
