"""The oracle's grid: which models are compared with one process in which layouts; each cell can be run by its name.

    python integration_tests/oracle.py --list
    python integration_tests/oracle.py "dense,dp_shard=2,tp=2,microbatch=1"

A cell's name is a model, options of it, and a layout. Any name of that form can be run, also one that is not in the
grid. The grid covers every pair of values of its factors that can stand together on at most eight ranks.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

from d9d_dist import UserError
from d9d_dist.testing import Device, Difference, differences
from d9d_loop import ScheduleConfig
from d9d_loop.testing import Around, Experiment, parse_layout, trace_layout
from d9d_pipeline import build

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))  # the main job is one of the models
from oracle_models import BATCH_SIZE, MaskedNextToken, PackedNextToken, PlainProvider, decoder, samples

RTOL = 1e-9

Values: TypeAlias = Mapping[str, str]
"""The value of each factor."""

FACTORS: Mapping[str, Sequence[str]] = {
    "model": ("dense", "tied", "moe", "plain"),
    "pp": ("1", "2", "4"),
    "schedule": ("1f1b", "gpipe", "looped_bfs", "interleaved_1f1b", "zb1p", "zbv", "dualpipev"),
    "dp_replicate": ("1", "2", "4"),
    "dp_shard": ("1", "2", "4"),
    "cp_shard": ("1", "2", "4"),
    "cp_replicate": ("1", "2"),
    "tp": ("1", "2", "4"),
    "method": ("all_gather", "all_to_all", "ring"),
    "microbatch": ("all", "1"),
    "checkpointing": ("none", "full"),
    "mask": ("full", "ragged"),
}
DEGREES = ("pp", "dp_replicate", "dp_shard", "cp_shard", "cp_replicate", "tp")
NUM_HEADS = {"dense": 8, "tied": 8, "moe": 8, "plain": 4}


@dataclass(frozen=True, slots=True)
class Cell:
    """One comparison."""

    values: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """The model, then every factor that has not its first value."""
        chosen = dict(self.values)
        changed = [f"{key}={value}" for key, value in chosen.items() if value != FACTORS[key][0] and key != "model"]
        return ",".join((chosen["model"], *changed))

    @property
    def layout(self) -> str:
        """The part that the Trainer's mesh and batch follow from."""
        chosen = dict(self.values)
        parts = [f"{axis}={chosen[axis]}" for axis in DEGREES if chosen[axis] != "1"]
        for name, default in (("schedule", "1f1b"), ("microbatch", "all")):
            parts += [] if chosen[name] == default else [f"{name}={chosen[name]}"]
        return ",".join(parts)

    @property
    def num_layers(self) -> int:
        """Layers of the model: at least one for each stage."""
        layout = parse_layout(self.layout)
        return max(2, layout.mesh.pipeline_parallel * layout.schedule.build().stages_per_rank)

    def experiment(self, *, num_layers: int | None = None) -> Experiment:
        """What is trained."""
        chosen: Any = dict(self.values)
        options = {
            "method": chosen["method"],
            "checkpointing": chosen["checkpointing"],
            "num_layers": self.num_layers if num_layers is None else num_layers,
        }
        if chosen["model"] == "plain":
            model, task = PlainProvider(**options), PackedNextToken()
        else:
            model, task = decoder(chosen["model"], **options), MaskedNextToken()
        return Experiment(model=model, batch=samples(ragged=chosen["mask"] == "ragged"), task=task)

    def differences(self, *, around: Around = nullcontext, device: Device = "cpu") -> Iterator[Difference]:
        """Run the cell, and give every place where it differs from one process on the CPU."""
        trace = trace_layout(self.experiment(), parse_layout(self.layout), around=around, device=device)
        chosen = dict(self.values)
        yield from differences(trace, _one_process(chosen["model"], chosen["mask"], self.num_layers), rtol=RTOL)


@cache
def _one_process(model: str, mask: str, num_layers: int) -> dict[str, Any]:
    """The reference; neither a layout, nor how activations are kept, nor the form of attention may matter to it."""
    cell = parse_cell(f"{model},mask={mask}")
    return trace_layout(cell.experiment(num_layers=num_layers), parse_layout(""))


