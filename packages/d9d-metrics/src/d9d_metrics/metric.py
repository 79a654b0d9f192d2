"""Base class of metrics: state in accumulators, which reduce exactly over any number of ranks."""

import copy
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, ClassVar, Self, TypeAlias

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

    Attributes:
        not_state: Names of other attributes that `update` may change in each call, such as a workspace or a memo.
    """

    not_state: ClassVar[Collection[str]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make `update` raise `UserError` if it twice changes an attribute that is no accumulator."""
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
    """Wrap `update`: values that both of the first two updates change are state; a flag or a setting changes once."""

    @wraps(update)
    def checked(self: Metric, *args: Any, **kwargs: Any) -> Any:
        if (first := vars(self).get("_changed_first")) == set():
            return update(self, *args, **kwargs)
        kept = copy.copy(vars(self))  # a new tensor must not get the id of an old one
        before = {name: _state_of(each) for name, each in kept.items() if name not in self.not_state}
        result = update(self, *args, **kwargs)
        changed = {
            name for name, each in before.items() if each is not None and _state_of(vars(self).get(name)) != each
        }
        if both := sorted(changed & (first or set())):
            raise UserError(
                f"update of {type(self).__name__} changed {', '.join(both)}; expected changes of accumulators only, "
                'because other state is not reduced, reset or saved. Use an Accumulator("sum"), or add the name to the '
                "class attribute not_state if it is no state."
            )
        vars(self)["_changed_first"] = changed if first is None else set()
        return result

    return checked


def _state_of(value: Any) -> Any:
    """Return a value that differs if an attribute counts: a number, tensor, NumPy array or collection of them."""
    match value:
        case Tensor():
            return id(value), None if value.is_inference() else value._version
        case Mapping():
            return [(name, _state_of(each)) for name, each in value.items()]
        case list() | tuple() | deque():
            return [_state_of(each) for each in value]
        case set():
            return len(value)
        case int() | float() if not isinstance(value, bool) and not math.isnan(value):
            return value
    return value.tobytes() if hasattr(value, "tobytes") else None
