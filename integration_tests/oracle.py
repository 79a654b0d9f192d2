"""Grids of the oracle: the models and layouts to compare with one process. Each cell can be run by its name.

    python integration_tests/oracle.py --list
    python integration_tests/oracle.py "dense,dp_shard=2,tp=2,microbatch=1"

The name of a cell is a model, its options, and a layout. Any such name can be run, also one outside the grid. A grid
covers every compatible pair of values of its factors, on at most eight ranks for the main job's models and four ranks
for those of `d9d_modules`.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from d9d_dist import UserError
from d9d_loop.config.schedule_config import KINDS
from d9d_loop.testing import Experiment

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))  # the main job is one of the models
from oracle_decoders import DECODERS
from oracle_grid import DEGREES, Cell, Grid, Value, Values
from oracle_models import MaskedNextToken, PackedNextToken, PlainProvider, decoder, samples

NUM_HEADS = {"dense": 8, "tied": 8, "moe": 8, "plain": 4}


def _experiment(values: Values, num_layers: int) -> Experiment:
    chosen: Any = values
    options = {"method": chosen["method"], "checkpointing": chosen["checkpointing"], "num_layers": num_layers}
    batch = samples(ragged=chosen["mask"] == "ragged")
    if chosen["model"] == "plain":
        return Experiment(model=PlainProvider(**options), batch=batch, task=PackedNextToken())
    return Experiment(model=decoder(chosen["model"], **options), batch=batch, task=MaskedNextToken())


def _is_served(values: Values) -> bool:
    """Return True if the method all_to_all has at least one head per rank."""
    num_ranks = int(values.get("tp", "1")) * int(values.get("cp_shard", "1")) * int(values.get("cp_replicate", "1"))
    return values.get("method") != "all_to_all" or NUM_HEADS.get(values.get("model", "dense"), 8) % num_ranks == 0


def _is_paired(first: Value, second: Value) -> bool:
    """Pair a schedule only with its number of ranks; `test_pipeline_rows.py` combines it with everything else."""
    keys = {first[0], second[0]}
    if "schedule" in keys:
        return "pp" in keys
    return ("pp", "4") not in (first, second) or not keys & {*DEGREES[1:], "method"}


MAIN_JOB = Grid(
    factors={
        "model": tuple(NUM_HEADS),
        "pp": ("1", "2", "4"),
        "schedule": ("1f1b", *(kind for kind in KINDS if kind != "1f1b")),
        "dp_replicate": ("1", "2", "4"),
        "dp_shard": ("1", "2", "4"),
        "cp_shard": ("1", "2", "4"),
        "cp_replicate": ("1", "2"),
        "tp": ("1", "2", "4"),
        "method": ("all_gather", "all_to_all", "ring"),
        "microbatch": ("all", "1"),
        "checkpointing": ("none", "full"),
        "mask": ("full", "ragged"),
    },
    of_the_model=("mask",),
    max_ranks=8,
    experiment=_experiment,
    is_served=_is_served,
    is_paired=_is_paired,
)
GRIDS = (MAIN_JOB, DECODERS)


def parse_cell(name: str) -> Cell:
    """Read a cell's name.

    Raises:
        UserError: If the model, a factor or a value is unknown.
    """
    model, *_ = parts = name.split(",")
    for grid in GRIDS:
        if model in grid.factors["model"]:
            return grid.cell(parts)
    models = ", ".join(model for grid in GRIDS for model in grid.factors["model"])
    raise UserError(f"cell {name!r}: got model={model}; expected one of {models}.")


@cache
def cells(grid: Grid) -> tuple[Cell, ...]:
    """Return each single axis, for the first model and the grid's families, then cells that cover all pairs."""
    model, *_ = grid.factors["model"]
    alone = [parse_cell(f"{model},{axis}={degree}") for axis in DEGREES for degree in grid.factors[axis][1:]]
    for family in grid.alone:
        methods = ("", ",method=all_to_all")  # bidirectional attention supports only the second
        named = ([parse_cell(f"{family},{axis}=2{method}") for method in methods] for axis in DEGREES)
        alone += [next(cell for cell in each if grid.is_complete(dict(cell.values))) for each in named]
    return grid.covering(list(dict.fromkeys(alone)))


def main(arguments: Sequence[str]) -> int:
    """Run the named cells, or all; return the exit code, 1 if any cell differs."""
    parser = argparse.ArgumentParser(description="Compare layouts with one process, number by number, in float64.")
    parser.add_argument("cells", nargs="*", help="names of cells; all of the grids by default")
    parser.add_argument("--device", choices=["cpu", "accelerator"], default="cpu", help="device of the ranks")
    parser.add_argument("--list", action="store_true", help="print the names of the grids' cells")
    options = parser.parse_args(arguments)
    chosen = [parse_cell(name) for name in options.cells] or [cell for grid in GRIDS for cell in cells(grid)]
    if options.list:
        print("\n".join(cell.name for cell in chosen))
        return 0
    failed = 0
    for cell in chosen:
        found = list(cell.differences(device=options.device))
        failed += bool(found)
        print(f"{cell.name}: " + (f"{len(found)} differences. First: {found[0]}" if found else "same"), flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"d9d: {error}")
