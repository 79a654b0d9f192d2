"""Scalars of one AdamW step, which the optimizer passes to its Triton kernel."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdamWNumbers:
    """Scalars of one AdamW step: m and v average the gradients and their squares; `step` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    @property
    def step_size(self) -> float:
        """Learning rate divided by the bias correction of m, 1 - beta1^step."""
        return self.lr / (1.0 - self.beta1**self.step)

    @property
    def square_correction(self) -> float:
        """Square root of the bias correction of v, sqrt(1 - beta2^step)."""
        return (1.0 - self.beta2**self.step) ** 0.5
