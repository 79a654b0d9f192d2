"""Base class of metrics: state in accumulators, which reduce exactly over any number of ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from d9d_dist import UserError
from d9d_metrics.accumulator import Accumulator

MetricValue: TypeAlias = Tensor | Mapping[str, "MetricValue"]
"""Value of a metric: a tensor of any shape, usually a scalar, or a mapping of names to such values."""


class Metric(ABC):
    """Quantity that is accumulated on each rank, reduced over ranks, and turned into a value.

    A metric keeps its whole state in accumulators. A subclass adds an `update` method of any signature, which changes
    only this rank's state, on the device and without host-device synchronization::

        class TokensPerSequence(Metric):
            def __init__(self) -> None:
                self.tokens, self.sequences = Accumulator("sum"), Accumulator("sum")

            def update(self, mask: Tensor) -> None:
                self.tokens.update(mask.sum())
                self.sequences.update(mask.shape[0])

            def compute(self) -> Tensor:
                return self.tokens.value / self.sequences.value

    `d9d_metrics.sync_metrics` reduces any number of metrics together and returns copies with the reduced state.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make `update` raise `UserError` if it twice changes an attribute that is a number or a list."""
        super().__init_subclass__(**kwargs)
        if callable(update := vars(cls).get("update")):
            setattr(cls, "update", _checked(update))  # noqa: B010 - metrics have no `update` of one signature

    def accumulators(self) -> Mapping[str, Accumulator]:
        """Return the accumulators of this metric by name: the same objects in the same order on every call.

        By default, these are the attributes that are accumulators, under their names without leading underscores.
        Override the method if accumulators are in containers or in other metrics. Raises `UserError` if there are none,
        or if two have the same name.
        """
        found = {name.lstrip("_"): each for name, each in vars(self).items() if isinstance(each, Accumulator)}
        if len(found) < sum(isinstance(each, Accumulator) for each in vars(self).values()):
            raise UserError(f"attributes of {type(self).__name__} differ only in leading underscores; rename one.")
        if not found:
            raise UserError(
                f"{type(self).__name__} has no accumulators as attributes; expected at least one, because other state "
                "is neither reduced nor reset. Override accumulators() if they are in containers or in other metrics."
            )
        return found

    @abstractmethod
    def compute(self) -> MetricValue:
        """Return the value of the state, without host-device synchronization.

        The value consists of float64 or int64 tensors on the metric's device, which later updates must not change. The
        value must be defined for the empty state, because a rank or a step may have no data. If `update` counted a NaN,
        the value must be NaN. Comparisons with NaN are false, so a metric that compares must count NaNs separately.
        """

    def reset(self) -> None:
        """Reset all accumulators."""
        for accumulator in self.accumulators().values():
            accumulator.reset()

    def to(self, device: torch.device | str) -> Self:
        """Move the state to a device in place, and return the metric itself."""
        for accumulator in self.accumulators().values():
            accumulator.value = accumulator.value.to(device)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of this rank's state: the tensor of each accumulator by name."""
        return {name: accumulator.value.clone() for name, accumulator in self.accumulators().items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load a state that `state_dict` of a metric of the same type returned.

        Raises:
            UserError: If a name or shape differs; the metric is unchanged then.
        """
        accumulators = self.accumulators()
        got = {name: tuple(value.shape) for name, value in state_dict.items()}
        expected = {name: tuple(accumulator.value.shape) for name, accumulator in accumulators.items()}
        if got != expected:
            raise UserError(
                f"got the tensors {got} as the state of a {type(self).__name__}; expected {expected}. "
                "Load the state into a metric of the type and size that it was saved from."
            )
        for name, accumulator in accumulators.items():
            accumulator.value.copy_(state_dict[name])


def _checked(update: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `update`: numbers that both of the first two updates change are state; a flag or a setting changes once."""

    @wraps(update)
    def checked(self: Metric, *args: Any, **kwargs: Any) -> Any:
        if (first := vars(self).get("_changed_first")) == set():
            return update(self, *args, **kwargs)
        before = _plain_state(self)
        result = update(self, *args, **kwargs)
        now = _plain_state(self)
        changed = {name for name, each in before.items() if now.get(name) is not each and now.get(name) != each}
        if both := sorted(changed & (first or set())):
            raise UserError(
                f"update of {type(self).__name__} changed {', '.join(both)}; expected changes of accumulators only, "
                'because other state is not reduced, reset or saved. Use an Accumulator("sum").'
            )
        vars(self)["_changed_first"] = changed if first is None else set()
        return result

    return checked


def _plain_state(metric: Metric) -> dict[str, object]:
    """Return the numbers, without flags, and the lengths of lists among the attributes."""
    values = {name: len(value) if isinstance(value, list) else value for name, value in vars(metric).items()}
    return {name: each for name, each in values.items() if isinstance(each, int | float) and not isinstance(each, bool)}
