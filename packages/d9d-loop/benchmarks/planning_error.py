"""Error of the planner on published measurements, as JSON: fitted on a third of the rows, reported on the others.

    python planning_error.py measured_steps.csv [--only CLUSTER] [--folds 5 --seed 20261123 | --shipped]

The six constants of a cluster are fitted to the rows of one group, chosen by a hash of the row, so that the split does
not depend on the measured value. Beside each error is that of the naive model: model FLOPs x 4/3 with full
recomputation, over one fitted rate. With --folds, each row is predicted with constants that are fitted to at most 150
rows of the other folds. With --shipped, each row is predicted with the constants of the hardware files. They are fitted
to at most 80 rows of each group, so the figures are no held-out errors; no row of HELD_OUT and of H200 is fitted.
"""

import argparse
import json
import random
import zlib
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from planning_rows import Measured, read
from scipy.optimize import least_squares

from d9d_loop.planning import Hardware, memory_of, step_time

# Physical bounds of each constant, and the center of its prior: neither depends on a cluster.
BOUNDS = {
    "matmul_efficiency": (0.4, 0.75, 1.0),
    "attention_efficiency": (0.2, 0.45, 0.8),
    "memory_efficiency": (0.6, 0.8, 0.95),
    "host_seconds": (4e-6, 1.5e-5, 1e-4),
    "link_efficiency": (0.2, 0.75, 1.0),
    "network_efficiency": (0.2, 0.75, 1.0),
}
# Groups whose rows have constants of their own in a cross-validation, unless --shared.
CLUSTERS = {
    "vTrain single-node": ("vTrain single-node",),
    "vTrain multi-node": ("vTrain multi-node",),
    "Selene": ("SC21", "Korthikanti", "MT-NLG"),
    "Megatron H100": ("Megatron H100",),
    "llm-foundry h100-dgx": ("llm-foundry h100-dgx",),
    "llm-foundry a100-80-dgx": ("llm-foundry a100-80-dgx",),
    "llm-foundry a100-40-dgx": ("llm-foundry a100-40-dgx",),
    "torchtitan": ("torchtitan",),
    "KempnerForge": ("KempnerForge",),
    "AutoModel": ("AutoModel",),
    "Meta": ("Meta",),
    "Megatron-Bridge h100-dgx": ("Megatron-Bridge h100-dgx",),
    "Megatron-Bridge b200-dgx": ("Megatron-Bridge b200-dgx",),
    "Megatron-Bridge b300-dgx": ("Megatron-Bridge b300-dgx",),
    "Megatron-Bridge gb200-nvl72": ("Megatron-Bridge gb200-nvl72",),
    "Megatron-Bridge gb300-nvl72": ("Megatron-Bridge gb300-nvl72",),
    "prime-rl h100-dgx": ("prime-rl h100-dgx",),
    "prime-rl h200-dgx": ("prime-rl h200-dgx",),
    "prime-rl b200-dgx": ("prime-rl b200-dgx",),
}

# Groups of another system on a cluster, of which no row is fitted.
HELD_OUT = ("MT-NLG",)


def predict(row: Measured, hardware: Hardware) -> float:
    """Return the predicted step time; of layouts that the source does not state, the fastest."""
    return min(step_time(row.shape, layout, hardware).total for layout in row.tuned)


def split(rows: Sequence[Measured]) -> tuple[list[Measured], list[Measured]]:
    """Return a third of the rows of each group to fit, and the others. The inputs decide, not the measured values."""

    def order(row: Measured) -> int:
        hidden = ("step_s", "tok_s_gpu", "tflops_gpu", "mem_gib")
        inputs = {key: value for key, value in row.row.items() if key not in hidden}
        return zlib.crc32(json.dumps(inputs, sort_keys=True).encode())

    ordered = sorted(rows, key=order)
    fitted = [row for place, row in enumerate(ordered) if place % 3 == 0]
    return fitted, [row for place, row in enumerate(ordered) if place % 3]


def fit(rows: Sequence[Measured], hardware: Hardware) -> Hardware:
    """Return the hardware with constants fitted to the logarithms of the step times."""
    names = list(BOUNDS)
    low, start, high = (np.log([BOUNDS[name][side] for name in names]) for side in range(3))

    def constants(point: Any) -> Hardware:
        values = {name: float(value) for name, value in zip(names, np.exp(point), strict=True)}
        return hardware.model_copy(update={"fitted": hardware.fitted.model_copy(update=values)})

    def errors(point: Any) -> Any:
        tried = constants(point)
        # A weak prior keeps constants that no row determines.
        prior = 0.1 * (point - start)
        return np.concatenate(
            [np.log([predict(row, tried) / row.seconds for row in rows if row.seconds is not None]), prior]
        )

    found = least_squares(errors, start, bounds=(low, high), loss="cauchy", f_scale=0.06, diff_step=1e-2)
    return constants(found.x)


def naive_rate(rows: Sequence[Measured]) -> float:
    """Return the median FLOP/s of a device, counting model FLOPs and full recomputation."""
    return median(_flops(row) / row.seconds for row in rows if row.seconds is not None)


def _flops(row: Measured) -> float:
    layout = row.tuned[0]
    again = 4 / 3 if layout.recompute == "full" else 1.0
    return row.shape.flops_per_token(layout.length, causal=False) * layout.global_tokens / layout.world_size * again