def parse_cell(name: str) -> Cell:
    """Read a cell's name.

    Raises:
        UserError: If it names a factor or a value that there is not.
    """
    model, *parts = name.split(",")
    values = {key: options[0] for key, options in FACTORS.items()} | {"model": model}
    for part in parts:
        key, _, value = part.partition("=")
        values[key] = value
    for key, value in values.items():
        if key not in FACTORS or value not in FACTORS[key]:
            raise UserError(
                f"cell {name!r}: got {key}={value}; expected "
                + (f"one of {', '.join(FACTORS[key])}." if key in FACTORS else f"one of {', '.join(FACTORS)}.")
            )
    return Cell(tuple(values.items()))


def is_possible(values: Values) -> bool:
    """Whether values, of all factors or of some, can stand together."""
    degree = {axis: int(values.get(axis, "1")) for axis in DEGREES}
    if prod(degree.values()) > 8:
        return False
    if not _has_program(values):
        return False
    cp = degree["cp_shard"] * degree["cp_replicate"]
    if values.get("method") == "all_to_all":
        # Heads are what is exchanged; there must be some for each rank.
        return NUM_HEADS.get(values.get("model", "dense"), 8) % (degree["tp"] * cp) == 0
    return True


def _has_program(values: Values) -> bool:
    """Whether the schedule exists for so many ranks and microbatches."""
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


def is_complete(values: Values) -> bool:
    """Whether the values of all factors make a cell: several ranks, and no option that does nothing."""
    degree = {axis: int(values[axis]) for axis in DEGREES}
    uses_context = degree["cp_shard"] * degree["cp_replicate"] > 1
    return is_possible(values) and prod(degree.values()) > 1 and (uses_context or values["method"] == "all_gather")


@cache
def grid() -> tuple[Cell, ...]:
    """Each axis alone, then cells that cover every possible pair of values; each takes a missing one and adds others.

    A schedule is paired with the number of its ranks; `test_pipeline_rows.py` puts each beside everything else.
    """
    cells = [parse_cell(f"dense,{axis}={degree}") for axis in DEGREES for degree in FACTORS[axis][1:]]
    covered = {pair for cell in cells for pair in combinations(cell.values, 2)}
    every_value = [(key, value) for key, values in FACTORS.items() for value in values]
    for pair in combinations(every_value, 2):
        if is_paired(pair) and pair not in covered and (values := _complete(dict(pair), covered)) is not None:
            cells.append(Cell(tuple(values.items())))
            covered.update(combinations(cells[-1].values, 2))
    return tuple(cells)


def is_paired(pair: tuple[tuple[str, str], tuple[str, str]]) -> bool:
    """Whether the grid has to have two values together, if they can stand together."""
    keys = {key for key, _ in pair}
    if len(keys) < 2:
        return False
    if "schedule" in keys:
        return "pp" in keys
    return ("pp", "4") not in pair or not keys & {*DEGREES[1:], "method"}


def _complete(values: dict[str, str], covered: Set[tuple[tuple[str, str], tuple[str, str]]]) -> dict[str, str] | None:
    """All values of a cell in order, those first that bring most new pairs; None if no cell has the given ones."""
    if not is_possible(values):
        return None
    key = next((key for key in FACTORS if key not in values), None)
    if key is None:
        return {key: values[key] for key in FACTORS} if is_complete(values) else None
    order = list(FACTORS)

    def num_new(chosen: tuple[str, str]) -> int:
        ordered = [sorted((each, chosen), key=lambda each: order.index(each[0])) for each in values.items()]
        return sum((first, second) not in covered and is_paired((first, second)) for first, second in ordered)

    for value in sorted(FACTORS[key], key=lambda value: num_new((key, value)), reverse=True):
        if (completed := _complete({**values, key: value}, covered)) is not None:
            return completed
    return None


def main(arguments: Sequence[str]) -> int:
    """Run the cells that are named, or all; the exit code is the number of cells that differ, at most 1."""
    parser = argparse.ArgumentParser(description="Compare layouts with one process, number by number, in float64.")
    parser.add_argument("cells", nargs="*", help="names of cells; all of the grid by default")
    parser.add_argument("--device", choices=["cpu", "accelerator"], default="cpu", help="where ranks compute")
    parser.add_argument("--list", action="store_true", help="print the names of the grid's cells")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(cell.name for cell in grid()))
        return 0
    failed = 0
    for cell in [parse_cell(name) for name in options.cells] or grid():
        found = list(cell.differences(device=options.device))
        failed += bool(found)
        print(f"{cell.name}: " + (f"{len(found)} differences. First: {found[0]}" if found else "same"), flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"d9d: {error}")
