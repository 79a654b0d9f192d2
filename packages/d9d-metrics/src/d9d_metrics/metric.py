"""The contract of a metric: what a person implements to measure something exactly on any number of ranks."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self, TypeAlias

import torch
from torch import Tensor

from d9d_dist import UserError
from d9d_metrics.accumulator import Accumulator

MetricValue: TypeAlias = Tensor | Mapping[str, "MetricValue"]
"""What a metric computes: a tensor of any shape, usually a scalar; or several by name, which may be nested."""


class Metric(ABC):
    """Something that is gathered locally, reduced over ranks, and turned into a value.

    A metric keeps its whole state in accumulators. It adds an `update` method of its own signature, which works on the
    device, touches only this rank, and never waits for it::

        class TokensPerSequence(Metric):
            def __init__(self) -> None:
                self.tokens, self.sequences = Accumulator("sum"), Accumulator("sum")

            def accumulators(self) -> dict[str, Accumulator]:
                return {"tokens": self.tokens, "sequences": self.sequences}

            def update(self, mask: Tensor) -> None:
                self.tokens.update(mask.sum())
                self.sequences.update(mask.shape[0])

            def compute(self) -> Tensor:
                return self.tokens.value / self.sequences.value

    `d9d_metrics.sync_metrics` reduces any number of metrics together and returns copies that hold the reduced state, so
    the local state is never counted twice.
    """

    @abstractmethod
    def accumulators(self) -> Mapping[str, Accumulator]:
        """Return the accumulators that this metric holds, the same objects in the same order on every call."""

    @abstractmethod
    def compute(self) -> MetricValue:
        """Turn the state into the value: float64 or int64 tensors on the metric's device, without waiting for it.

        Must give a value for the empty state as well, since a rank or a step may have seen nothing. The value must not
        change when the metric does. It must be NaN once `update` was given a NaN that counts: a comparison with NaN is
        false, so a metric that compares must count NaNs apart, or a broken model looks good.
        """

    def reset(self) -> None:
        """Forget everything taken in."""
        for accumulator in self.accumulators().values():
            accumulator.reset()

    def to(self, device: torch.device | str) -> Self:
        """Move the state to a device, in place; return the metric itself."""
        for accumulator in self.accumulators().values():
            accumulator.value = accumulator.value.to(device)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of this rank's state: the tensor of every accumulator by its name."""
        return {name: accumulator.value.clone() for name, accumulator in self.accumulators().items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Replace the state by one that `state_dict` of the same kind of metric returned.

        Raises:
            UserError: If a name or a shape differs; nothing is changed then.
        """
        accumulators = self.accumulators()
        got = {name: tuple(value.shape) for name, value in state_dict.items()}
        expected = {name: tuple(accumulator.value.shape) for name, accumulator in accumulators.items()}
        if got != expected:
            raise UserError(
                f"the state of a {type(self).__name__} has the tensors {got}; expected {expected}. "
                "Load the state into a metric of the kind and size that it was saved from."
            )
        for name, accumulator in accumulators.items():
            accumulator.value.copy_(state_dict[name])