def summary(rows: Sequence[Measured], predicted: Sequence[float], width: float) -> dict[str, Any]:
    """Return MAPE and other figures of predictions, in percent."""
    pairs = [(p, row.seconds) for p, row in zip(predicted, rows, strict=True) if row.seconds is not None]
    errors = [p / t - 1 for p, t in pairs]
    ranked = [(a, b) for a, b in combinations(pairs, 2) if max(a[1], b[1]) > 1.1 * min(a[1], b[1])]
    right = fmean([(a[0] > b[0]) == (a[1] > b[1]) for a, b in ranked]) if ranked else 1.0
    return {
        "rows": len(errors),
        "mape": round(100 * fmean(map(abs, errors)), 2),
        "median": round(100 * median(map(abs, errors)), 2),
        "bias": round(100 * fmean(errors), 2),
        "max": round(100 * max(map(abs, errors)), 1),
        "covered": round(100 * fmean([abs(each) <= width for each in errors]), 1),
        "pairs_ranked": round(100 * right, 1),
    }


def interval_width(own: Sequence[float], others: Sequence[float]) -> float:
    """Return the half width of an interval, from the errors of fitted rows of a cluster and of all other clusters.

    It is 1.2 times the 92 % quantile, because fitted rows err less. A few rows are fitted closely by six constants, so
    below 30 rows the other clusters' errors are a lower bound.
    """

    def quantile(errors: Sequence[float]) -> float:
        return 1.2 * sorted(errors)[min(len(errors) - 1, int(0.92 * len(errors)))] if errors else 0.0

    return quantile(own) if len(own) >= 30 else max(quantile(own), quantile(others))


def cross_validated(groups: Sequence[Sequence[Measured]], folds: int, seed: int) -> list[tuple[Measured, float]]:
    """Return the rows of the groups of a cluster, each with its prediction by constants of the other folds."""
    parts: list[list[Measured]] = [[] for _ in range(folds)]
    for rows in groups:
        shuffled = random.Random(seed).sample(list(rows), len(rows))  # noqa: S311  (no cryptography)
        for place in range(folds):
            parts[place] += shuffled[place::folds]
    found = []
    for place, part in enumerate(parts):
        others = [row for other, rows in enumerate(parts) if other != place for row in rows]
        if len(others) > 150:
            others = random.Random(seed + place).sample(others, 150)  # noqa: S311  (no cryptography)
        hardware = fit(others, Hardware.load(part[0].cluster))
        found += [(row, predict(row, hardware)) for row in part]
    return found


def memory_mape(rows: Sequence[Measured]) -> float | None:
    """Return the mean absolute error of the peak memory of rows in percent, which has no fitted constant."""
    errors = []
    for row in rows:
        layout = row.tuned[0]
        found = max(memory_of(row.shape, layout, index).model for index in {0, layout.pp - 1})
        if row.memory is not None:
            errors.append(abs(found / row.memory - 1))
    return round(100 * fmean(errors), 2) if errors else None


def main() -> None:
    """Fit, predict and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", help="part of the name of a cluster")
    parser.add_argument("--folds", type=int, help="number of folds of a cross-validation")
    parser.add_argument("--seed", type=int, default=20261123, help="seed of the folds")
    parser.add_argument("--shipped", action="store_true", help="predict with the constants of the hardware files")
    options = parser.parse_args()
    groups: dict[str, list[Measured]] = defaultdict(list)
    for row in read(options.file):
        groups[row.group].append(row)
    result: dict[str, Any] = {}
    clusters: dict[str, tuple[list[Measured], list[Measured], Hardware]] = {}
    for cluster, members in CLUSTERS.items():
        if options.only and options.only not in cluster:
            continue
        rows = [row for name in members for row in groups[name] if row.seconds is not None]
        if options.shipped:
            for name in members:
                part = [row for row in rows if row.group == name]
                hardware = Hardware.load(part[0].cluster)
                result[name] = summary(part, [predict(row, hardware) for row in part], hardware.relative_error)
            continue
        if options.folds:
            own = [[row for row in rows if row.group == name] for name in members if name not in HELD_OUT]
            found = cross_validated(own, options.folds, options.seed)
            for part in own:
                pairs = [(row, value) for row, value in found if row.group == part[0].group]
                result[part[0].group] = summary(*zip(*pairs, strict=True), 0.2)
            continue
        parts = [split([row for row in rows if row.group == name]) for name in members if name not in HELD_OUT]
        fitted, held = ([row for part in parts for row in part[side]] for side in (0, 1))
        held += [row for row in rows if row.group in HELD_OUT]
        clusters[cluster] = fitted, held, fit(fitted, Hardware.load(rows[0].cluster))
    inside = {
        cluster: [abs(predict(row, hardware) / row.seconds - 1) for row in fitted if row.seconds is not None]
        for cluster, (fitted, _, hardware) in clusters.items()
    }
    for cluster, (fitted, held, hardware) in clusters.items():
        width = interval_width(inside[cluster], [x for name, each in inside.items() if name != cluster for x in each])
        entry: dict[str, Any] = {
            "constants": hardware.fitted.model_dump(),
            "fitted_rows": len(fitted),
            "interval": width,
        }
        for name in CLUSTERS[cluster]:
            part = [row for row in held if row.group == name]
            rate = naive_rate(fitted)
            entry[name] = summary(part, [predict(row, hardware) for row in part], width)
            entry[name]["naive_mape"] = summary(part, [_flops(row) / rate for row in part], width)["mape"]
            entry[name]["memory_mape"] = memory_mape([row for row in groups[name] if row.memory is not None])
        result[cluster] = entry
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
