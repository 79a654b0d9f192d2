"""Comparison of dry runs with real runs: collectives, and bytes of parameters, gradients and optimizer state.

    python integration_tests/planning_layouts.py --count 200 --seed 1

draws random models and layouts from the factors of the oracle's grid, with expert parallelism, and runs each twice: on
real gloo ranks, and rehearsed in one process for a random rank of each class. It prints each layout that differs, and
exits with 1 if there is one. `compare` is one such comparison. Ranks are processes that all layouts share. A layout
costs 5 to 15 s of processor time, half of it for the real ranks; `--skip` splits the layouts over several calls.
"""

import argparse
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

from oracle import MAIN_JOB, parse_cell
from oracle_grid import DEGREES, Cell
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_dist import Launch, UserError
from d9d_dist.testing import run_ranks
from d9d_loop.events import BackwardDone, OptimizerDone, StepStarted
from d9d_loop.planning import (
    Collective,
    dry_run,
    gradient_bytes,
    optimizer_bytes,
    parameter_bytes,
    representatives,
)
from d9d_loop.planning.collective_log import collective_of
from d9d_loop.testing import Experiment, Layout, parse_layout
from d9d_loop.testing.oracle import experiment_trainer

Trace = dict[str, Any]


@final
class CollectiveLog(TorchDispatchMode):
    """Dispatch mode that records every collective of the body, with real or fake tensors.

    Attributes:
        entries: The collectives in the order of the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Collective] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        entry = collective_of(func, args, kwargs or {}, result)
        if entry is not None:
            self.entries.append(entry)
        return result


def _comparable(entries: Iterable[Collective], *, routed: bool) -> list[tuple[str, tuple[int, ...], int]]:
    """Return the collectives; bytes of all-to-alls are excluded if they depend on the routing of tokens."""
    return [(e.name, e.ranks, 0 if routed and e.name == "all_to_all" else e.num_bytes) for e in entries]


def compare(name: str) -> list[str]:
    """Return the differences between rehearsal and real run of a cell, one line each; its name may end with ep=2."""
    parts = name.split(",")
    cell = parse_cell(",".join(part for part in parts if not part.startswith("ep=")))
    expert = [part for part in parts if part.startswith("ep=")]
    experiment, layout = cell.experiment, parse_layout(",".join([cell.layout, *expert]))
    routed = name.startswith("moe")
    with TemporaryDirectory() as folder:
        real = run_ranks(_run, experiment, layout, folder, routed, world_size=layout.world_size)
        rehearsed = run_ranks(_dry_runs, experiment, layout, folder, name, world_size=1, timeout=850)[0]
    return [
        f"{name}: rank {rank}: {key}: rehearsed {_first_difference(got[key], value)}"
        for rank, got in rehearsed.items()
        for key, value in real[rank].items()
        if got[key] != value
    ]


def random_layouts(count: int, seed: int) -> list[str]:
    """Return names of different random layouts of at most eight ranks, for `compare`; every second one has experts."""
    chance, found = random.Random(seed), dict[str, None]()  # noqa: S311  (no cryptography)
    while len(found) < count:
        values = {key: chance.choice(choices) for key, choices in MAIN_JOB.factors.items()}
        if len(found) % 2:
            values["model"] = "moe"
        if not MAIN_JOB.is_complete(values):
            continue
        name = Cell(MAIN_JOB, tuple(values.items())).name
        if values["model"] == "moe":
            ranks = prod(int(values[axis]) for axis in DEGREES if axis != "pp")
            name += f",ep={chance.choice([degree for degree in (1, 2) if ranks % degree == 0])}"
        found[name.removesuffix(",ep=1")] = None
    return list(found)


def _first_difference(got: Any, expected: Any) -> str:
    if not isinstance(got, list):
        return f"{got}, expected {expected}"
    place = next(
        (i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected))
    )
    return f"{got[place : place + 3]}, expected {expected[place : place + 3]} at {place} of {len(got)}, {len(expected)}"


def _run(experiment: Experiment, layout: Layout, folder: str, routed: bool) -> Trace:
    """Run two steps; return the collectives of the second, and the bytes after it."""
    log, trace = CollectiveLog(), Trace()

    def on_started(event: StepStarted) -> None:
        if event.step == 2:
            log.__enter__()

    def on_backward(event: BackwardDone) -> None:
        if event.step == 2:
            trace["gradient_bytes"] = gradient_bytes(event.model)

    def on_done(event: OptimizerDone) -> None:
        if event.step == 2:
            log.__exit__(None, None, None)
            trace["collectives"] = _comparable(log.entries, routed=routed)
            trace["parameter_bytes"] = parameter_bytes(event.model)
            trace["optimizer_bytes"] = optimizer_bytes(event.optimizer)

    trainer = experiment_trainer(replace(experiment, num_steps=2), layout, Path(folder) / "real")
    trainer.events.on(StepStarted, on_started)
    trainer.events.on(BackwardDone, on_backward)
    trainer.events.on(OptimizerDone, on_done)
    trainer.train()
    return trace


def _dry_runs(experiment: Experiment, layout: Layout, folder: str, name: str) -> dict[int, Trace]:
    """Return the traces of a random rank of each class, by rank; ranks of a class do the same."""
    trainer = experiment_trainer(experiment, layout, Path(folder) / "rehearsed")
    plan = trainer.plan_for(Launch(world_size=layout.world_size, device="cpu"))
    first = representatives(plan, layout.world_size)
    place = random.Random(name).randrange(layout.world_size // len(first))  # noqa: S311  (no cryptography)
    ranks, routed = [rank + place for rank in first], name.startswith("moe")
    return {
        each.rank: {
            "collectives": _comparable([*each.forward_backward.collectives, *each.update.collectives], routed=routed),
            "gradient_bytes": each.gradient_bytes,
            "parameter_bytes": each.parameter_bytes,
            "optimizer_bytes": each.optimizer_bytes,
        }
        for each in dry_run(plan, ranks=ranks, world_size=layout.world_size)
    }


def main(arguments: Sequence[str]) -> int:
    """Compare the named cells, or random ones; return the exit code, 1 if any cell differs."""
    parser = argparse.ArgumentParser(description="Compare dry_runs with real runs, collective by collective.")
    parser.add_argument("cells", nargs="*", help="names of cells of the oracle")
    parser.add_argument("--count", type=int, default=20, help="number of random layouts, if none is named")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random layouts")
    parser.add_argument("--skip", type=int, default=0, help="number of random layouts that ran before")
    options = parser.parse_args(arguments)
    chosen = options.cells or random_layouts(options.skip + options.count, options.seed)[options.skip :]
    failed = 0
    for name in chosen:
        print(name, end=": ", flush=True)
        lines = compare(name)
        failed += bool(lines)
        print("\n".join(lines) or "same", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} layouts are the same")
    return min(failed, 1)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"d9d: {error}")
