"""Random compositions of the axes of a mesh, in which decoders of `transformers` train as in a plain loop in float64.

A type has up to three compositions, which its name and the axes that it supports determine. All have four ranks.
"""

import os
import random
from collections.abc import Collection, Mapping
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from zoo import BATCH, Entry, entry
from zoo_jobs import (
    AllFloat64,
    SumOfRows,
    Trace,
    built_module,
    compare_traces,
    context_mutant,
    cpu_seconds,
    float64_by_default,
    plain_loop,
    trace_path,
    train_entry,
)

from d9d_dist import UserError
from d9d_dist.testing import RankError, run_ranks
from d9d_loop import ModelProvider, hugging_face_model

AXES: Mapping[str, str] = {
    "pipelines": "pipeline_parallel",
    "contexts": "context_parallel_shard",
    "tensors": "tensor_parallel",
    "experts": "expert_parallel",
}
"""Axis of the mesh by axis of the record of compared types."""

_ALWAYS = ("data_parallel_shard", "data_parallel_replicate")
_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb1p", "zbv")
_COUNT, _MICROBATCH = 3, 3
_SECONDS = 150


class Composition(NamedTuple):
    """Layout of ranks, and the schedule of its pipeline, if any."""

    mesh: Mapping[str, int]
    schedule: str | None

    @property
    def num_ranks(self) -> int:
        return prod(size for axis, size in self.mesh.items() if axis != "expert_parallel")

    def __str__(self) -> str:
        axes = " ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        return axes if self.schedule is None else f"{axes} {self.schedule}"


def draw(name: str, supported: Collection[str]) -> list[Composition]:
    """Return the compositions of a type, for the axes of the record in which it is equal."""
    axes = [AXES[axis] for axis in AXES if axis in supported and axis != "experts"]
    meshes: list[dict[str, int]] = []
    for pair in combinations((*axes, *_ALWAYS), 2):
        mesh = dict.fromkeys(pair, 2)
        meshes.append(mesh)
        if "experts" in supported:
            most = prod(size for axis, size in mesh.items() if axis != "pipeline_parallel")
            meshes += [{**mesh, AXES["experts"]: size} for size in (2, 4) if size <= most]
    draws = random.Random(name)  # noqa: S311  (no secret)
    return [
        Composition(mesh, draws.choice(_SCHEDULES) if "pipeline_parallel" in mesh else None)
        for mesh in draws.sample(meshes, min(_COUNT, len(meshes)))
    ]


def composition_outcomes(supported: Mapping[str, Collection[str]], folder: str) -> dict[str, str]:
    """Compare types in their compositions; return `equal`, or the first difference, error or crash of each.

    A type that needs more time has no outcome.
    """
    found: dict[str, str] = {}
    for name, axes in supported.items():
        try:
            found[name] = _outcome(name, axes, folder)
        except RankError as error:
            if "did not finish" in str(error):
                print(f"{name}: {str(error).splitlines()[0]}", flush=True)
            else:
                found[name] = f"crash: {str(error).splitlines()[0]}"
    return found


def _outcome(name: str, axes: Collection[str], folder: str) -> str:
    [why] = run_ranks(write_plain, name, folder, world_size=1, timeout=_SECONDS)
    if why:
        return why
    for composition in draw(name, axes):
        if line := difference(name, composition, folder):
            is_error, reason = line.startswith("error: "), line.removeprefix("error: ")
            return f"{'error: ' if is_error else ''}{composition}: {reason}"
    return "equal"


def difference(name: str, composition: Composition, folder: str, mutant: str | None = None, **settings: Any) -> str:
    """Return the first difference of a type from its plain loop, an error, or an empty string."""
    place = Path(folder) / f"{name} {composition}".replace("/", "_")
    place.mkdir()
    ranks = composition.num_ranks
    lines = run_ranks(_write_trace, name, composition, str(place), mutant, settings, world_size=ranks, timeout=_SECONDS)
    if line := next(filter(None, lines), ""):
        return line
    expected: Trace = torch.load(trace_path(folder, name), weights_only=True)
    traces: list[Trace] = [torch.load(place / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
    whole: Trace = {}
    for trace in traces:  # a pipeline stage has its own parameters
        whole = _merged(whole, trace)
    return next((line for trace in traces for line in compare_traces(_merged(whole, trace), expected, ranks)), "")


def _merged(first: Trace, second: Trace) -> Trace:
    """Return the values of two ranks, or those of the second where both have them."""
    if not first:
        return second
    steps = [
        {"loss": theirs["loss"], "gradients": ours["gradients"] | theirs["gradients"]}
        for ours, theirs in zip(first["steps"], second["steps"], strict=True)
    ]
    return {"steps": steps, **{what: first[what] | second[what] for what in ("built", "trained")}}


def write_plain(name: str, folder: str) -> str:
    """Write the trace of a plain loop in float64; return why there is none, or an empty string."""
    try:
        animal = entry(f"compositions:{name}")
        with cpu_seconds(40), float64_by_default(), AllFloat64():
            trace = plain_loop(built_module(animal), animal.batch(), _loss)
    except Exception as error:
        return f"not run: {type(error).__name__}: {error}"[:300]
    trace["errors"] = dict.fromkeys(("loss", "gradient", "trained"), 0.0)
    torch.save(trace, trace_path(folder, name))
    return ""


def _loss(outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return SumOfRows().loss(outputs, dict(batch)).total / BATCH


def _write_trace(name: str, composition: Composition, folder: str, mutant: str | None, settings: dict[str, Any]) -> str:
    """Train in a layout, and write the trace of this rank; return an error, or an empty string. Collective."""
    settings = {"batch": {"global_size": BATCH, "microbatch_size": _MICROBATCH}, **settings}
    if composition.schedule is not None:
        settings["pipeline"] = {"schedule": composition.schedule}
    try:
        animal = entry(f"compositions:{name}")
        with float64_by_default(), AllFloat64(), context_mutant(mutant):
            trace = train_entry(
                animal, composition.mesh, Path(folder) / "run", task=SumOfRows(), model=_provider(animal), **settings
            )
    except UserError as error:
        return f"error: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:600]
    torch.save(trace, f"{folder}/{os.environ['RANK']}.pt")
    return ""


def _provider(animal: Entry) -> ModelProvider:
    """Return the provider of a decoder, as for a folder, with the values that the plain loop starts from."""
    with torch.device("meta"):
        whole: Any = animal.build()
    provider: Any = hugging_face_model(whole.config, type(whole))
    provider.model_class = lambda config: animal.module()
    return provider
