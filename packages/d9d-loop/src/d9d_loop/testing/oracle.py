"""Comparison of training in a distributed layout with training in a single process.

In float64, two layouts differ only by rounding, a relative error of about 1e-15. A wrong factor, a missing reduction
or a double count causes a difference that is larger by many orders of magnitude, far above the tolerance.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MethodType
from typing import Any, final

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from d9d_dist.testing import Device, assert_trees_close, full_gradients, full_parameters, run_ranks
from d9d_loop.config.trainer_config import TrainerConfig
from d9d_loop.data.sample_stream import Collate
from d9d_loop.events import Finished, GradientsReady, StepDone
from d9d_loop.job.trainer import Trainer
from d9d_loop.model.model_provider import ModelProvider
from d9d_loop.task import Task
from d9d_loop.testing.layout import Layout, parse_layout

Around = Callable[[], AbstractContextManager[object]]
"""Function that returns a context manager around a rank's training, e.g. one that injects a fault."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Training job to run in several layouts. All attributes must be picklable.

    Attributes:
        batch: Samples of one step. Every step uses all of them, in a different order.
        dtype: Dtype of floating-point parameters and samples. Use float32 if a kernel requires it.
    """

    model: ModelProvider
    batch: Sequence[Any]
    task: Task
    collate: Collate = default_collate
    num_steps: int = 3
    dtype: torch.dtype = torch.float64


def assert_same_as_one_process(
    model: ModelProvider,
    batch: Sequence[Any],
    *,
    task: Task,
    layouts: Sequence[str],
    collate: Collate = default_collate,
    rtol: float = 1e-9,
) -> None:
    """Assert that losses, gradients, gradient norms and trained parameters of every layout equal those of one process.

    Each run is a Trainer job in float64 on CPU: three steps with AdamW and clipping, with one process per rank on this
    machine. A script that calls this function needs `if __name__ == "__main__":`, because these processes import it.
    All arguments must be picklable.

    Args:
        model: Provider that builds and parallelizes the model.
        batch: Samples of one step. Every step uses all of them, in a different order.
        task: Prepares inputs and computes the loss.
        layouts: Layouts such as `["dp_shard=4", "tp=2,cp_shard=2,microbatch=1"]`, see `parse_layout`.
        collate: Collates a list of samples into a batch.
        rtol: Maximum relative error ||got - expected|| / ||expected|| of a tensor.

    Raises:
        AssertionError: If a layout computes other values. The message names the layout, the first different tensor, and
            the index of its largest error.
    """
    experiment = Experiment(model=model, batch=batch, task=task, collate=collate)
    expected = trace_layout(experiment, parse_layout(""))
    for text in layouts:
        try:
            assert_trees_close(trace_layout(experiment, parse_layout(text)), expected, rtol=rtol)
        except AssertionError as error:
            error.add_note(f"in the layout {text!r}, compared with one process")
            raise


def trace_layout(
    experiment: Experiment, layout: Layout, *, around: Around = nullcontext, device: Device = "cpu"
) -> dict[str, Any]:
    """Train in a layout, and return the values of every step.

    Args:
        experiment: The training job.
        layout: The layout, which determines the number of processes.
        around: Function that returns a context manager around the training of each rank.
        device: "cpu", or "accelerator" to give each rank one of the machine's accelerators.

    Returns:
        For each key "step 1", "step 2" and so on, a dictionary of `loss`, `gradients` (full tensors on the CPU by
        parameter name) and `grad_norm`; under the key "parameters", the full trained parameters by name.

    Raises:
        AssertionError: If ranks have different losses or gradient norms.
    """
    with TemporaryDirectory() as folder:
        first, *others = run_ranks(
            _train, experiment, layout, folder, around, world_size=layout.world_size, device=device
        )
    for rank, other in enumerate(others, start=1):
        first["parameters"].update(other.pop("parameters", {}))
        for step, values in other.items():
            first[step]["gradients"].update(values.pop("gradients", {}))
            expected = {name: first[step][name] for name in values}
            assert values == expected, f"{step}: rank {rank} has {values}, rank 0 has {expected}"
    return first


def _train(experiment: Experiment, layout: Layout, folder: str, around: Around) -> dict[str, Any]:
    """Train on this rank and return its values.

    Of the ranks with the same pipeline stages, only the first returns gradients and parameters.
    """
    trace: dict[str, Any] = {}
    gradients: dict[int, Mapping[str, torch.Tensor]] = {}

    def take_step(done: StepDone) -> None:
        trace[f"step {done.step}"] = {
            "loss": done.loss.item(),
            "gradients": gradients[done.step],
            "grad_norm": done.grad_norm.item(),
        }

    def take_parameters(done: Finished) -> None:
        parameters = full_parameters(done.model)  # collective: called on every rank
        if done.ctx.rank % (done.ctx.world_size // done.ctx.size("regular", "pp")) == 0:
            trace["parameters"] = parameters
            return
        for values in trace.values():
            del values["gradients"]

    with around():
        trainer = experiment_trainer(experiment, layout, Path(folder))
        trainer.events.on(GradientsReady, lambda ready: gradients.update({ready.step: full_gradients(ready.model)}))
        trainer.events.on(StepDone, take_step)
        trainer.events.on(Finished, take_parameters)
        trainer.train()
    return trace


def experiment_trainer(experiment: Experiment, layout: Layout, folder: Path) -> Trainer:
    """Return the Trainer of an experiment in a layout, which writes to a folder."""
    return Trainer(
        _config(experiment, layout, folder),
        model=_in_dtype(experiment.model, experiment.dtype),
        data=_cast(list(experiment.batch), experiment.dtype),
        task=experiment.task,
        collate=experiment.collate,
    )


def _config(experiment: Experiment, layout: Layout, folder: Path) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            "steps": experiment.num_steps,
            "batch": {"global_size": len(experiment.batch), "microbatch_size": layout.microbatch_size},
            "run": {"folder": folder},
            "mesh": layout.mesh,
            "precision": "parameters",  # on accelerators, too
            "pipeline": {"schedule": layout.schedule, "draw": False},
            "optimizer": {"learning_rate": 1e-2},
            "gradients": {"max_norm": 1.0},
            "trackers": (),
            "logging": {"progress": False},
            "export": False,
            "rehearsal": False,
            # Garbage collection at fixed steps and these checks would take longer than the job.
            "host": {"collect_garbage_every": None},
            "resilience": {"health": {"enabled": False}, "watchdog": {"enabled": False}},
        }
    )


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


def _in_dtype(provider: ModelProvider, dtype: torch.dtype) -> ModelProvider:
    """Return a copy of a provider that converts its models to another dtype."""
    converted = copy(provider)
    # Build with the copy, because `build` may set attributes that other methods read.
    build = MethodType(type(provider).build, converted)
    vars(converted)["build"] = lambda stage: build(stage).to(dtype)  # vars, because providers may be frozen
    return converted
