"""Error of the planner on published measurements, as JSON, by a cross-validation with held-out rows.

    python planning_error.py measured_steps.csv [--only CLUSTER] [--shared] [--folds 5 --seed 20261123 | --models]
    python planning_error.py measured_steps.csv --shipped | --fit [--only CLUSTER]
    ... --record planning_error.json

Each row is predicted with six constants fitted to the other folds: to at most 80 rows of its group, or with --shared of
each group on the same hardware. Groups on DGX H100 and on Blackwell have few rows. They are first fitted together,
without the held-out rows, and then each near the common constants, with a prior of the same width as that of the common
fit. KempnerForge is fitted near the constants that ship for DGX H100.
--shared also prints the half widths of intervals that contain 90 % of the held-out
times of each group, for dense and for sparse models. `covered` is the fraction of times within the interval of the
hardware file, which comes from folds with another seed. `naive_mape` is the error of a naive model: model FLOPs (x 4/3
with full recomputation), divided by the median rate of the group. With --shipped, each row is predicted with the
constants of the hardware files; --fit prints these constants. Rows of HELD_OUT are never fitted.
--record also writes the figures to the file from which `docs/choosing_a_layout.md` has its table, and with --fit the
constants of the hardware files (`tests/planning/test_hardware_spec.py`). Memory has no fitted constant: its interval
covers 90 % of the rows of a group.
"""

import argparse
import gc
import json
import random
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from functools import cache
from itertools import combinations
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from planning_rows import Measured, read, unread
from scipy.optimize import least_squares

from d9d_loop.planning import Hardware, memory_of, step_time
from d9d_loop.planning.hardware_spec import Fitted

# Physical bounds of each constant, and the center of its prior: neither depends on a cluster.
BOUNDS = {
    "matmul_efficiency": (0.4, 0.75, 1.0),
    "attention_efficiency": (0.2, 0.45, 0.8),
    "memory_efficiency": (0.6, 0.8, 0.95),
    "host_seconds": (4e-6, 1.5e-5, 1e-4),
    "link_efficiency": (0.2, 0.75, 1.0),
    "network_efficiency": (0.2, 0.75, 1.0),
}
# Groups on similar hardware: the constants of each group are fitted near those of all of them. Other groups are fitted
# alone.
GENERATIONS = {
    "vTrain single-node": ("vTrain single-node",),
    "vTrain multi-node": ("vTrain multi-node",),
    "Selene": ("SC21", "Korthikanti", "MT-NLG"),
    "llm-foundry a100-80-dgx": ("llm-foundry a100-80-dgx",),
    "llm-foundry a100-40-dgx": ("llm-foundry a100-40-dgx",),
    "DGX H100": ("Megatron H100", "llm-foundry h100-dgx", "AutoModel", "Meta", "Megatron-Bridge h100-dgx"),
    "torchtitan": ("torchtitan",),
    "KempnerForge": ("KempnerForge",),
    "Blackwell": (
        "Megatron-Bridge b200-dgx",
        "Megatron-Bridge b300-dgx",
        "Megatron-Bridge gb200-nvl72",
        "Megatron-Bridge gb300-nvl72",
    ),
    "prime-rl": ("prime-rl h100-dgx", "prime-rl h200-dgx", "prime-rl b200-dgx"),
}

# Hardware whose constants are fitted near those that ship for another one: H200 and H100 are one chip, with other
# memory and, in KempnerForge, other links.
SAME_CHIP = {"h200-4ndr": "h100-dgx"}

# Groups whose rows are not fitted: measured with another software system than the other groups of the cluster, or few.
HELD_OUT = ("MT-NLG", "prime-rl h100-dgx", "prime-rl h200-dgx", "prime-rl b200-dgx")


def predict(row: Measured, hardware: Hardware) -> float:
    """Return the predicted step time, of the fastest layout if the source does not state the layout."""
    times = [step_time(row.shape, layout, hardware) for layout in row.tuned]
    return min(row.passes * each.total - (row.passes - 1) * (each.data + each.optimizer) for each in times)


