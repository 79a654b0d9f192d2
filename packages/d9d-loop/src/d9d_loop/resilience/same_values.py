"""Values of a step that must be equal on all ranks: learning rates, and batches within a data-parallel coordinate.

Replicas that are updated with different rates, or by gradients of different batches, would diverge silently. The values
are compared within the all-reduce that decides on the step, so the comparison needs no collective of its own.
"""

from dataclasses import dataclass
from typing import final

import torch

_ROUNDING = 1e-9


@final
@dataclass(frozen=True, slots=True)
class Same:
    """Values of a step that must be equal on all ranks. They are compared by their maximum and minimum.

    Attributes:
        rates: How the caller has set the learning rates, and a number that depends on the rates.
        digests: Digest of the batches of each data-parallel coordinate, and its negative, float64 [2 * coordinates] on
            an accelerator; -inf for coordinates of other ranks. None if the batches are compared elsewhere.
    """

    rates: tuple[float, float] = (0.0, 0.0)
    digests: torch.Tensor | None = None

    def on_host(self) -> list[float]:
        """Return the numbers whose maximum over all ranks `rates_differ` and `differs` read."""
        return [*self.rates, *(-each for each in self.rates)]

    def rates_differ(self, largest: list[float]) -> bool:
        """Return True if learning rates differ between ranks, by more than hosts may round a schedule differently."""
        kind, rate, negative_kind, negative_rate = largest
        return kind + negative_kind > 0 or rate + negative_rate > _ROUNDING * abs(rate)

    def on_device(self, device: torch.device) -> torch.Tensor:
        """Return the same on a device, without host-device synchronization."""
        pinned = torch.tensor(self.on_host(), dtype=torch.float64, pin_memory=device.type != "cpu")
        rates = pinned.to(device, non_blocking=True)
        return rates if self.digests is None else torch.cat([rates, self.digests])

    def differs(self, largest: torch.Tensor) -> torch.Tensor:
        """Return two flags, bool [2]: learning rates, and batches, differ between ranks."""
        rates = largest[:2] + largest[2:4] > _ROUNDING * largest[:2].abs()
        digests, negatives = largest[4:].chunk(2) if len(largest) > 4 else (largest[:0], largest[:0])
        return torch.stack([rates.any(), (digests + negatives > 0).any()])


NOTHING = Same()
"""No values to compare."""


def describe_difference(step: int, *, rates: bool) -> str:
    """Return the message of the `UserError` about learning rates, or else batches."""
    if rates:
        return (
            f"step {step}: the learning rates of step(learning_rate) or set_learning_rates(), or `only` of step(), "
            "differ between ranks, so the update was skipped; expected equal ones, also from a scheduler. Compute them "
            "from values that all ranks share, such as Engine.num_steps or StepResult.loss."
        )
    return (
        f"step {step}: the batches of a data-parallel coordinate differ between its ranks, so the update was skipped; "
        "expected equal ones on all pipeline-, context- and tensor-parallel ranks. Choose a rank's data by "
        "ctx.coordinate('batch', 'dp'), and sample once for each coordinate."
    )
