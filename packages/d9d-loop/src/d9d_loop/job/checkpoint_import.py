"""Import of another library's checkpoint as the first checkpoint of a run."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from d9d_dist import UserError
from d9d_dist.errors import shorten
from d9d_loop.engine.optimizer_fit import check_state_fits
from d9d_loop.events import TrainResult
from d9d_loop.job.foreign_checkpoint import ForeignCheckpoint, read_foreign
from d9d_loop.job.job import Job
from d9d_loop.job.job_run import result_of
from d9d_loop.optimizers.optimizer import OptimizerProvider
from d9d_state import StateMapper
from d9d_state.checkpoint.tensors import named_parameters
from d9d_state.module_tensors import aliases, module_tensors, unique_tensors

_NO_EFFECT = {"params", "param_names", "initial_lr", "lr_scale", "foreach", "fused", "capturable", "differentiable"}


def import_checkpoint(job: Job, path: Path, *, step: int | None, optimizer: OptimizerProvider | None) -> TrainResult:
    """Load the checkpoint of another library, and save it as that of its step; see `Trainer.import_checkpoint`."""
    plan, model = job.plan, job.engine.model
    if job.state.restored is not None or job.ctx.world_size > 1:
        raise UserError(
            f"got {job.ctx.world_size} ranks, and a run with{'out' if job.state.restored is None else ''} checkpoints; "
            "expected an import in one process into a new run, which any number of ranks then continues. Use no "
            "torchrun, and --run.name NAME."
        )
    mapper = plan.model.provider.state_mapper(model)
    found = read_foreign(path, {*module_tensors(model), *(mapper.inputs if mapper else ())}, model, optimizer)
    step = found.step if step is None else step
    groups = mapper.groups if mapper else ()
    sources = {output: group.inputs for group in groups for output in group.outputs}
    if lines := list(_differences(job, found, sources, step)):
        raise UserError(f"the next step of {path} would not be that of the job:\n" + "\n".join(lines))
    parts, keys = dict[str, dict[str, Tensor]](), {key for state in found.states.values() for key in state}
    for key in keys - {"step"}:
        zeros = {name: torch.zeros_like(each) for name, each in found.weights.items()}
        given = {name: state[key] for name, state in found.states.items() if key in state}
        parts[key] = _mapped(zeros | given, mapper, model)
    tensors = module_tensors(model)
    for name, each in _mapped(found.weights, mapper, model).items():
        tensors[name].detach().copy_(each)
    for name, parameter, group in named_parameters(model, job.engine.optimizer):
        state = found.states.get(next(iter(sources.get(name, [name]))), {})
        kept = {key: parts[key][name].to(parameter, copy=True) for key in state if key != "step"}
        if "step" in state:
            kept["step"] = torch.tensor(float(state["step"]), device=parameter.device if group.get("fused") else "cpu")
        job.engine.optimizer.state[parameter] = kept
    check_state_fits(job.engine.optimizer, "its optimizer")
    cursor, used = plan.stream.cursor(None), 0
    for _ in range(step or 0):
        used += len(cursor.take(plan.config.batch.global_size))
    job.loader.load_state_dict({"position": used, "stream": cursor.state_dict()})
    job.record.step = step or 0
    job.state.save(job.record)
    return result_of(job, plan.config.run.dir)


def _mapped(tensors: dict[str, Tensor], mapper: StateMapper | None, model: nn.Module) -> dict[str, Tensor]:
    """Return tensors of the weights on disk as those of the model; raise `UserError` if they do not fit it."""
    first_names, groups = aliases(module_tensors(model)), mapper.groups if mapper else ()
    try:
        found = mapper.apply_all(tensors) if mapper else {first_names[name]: each for name, each in tensors.items()}
    except ValueError as error:
        raise UserError(f"the checkpoint does not fit the model: {error}") from None
    kept = {name for group in groups if not group.inputs for name in group.outputs}
    shapes = {name: each.shape for name, each in unique_tensors(model).items()}
    got = {name: list(each.shape) for name, each in found.items()}
    if wrong := [name for name in shapes if name not in kept and got.get(name) != list(shapes[name])]:
        lines = [f"{name} is {got.get(name)}, expected {list(shapes[name])}" for name in wrong]
        raise UserError(f"the checkpoint does not fit the model: {shorten(lines)}.")
    return found


def _differences(job: Job, found: ForeignCheckpoint, sources: Mapping[str, Any], step: int | None) -> Iterator[str]:
    """Yield a line for each setting by which the next step of the job would differ from that of the checkpoint."""
    if step is None or step >= job.plan.steps:
        yield f"  it is of step {step}, and the job has {job.plan.steps}; expected an earlier step, or step="
        return
    lines, known = defaultdict[str, list[str]](list), set[str]()
    for name, _, group in named_parameters(job.engine.model, job.engine.optimizer):
        known.update(sources.get(name, [name]))
        own: dict[str, Any] = dict(group)
        own["lr"] *= job.plan.lr_schedule(step)
        for each in sources.get(name, [name]):
            for key in found.settings.get(each, {}).keys() - _NO_EFFECT:
                theirs = found.settings[each][key]
                # A value that one of the optimizers does not have is off in the other.
                both = [torch.tensor(value or 0.0, dtype=torch.float64) for value in (theirs, own.get(key))]
                if not torch.allclose(*both, rtol=1e-6, atol=0.0):
                    lines[f"{key} is {theirs} in the checkpoint, and {own.get(key)} in the job:"].append(each)
        if len({str(found.states.get(each, {}).get("step")) for each in sources.get(name, [name])}) > 1:
            lines["a parameter consists of weights with other counts of steps:"].append(name)
    lines["only the optimizer of the checkpoint updates"] = sorted(found.settings.keys() - known)
    lines["only the optimizer of the job updates"] = sorted(known - found.settings.keys())
    yield from (f"  {text} {shorten(names)}" for text, names in lines.items() if names)