def fit(rows: Sequence[Measured], near: Fitted | None = None, *, starts: int = 2) -> Fitted:
    """Return constants fitted to the logarithms of the step times, near the centers of their bounds or near others.

    The standard deviation of the prior is 0.3 around the centers, and 0.15 around the constants of other rows, in
    logarithms and relative to errors of 6 %. It determines the constants that the rows leave undetermined.
    """
    names = list(BOUNDS)
    bounds = BOUNDS | {"attention_efficiency": attention_bounds(rows)}
    low, start, high = (np.log([bounds[name][side] for name in names]) for side in range(3))
    if near is not None:
        start = np.clip(np.log([getattr(near, name) for name in names]), low + 1e-6, high - 1e-6)
    stiffness = 0.2

    def constants(point: Any) -> Fitted:
        return Fitted(**{name: float(value) for name, value in zip(names, np.exp(point), strict=True)})

    timed = [(row, row.seconds) for row in rows if row.seconds is not None]
    keys = [(row.cluster, row.shape, row.tuned, row.passes) for row, _ in timed]
    different = dict(zip(keys, (row for row, _ in timed), strict=True))  # releases repeat layouts

    def errors(point: Any) -> Any:
        tried = constants(point)
        found = {key: predict(row, hardware_with(row.cluster, tried)) for key, row in different.items()}
        logs = [np.log(found[key] / seconds) for key, (_, seconds) in zip(keys, timed, strict=True)]
        return np.concatenate([logs, stiffness * (point - start)])

    # Two starts, because the fit has local minima: a higher bandwidth of one kind can compensate for a lower one.
    found = [
        least_squares(
            errors, point, bounds=(low, high), loss="cauchy", f_scale=0.06, diff_step=1e-2, ftol=1e-5, xtol=1e-4
        )
        for point in (start, (start + low) / 2)[:starts]
    ]
    return constants(min(found, key=lambda each: each.cost).x)


def attention_bounds(rows: Sequence[Measured]) -> tuple[float, float, float]:
    """Return the bounds of attention and their center, so that no kernel of the rows is faster than 0.8 of the peak.

    FlashAttention 3 reaches 0.56 of it on 4,096 tokens (Shah et al. 2024, figure 5).
    """
    low, center, high = BOUNDS["attention_efficiency"]
    speed = max((layout.attention_speed for row in rows for layout in row.tuned), default=1.0)
    return low, max(low, min(center, 0.56 / speed)), min(high, 0.8 / speed)


def hardware_with(cluster: str, fitted: Fitted) -> Hardware:
    """Return the hardware of a cluster with other constants."""
    return _load(cluster).model_copy(update={"fitted": fitted})


_load = cache(Hardware.load)


def fit_each(rows: Mapping[str, Sequence[Measured]], wanted: Container[str]) -> dict[str, Fitted]:
    """Return the constants of each wanted name, near those of all rows if there are several names."""
    if len(rows) == 1:
        ((name, kept),) = rows.items()
        chip = SAME_CHIP.get(kept[0].cluster)
        return {name: fit(kept, _load(chip).fitted if chip is not None else None)}
    every = fit([row for kept in rows.values() for row in _at_most(kept, 40, 0)], starts=1)
    return {name: fit(kept, every, starts=1) if kept else every for name, kept in rows.items() if name in wanted}


def naive_rate(rows: Sequence[Measured]) -> float:
    """Return the median FLOP/s of a device, counting model FLOPs and full recomputation."""
    return median(_flops(row) / row.seconds for row in rows if row.seconds is not None)


def _flops(row: Measured) -> float:
    layout = row.tuned[0]
    again = 4 / 3 if layout.recompute == "full" else 1.0
    tokens = row.passes * layout.global_tokens / layout.world_size
    return row.shape.flops_per_token(layout.length, causal=False) * tokens * again


