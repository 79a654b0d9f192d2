"""Machinery of the oracle: a grid of cells over factors that covers every compatible pair of values.

A cell compares one layout with one process; its name is a model, its options, and a layout.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from math import prod
from typing import Any, TypeAlias, final

from oracle_models import BATCH_SIZE

from d9d_dist import UserError
from d9d_dist.testing import Device, Difference, differences
from d9d_loop import ScheduleConfig
from d9d_loop.testing import Around, Experiment, parse_layout, trace_layout
from d9d_pipeline import build

RTOL = 1e-9
DEGREES = ("pp", "dp_replicate", "dp_shard", "cp_shard", "cp_replicate", "tp")

Values: TypeAlias = Mapping[str, str]
"""The value of each factor, or of some."""

Value: TypeAlias = tuple[str, str]
"""A factor and a value of it."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Models, layouts and options to compare.

    Attributes:
        factors: Values of each factor, the default first. Contains all of `DEGREES`, and the factors of `Cell.layout`.
        of_the_model: Factors that change the result of one process; no other factor may.
        max_ranks: Maximum number of ranks of a cell.
        experiment: Builds the experiment from all values and a number of layers.
        is_served: Returns True if values of some factors are compatible; ranks and schedules are checked separately.
        is_paired: Returns True if the grid must cover a pair of compatible values.
        alone: Models with a cell for each axis alone, besides the first model.
    """

    factors: Mapping[str, Sequence[str]]
    of_the_model: Sequence[str]
    max_ranks: int
    experiment: Callable[[Values, int], Experiment]
    is_served: Callable[[Values], bool]
    is_paired: Callable[[Value, Value], bool]
    alone: Sequence[str] = ()

    def cell(self, parts: Sequence[str]) -> "Cell":
        """Return the cell of a model and values, such as `["dense", "tp=2"]`.

        Raises:
            UserError: If a factor or a value is unknown.
        """
        model, *changed = parts
        values = {key: options[0] for key, options in self.factors.items()} | {"model": model}
        values |= {key: value for key, _, value in (part.partition("=") for part in changed)}
        for key, value in values.items():
            if key not in self.factors or value not in self.factors[key]:
                expected = self.factors.get(key, tuple(self.factors))
                raise UserError(f"cell {','.join(parts)!r}: got {key}={value}; expected one of {', '.join(expected)}.")
        return Cell(self, tuple(values.items()))

    def is_possible(self, values: Values) -> bool:
        """Return True if values of all or some factors are compatible."""
        num_ranks = prod(int(values.get(axis, "1")) for axis in DEGREES)
        return num_ranks <= self.max_ranks and _has_program(values) and self.is_served(values)

    def is_complete(self, values: Values) -> bool:
        """Return True if values of all factors form a cell: several ranks, and no option without effect."""
        uses_context = values["cp_shard"] != "1" or values["cp_replicate"] != "1"
        num_ranks = prod(int(values[axis]) for axis in DEGREES)
        return self.is_possible(values) and num_ranks > 1 and (uses_context or values["method"] == "all_gather")

    def pairs(self) -> Iterator[tuple[Value, Value]]:
        """Yield the pairs of values that cells must cover."""
        every_value = [(key, value) for key, values in self.factors.items() for value in values]
        for first, second in combinations(every_value, 2):
            if first[0] != second[0] and self.is_paired(first, second):
                yield first, second

    def covering(self, first: Sequence["Cell"]) -> tuple["Cell", ...]:
        """Return the given cells and more until all pairs are covered: each starts from a missing pair."""
        cells = list(first)
        covered = {pair for cell in cells for pair in combinations(cell.values, 2)}
        for pair in self.pairs():
            if pair not in covered and (values := self._complete(dict(pair), covered)) is not None:
                cells.append(Cell(self, tuple(values.items())))
                covered.update(combinations(cells[-1].values, 2))
        return tuple(cells)

    def _complete(self, values: dict[str, str], covered: Set[tuple[Value, Value]]) -> dict[str, str] | None:
        """Complete given values to a cell that covers the most new pairs; None if no cell has the given values."""
        if not self.is_possible(values):
            return None
        key = next((key for key in self.factors if key not in values), None)
        if key is None:
            return {key: values[key] for key in self.factors} if self.is_complete(values) else None
        order = list(self.factors)

        def num_new(chosen: Value) -> int:
            ordered = [sorted((each, chosen), key=lambda each: order.index(each[0])) for each in values.items()]
            return sum((first, second) not in covered and self.is_paired(first, second) for first, second in ordered)

        for value in sorted(self.factors[key], key=lambda value: num_new((key, value)), reverse=True):
            if (completed := self._complete({**values, key: value}, covered)) is not None:
                return completed
        return None


@final
@dataclass(frozen=True, slots=True)
class Cell:
    """One comparison of a layout with one process."""

    grid: Grid
    values: tuple[Value, ...]

    @property
    def name(self) -> str:
        """The model, then every factor that differs from its first value."""
        chosen, factors = dict(self.values), self.grid.factors
        changed = [f"{key}={value}" for key, value in chosen.items() if value != factors[key][0] and key != "model"]
        return ",".join((chosen["model"], *changed))

    @property
    def layout(self) -> str:
        """The part that determines the Trainer's mesh and batch."""
        chosen = dict(self.values)
        parts = [f"{axis}={chosen[axis]}" for axis in DEGREES if chosen[axis] != "1"]
        for name, default in (("schedule", "1f1b"), ("microbatch", "all")):
            parts += [] if chosen[name] == default else [f"{name}={chosen[name]}"]
        return ",".join(parts)

    @property
    def num_layers(self) -> int:
        """Number of layers of the model: at least one per stage."""
        layout = parse_layout(self.layout)
        return max(2, layout.mesh.pipeline_parallel * layout.schedule.build().stages_per_rank)

    @property
    def experiment(self) -> Experiment:
        """The experiment to train."""
        return self.grid.experiment(dict(self.values), self.num_layers)

    def differences(
        self, *, num_steps: int = 3, around: Around = nullcontext, device: Device = "cpu"
    ) -> Iterator[Difference]:
        """Run the cell, and return every difference from one process on the CPU.

        Args:
            num_steps: Number of optimizer steps. After the first, gradients are those of trained parameters.
            around: Context manager around the training on each rank.
            device: Device of the ranks.
        """
        experiment = replace(self.experiment, num_steps=num_steps)
        trace = trace_layout(experiment, parse_layout(self.layout), around=around, device=device)
        of_the_model = tuple((key, value) for key, value in self.values if key in ("model", *self.grid.of_the_model))
        yield from differences(trace, _one_process(self.grid, of_the_model, self.num_layers, num_steps), rtol=RTOL)


@cache
def _one_process(grid: Grid, of_the_model: tuple[Value, ...], num_layers: int, num_steps: int) -> dict[str, Any]:
    """Return the reference trace, shared by several cells."""
    values = {key: options[0] for key, options in grid.factors.items()} | dict(of_the_model)
    return trace_layout(replace(grid.experiment(values, num_layers), num_steps=num_steps), parse_layout(""))


def _has_program(values: Values) -> bool:
    """Return True if the schedule exists for the numbers of ranks and microbatches."""
    if values.get("pp") == "1":
        return values.get("schedule", "1f1b") == "1f1b"
    if not {"schedule", "pp", "microbatch"} <= values.keys():
        return True
    dp_size = int(values.get("dp_replicate", "1")) * int(values.get("dp_shard", "1"))
    num_microbatches = 1 if values["microbatch"] == "all" else BATCH_SIZE // dp_size
    return _exists(values["schedule"], int(values["pp"]), num_microbatches)


@cache
def _exists(schedule: str, num_ranks: int, num_microbatches: int) -> bool:
    kind = ScheduleConfig.model_validate({"kind": schedule})
    try:
        build(kind.build(), num_ranks=num_ranks, num_microbatches=num_microbatches)
    except UserError:
        return False
    return True