def summary(rows: Sequence[Measured], predicted: Sequence[float], hardware: Hardware) -> dict[str, Any]:
    """Return MAPE and other figures of predictions, in percent."""
    pairs = [(p, row.seconds) for p, row in zip(predicted, rows, strict=True) if row.seconds is not None]
    errors = [p / t - 1 for p, t in pairs]
    widths = [hardware.relative_error(sparse=_is_sparse(row)) for row in rows if row.seconds is not None]
    rate = naive_rate(rows)
    naive = [_flops(row) / rate / row.seconds - 1 for row in rows if row.seconds is not None]
    ranked = [(a, b) for a, b in combinations(pairs, 2) if max(a[1], b[1]) > 1.1 * min(a[1], b[1])]
    right = fmean([(a[0] > b[0]) == (a[1] > b[1]) for a, b in ranked]) if ranked else 1.0
    return {
        "rows": len(errors),
        "unstated": sorted({name for row in rows for name in row.unstated}),
        "mape": round(100 * fmean(map(abs, errors)), 2),
        "median": round(100 * median(map(abs, errors)), 2),
        "bias": round(100 * fmean(errors), 2),
        "max": round(100 * max(map(abs, errors)), 1),
        "covered": round(
            100 * fmean([abs(t / p - 1) <= width for (p, t), width in zip(pairs, widths, strict=True)]), 1
        ),
        "pairs_ranked": round(100 * right, 1),
        "naive_mape": round(100 * fmean(map(abs, naive)), 2),
    }


def interval_widths(groups: Sequence[Sequence[tuple[Measured, float]]]) -> dict[str, float]:
    """Return the half widths that cover 90 % of the times of each group relative to the predictions, by kind of model.

    The dict has the names of the fields of a hardware file, for the kinds of which there are rows.
    """
    found: dict[str, float] = {}
    for pairs in groups:
        for name, is_sparse in (("dense_error", False), ("sparse_error", True)):
            kept = [(row.seconds, value) for row, value in pairs if _is_sparse(row) == is_sparse]
            if kept:
                width = _half_width([seconds / value - 1 for seconds, value in kept if seconds is not None])
                found[name] = max(found.get(name, 0.0), round(width, 3))
    return found


def _is_sparse(row: Measured) -> bool:
    return row.shape.num_experts > 0


def _half_width(errors: Sequence[float]) -> float:
    """Return the half width that covers 90 % of errors relative to the predictions."""
    return sorted(map(abs, errors))[ceil(0.9 * len(errors)) - 1]


def random_parts(groups: Sequence[Sequence[Measured]], folds: int, seed: int) -> list[list[list[Measured]]]:
    """Return the rows of each fold, by group."""
    shuffled = [random.Random(seed).sample(list(rows), len(rows)) for rows in groups]  # noqa: S311  (no cryptography)
    return [[rows[place::folds] for rows in shuffled] for place in range(folds)]


def parts_of_models(groups: Sequence[Sequence[Measured]]) -> list[list[list[Measured]]]:
    """Return folds with the rows of one model each."""
    models = dict.fromkeys(row.shape for rows in groups for row in rows)
    return [[[row for row in rows if row.shape == shape] for rows in groups] for shape in models]


def cross_validated(parts: list[list[list[Measured]]], names: Sequence[str], seed: int) -> list[tuple[Measured, float]]:
    """Return the rows of all folds, each with its prediction by constants fitted to the other folds.

    Args:
        parts: Rows of each fold by group.
        names: Name of the constants of each group.
        seed: Seed of the choice of rows.
    """
    found = []
    for place, part in enumerate(parts):
        others: dict[str, list[Measured]] = defaultdict(list)
        for index, name in enumerate(names):
            rows = [row for other in parts if other is not part for row in other[index]]
            others[name] += _at_most(rows, 80, seed + place)
        fitted = fit_each(others, {name for name, rows in zip(names, part, strict=True) if rows})
        found += [
            (row, predict(row, hardware_with(row.cluster, fitted[name])))
            for name, rows in zip(names, part, strict=True)
            for row in rows
        ]
    return found


def _at_most(rows: Sequence[Measured], number: int, seed: int) -> Sequence[Measured]:
    return rows if len(rows) <= number else random.Random(seed).sample(rows, number)  # noqa: S311  (no cryptography)


def memory_summary(rows: Sequence[Measured]) -> dict[str, float]:
    """Return the MAPE of the peak memory in percent, and the half width of its interval; nothing without such rows."""
    ratios = []
    for row in rows:
        layout = row.tuned[0]
        found = max(getattr(memory_of(row.shape, layout, index), row.counted) for index in {0, layout.pp - 1})
        if row.memory is not None:
            ratios.append(row.memory / found)
    if not ratios:
        return {}
    return {
        "memory_mape": round(100 * fmean(abs(1 / each - 1) for each in ratios), 2),
        "memory_shortest": round(100 * (1 / max(ratios) - 1), 1),
        "memory_interval": round(_half_width([each - 1 for each in ratios]), 3),
    }


def fitted_constants(timed: Mapping[str, list[Measured]], seed: int) -> dict[str, Any]:
    """Return the number of rows and the constants of each hardware file."""
    chosen: dict[str, list[Measured]] = defaultdict(list)
    for rows in timed.values():
        chosen[rows[0].cluster] += _at_most(rows, 80, seed)
    return {name: {"rows": len(chosen[name]), **each.model_dump()} for name, each in fit_each(chosen, chosen).items()}


def predictions(timed: Mapping[str, list[Measured]], options: argparse.Namespace) -> list[tuple[Measured, float]]:
    """Return rows with their predictions by the constants of the hardware files, or by a cross-validation."""
    rows = list(timed.values())
    if options.shipped:
        return [(row, predict(row, _load(row.cluster))) for each in rows for row in each]
    if sum(map(len, rows)) < options.folds:
        return []
    parts = parts_of_models(rows) if options.models else random_parts(rows, options.folds, options.seed)
    names = [each[0].cluster if options.shared else each[0].group for each in rows]
    return cross_validated(parts, names, options.seed)


def _add_to_record(options: argparse.Namespace, result: Mapping[str, Any]) -> None:
    """Replace the figures of the same kind and names in the file of --record."""
    kinds = {"fit": options.fit, "shipped": options.shipped, "intervals": options.shared, "models": options.models}
    kind = next((name for name, is_chosen in kinds.items() if is_chosen), "folds")
    record = json.loads(options.record.read_text()) if options.record.is_file() else {}
    record[kind] = dict(sorted((record.get(kind, {}) | result).items()))
    options.record.write_text(json.dumps(dict(sorted(record.items())), indent=2) + "\n")


def main() -> None:
    """Fit, predict and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="part of the name of a generation, or of a group on A100")
    parser.add_argument("--folds", type=int, default=5, help="number of folds of the cross-validation")
    parser.add_argument("--models", action="store_true", help="hold out the rows of one model at a time")
    parser.add_argument("--seed", type=int, default=20261123, help="seed of the folds and of the choice of rows")
    parser.add_argument(
        "--shared", action="store_true", help="fit one set of constants to all groups on the same hardware"
    )
    parser.add_argument("--shipped", action="store_true", help="predict with the constants of the hardware files")
    parser.add_argument("--fit", action="store_true", help="print constants for the hardware files")
    parser.add_argument("--record", type=Path, help="JSON file to which the figures are added")
    options = parser.parse_args()
    gc.freeze()  # imported modules are large
    groups: dict[str, list[Measured]] = defaultdict(list)
    for row in read(options.file):
        groups[row.group].append(row)
    result: dict[str, Any] = {}
    for generation, members in GENERATIONS.items():
        if options.only not in generation:
            continue
        timed = {
            name: [row for row in groups[name] if row.seconds is not None]
            for name in members
            if options.shipped or name not in HELD_OUT
        }
        if options.fit:
            result |= fitted_constants(timed, options.seed)
            continue
        by_hardware: dict[str, list[list[tuple[Measured, float]]]] = defaultdict(list)
        found = predictions(timed, options)
        for name in members:
            if pairs := [pair for pair in found if pair[0].group == name]:
                hardware = _load(pairs[0][0].cluster)
                result[name] = summary(*zip(*pairs, strict=True), hardware) | memory_summary(groups[name])
                by_hardware[pairs[0][0].cluster].append(pairs)
        if options.shared:
            result |= {cluster: interval_widths(each) for cluster, each in by_hardware.items()}
    if options.shipped:
        result["not read"] = Counter(f"{row['system']}: {row['model']}" for row in unread(options.file))
    print(json.dumps(result, indent=2))
    if options.record is not None:
        _add_to_record(options, result)
    gc.unfreeze()


if __name__ == "__main__":
    main()
