"""Train modules of the zoo in a plain torch loop and by the Trainer in a layout, and compare the results.

The plain loop is written without d9d. Both use SGD, whose update is proportional to the gradient's rounding error;
Adam would turn a gradient that is zero except for rounding into a full step.
"""

import io
import random
import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from functools import partial
from math import log2, prod
from pathlib import Path
from typing import Any, NoReturn, TypeAlias
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import BATCH, Batch, Entry, entry, loss_of, values_of

from d9d_dist import (
    ContextSplit,
    DistributedContext,
    GradientSync,
    MeshConfig,
    StageInfo,
    UserError,
    canonical_name,
)
from d9d_dist.testing import full_gradients, full_parameters, full_tree
from d9d_loop import (
    Finished,
    GradientsReady,
    Loss,
    ModelProvider,
    ModelReady,
    StepDone,
    Task,
    Trainer,
    TrainerConfig,
    hugging_face_model,
)
from d9d_loop.model._block_trace import trace_blocks
from d9d_loop.model._hugging_face_context import _Parts
from d9d_loop.model._hugging_face_stage import cut_stage
from d9d_pipeline.shared_parameters import SharedParameters

STEPS = 3
LEARNING_RATE = 1e-2
SEED = 5

Trace: TypeAlias = dict[str, Any]
"""The values as built, the loss and the gradients of each step, the trained values; or why there are none."""


def plain_traces(names: Sequence[str], folder: str) -> dict[str, str]:
    """Train in a plain loop and write the traces to a folder; return the names of modules that do not run."""
    failed = {}
    for name in names:
        try:
            with cpu_seconds(20):
                trace = _plain_trace(entry(name))
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:300]
        else:
            torch.save(trace, trace_path(folder, name))
    return failed


@contextmanager
def cpu_seconds(limit: float) -> Generator[None]:
    """Limit the CPU time of the body, independent of the load of the machine."""

    def stop(*_: Any) -> NoReturn:
        raise TimeoutError(f"it computes for more than {limit} seconds")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def built_module(animal: Entry) -> torch.nn.Module:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    return animal.module()


def _check_no_draws(animal: Entry) -> None:
    """Refuse a module with random outputs: they depend on the layout."""
    losses = []
    for seed in (1, 2):
        model, batch = built_module(animal), animal.batch()
        torch.manual_seed(seed)
        np.random.seed(seed)
        losses.append(loss_of(model(**batch), BATCH).item())
    if abs(losses[0] - losses[1]) > 1e-5 * abs(losses[0]):
        raise ValueError("forward draws random numbers")


def _plain_trace(animal: Entry) -> Trace:
    """Return the trace of a plain loop; its `errors` are those of rounding, relative to all tensors together.

    They are separate for losses, gradients and trained values. They are the differences from a loop that computes
    everything in float64, but at least the standard deviation of one rounding, unit / sqrt(12). A module that computes
    in float64 is compared with a loop in float32 instead, and the differences are divided by 2^29, the ratio of the
    rounding units: to first order errors are proportional to the unit.
    """
    _check_no_draws(animal)
    batch = animal.batch()
    trace = plain_loop(built_module(animal), batch)
    unit = trace["unit"]
    trace["errors"] = dict.fromkeys(("loss", "gradient", "trained"), unit)
    model, cast = built_module(animal), _to_float64 if unit else _to_float32
    model, batch = model._apply(cast), {name: cast(x) for name, x in batch.items()}
    # Quantized operators do not support float64; their results must be equal to within one rounding.
    with suppress(AssertionError, NotImplementedError, RuntimeError), float64_by_default() if unit else nullcontext():
        with AllFloat64() if unit else nullcontext():
            errors = _errors_of(trace, plain_loop(model, batch))
        trace["errors"] = {
            what: max(error, unit / 12**0.5) if unit else error * 2.0**-29 for what, error in errors.items()
        }
    return trace


def _errors_of(trace: Trace, exact: Trace) -> dict[str, float]:
    steps = list(zip(trace["steps"], exact["steps"], strict=True))
    return {
        "loss": _relative_error(_losses(trace), _losses(exact)),
        "gradient": max(_relative_error(ours["gradients"], theirs["gradients"]) for ours, theirs in steps),
        "trained": _relative_error(trace["trained"], exact["trained"]),
    }


def _relative_error(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Return the largest error of a tensor, relative to the norm of all tensors together."""
    wide = torch.complex128
    scale = sum(float(x.to(wide).nan_to_num(0.0, 0.0, 0.0).norm()) ** 2 for x in theirs.values()) ** 0.5
    errors = [float((ours[name].to(wide) - x.to(wide)).nan_to_num(0.0, 0.0, 0.0).norm()) for name, x in theirs.items()]
    return max(errors, default=0.0) / scale if scale else 0.0


def mean_loss(outputs: Any, _batch: Batch) -> Tensor:
    """Return the mean over samples of `loss_of`."""
    return loss_of(outputs, BATCH) / BATCH


def plain_loop(model: torch.nn.Module, batch: Batch, mean_loss: Callable[[Any, Batch], Tensor] = mean_loss) -> Trace:
    """Train a model; `unit` is the rounding unit of the least precise operator, 0 if all compute in float64."""
    trace: Trace = {"built": values_of(model), "steps": []}
    rounding = _Rounding()
    for _ in range(STEPS):
        with rounding:
            outputs = model(**batch)
        loss = mean_loss(outputs, batch)
        loss.backward()
        gradients = {name: p.grad.to_dense().clone() for name, p in model.named_parameters() if p.grad is not None}
        trace["steps"].append({"loss": loss.item(), "gradients": gradients})
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(LEARNING_RATE * parameter.grad)
                    parameter.grad = None
    trace["trained"] = values_of(model)
    trace["unit"] = rounding.unit
    assert all(torch.isfinite(torch.tensor(step["loss"])) for step in trace["steps"]), "the loss is not finite"
    return trace


class _Rounding(TorchFunctionMode):
    """Records the largest rounding unit of operators that compute the loss."""

    unit = 0.0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        units = [
            torch.finfo(leaf.dtype).eps
            for leaf in pytree.tree_leaves(output)
            if isinstance(leaf, Tensor) and _is_narrow(leaf.dtype) and leaf.requires_grad
        ]
        self.unit = max([self.unit, *units])
        return output


class AllFloat64(TorchDispatchMode):
    """Lets operators that would cast to, or create, narrower floating-point tensors give float64 or complex128."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(torch.dtype, _wide, (args, kwargs or {}))
        return func(*args, **kwargs)


@contextmanager
def float64_by_default() -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype != _wide(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def _to_float64(tensor: Tensor) -> Tensor:
    return tensor.to(_wide(tensor.dtype))


def _to_float32(tensor: Tensor) -> Tensor:
    narrow = {torch.float64: torch.float32, torch.complex128: torch.complex64}
    return tensor.to(narrow.get(tensor.dtype, tensor.dtype))


class _Sum(Task):
    """The loss of all samples, by `loss_of`."""

    def inputs(self, batch: dict[str, Tensor]) -> Mapping[str, Any]:
        return batch

    def loss(self, outputs: Any, batch: dict[str, Tensor]) -> Loss:
        size = len(next(iter(batch.values())))
        return Loss(loss_of(outputs, size), weight=size)


class SumOfRows(_Sum):
    """The loss of all samples of a decoder, of which each context-parallel rank has a part of each row."""

    _split: ContextSplit | None = None

    def split_sequence(self, batch: dict[str, Tensor], split: ContextSplit) -> dict[str, Any]:
        self._split = split
        return split.split(batch)

    def loss(self, outputs: Any, batch: dict[str, Tensor]) -> Loss:
        size, length = batch["input_ids"].shape
        ranks = 1 if self._split is None else self._split.mesh.size()
        total = torch.zeros((), dtype=torch.float64)
        for leaf in pytree.tree_leaves(dict(outputs)):
            if not isinstance(leaf, Tensor) or leaf.shape[:2] != (size, length) or not leaf.is_floating_point():
                continue
            values = leaf.reshape(size, length, -1).double().clamp(-1e4, 1e4)
            places = torch.arange(ranks * length * values.shape[2], dtype=torch.float64) + 1
            factors = torch.cos(places).view(ranks * length, -1)
            factors = factors if self._split is None else self._split.split(factors, dim=0)
            total = total + (factors * values + 0.5 * values.square()).sum() / len(places)
        return Loss(total, weight=size / ranks)


class _WithItsPlan(ModelProvider):
    """Provider of a model of `transformers`, split by the plan that it carries."""

    late_init = False

    def __init__(self, animal: Entry) -> None:
        self._animal = animal

    def build(self, stage: StageInfo) -> torch.nn.Module:
        return self._animal.module()

    def parallelize(self, model: Any, ctx: DistributedContext) -> None:
        hugging_face_model(model.config, type(model)).parallelize(model, ctx)


class _InStages(ModelProvider):
    """Provider of a decoder of `transformers`, split into pipeline stages."""

    late_init = False

    def __init__(self, animal: Entry) -> None:
        self._animal = animal

    def build(self, stage: StageInfo) -> torch.nn.Module:
        model = self._animal.module()
        if stage.count > 1:
            cut_stage(model, trace_blocks(model), stage)
        return model


@contextmanager
def _stage_mutant(name: str | None) -> Generator[None]:
    """Apply a bug: a skipped block, a rotary table of other positions, or a tied head's gradient summed twice."""
    to_owner, real = SharedParameters._to_owner, cut_stage

    def twice(self: SharedParameters, pair: Any) -> Tensor | None:
        gradient = to_owner(self, pair)
        return None if gradient is None else 2 * gradient

    def cut(model: Any, trace: Any, stage: StageInfo) -> None:
        real(model, trace, stage)
        if not stage.is_last:
            return
        if name == "block":
            model.get_submodule(trace.blocks)[-1].forward = lambda hidden, *args, **kwargs: hidden
        if name == "rotary table":
            table = model.base_model.rotary_emb
            table.forward = partial(_at_other_positions, table.forward)

    tied = mock.patch.object(SharedParameters, "_to_owner", twice) if name == "tied head" else nullcontext()
    with tied, mock.patch.dict(globals(), cut_stage=cut) if name in ("block", "rotary table") else nullcontext():
        yield


def _at_other_positions(forward: Callable[..., Any], hidden: Tensor, position_ids: Tensor, *options: Any) -> Any:
    return forward(hidden, 2 * position_ids, *options)


def mutant_stage_differences(name: str, folder: str, mutant: str) -> dict[str, str]:
    """Train a decoder in two pipeline stages with a bug of `_stage_mutant`."""
    with _stage_mutant(mutant):
        return stage_differences([name], folder, (2,))


def stage_differences(names: Sequence[str], folder: str, counts: Sequence[int] = (2, 3)) -> dict[str, str]:
    """Train decoders in pipeline stages of one process; return the first difference or error of each."""
    found: dict[str, str] = {}
    for name in names:
        expected = torch.load(trace_path(folder, name), weights_only=True)
        for count in counts:
            schedule = {"kind": "looped_bfs", "stages_per_rank": count}
            try:
                trace = train_entry(
                    entry(name), {}, trace_path(folder, f"{name} {count}"), pipeline={"schedule": schedule}
                )
            except UserError as error:
                found[name] = f"error: {error}"
                break
            except Exception as error:
                found[name] = f"{count} stages: {type(error).__name__}: {error}"[:600]
                break
            if lines := list(compare_traces(trace, expected, 1)):
                found[name] = f"{count} stages: {lines[0]}"
                break
    return found


def context_differences(
    names: Sequence[str], mesh: Mapping[str, int] | None = None, mutant: str | None = None
) -> dict[str, str]:
    """Compare decoders on two context-parallel ranks with whole rows in float64; return differences and errors.

    Collective. Compares the loss, each gradient, and the loss after a step.
    """
    found: dict[str, str] = {}
    with MeshConfig(**(mesh or {"context_parallel_shard": 2})).build() as ctx, context_mutant(mutant):
        for name in names:
            try:
                animal = entry(name)
                batch, model = animal.batch(), built_module(animal)
                # Norms and rotary tables that compute in float32 round differently.
                with cpu_seconds(40), float64_by_default(), AllFloat64():
                    expected = _two_losses(model, batch, None)
            except Exception as error:
                found[name] = f"not run: {type(error).__name__}: {error}"[:300]
                continue
            try:
                model: Any = built_module(animal)
                provider = hugging_face_model(model.config, type(model))
                provider.parallelize(model, ctx)
                with float64_by_default(), AllFloat64():
                    actual = _two_losses(model, batch, ctx)
            except UserError as error:
                found[name] = f"error: {error}"
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"[:600]
            else:
                if lines := list(compare_values(name, actual, expected, 0.0)):
                    found[name] = lines[0]
    return found


def _two_losses(model: Any, batch: Batch, ctx: DistributedContext | None) -> dict[str, Tensor]:
    """Return the gradients of a step and the losses before and after it; `ctx` has the context-parallel ranks."""
    task, losses = SumOfRows(), []
    gradients: dict[str, Tensor] = {}
    sync = None if ctx is None else GradientSync(model)
    if ctx is not None:
        dp = ctx.mesh_for("batch")["dp"]
        batch = {name: each.chunk(dp.size())[dp.get_local_rank()] for name, each in batch.items()}
    for _ in range(2):
        rows = batch if ctx is None else task.split_sequence(batch, ContextSplit(ctx.mesh_for("batch")["cp"]))
        loss = task.loss(model(**task.inputs(rows)), rows).total
        losses.append(loss.detach().clone())
        if gradients:
            break
        loss.backward()
        if sync is not None:
            sync.finish()
        gradients = full_gradients(model)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(LEARNING_RATE * parameter.grad)
    values = torch.stack(losses)
    if ctx is not None:
        dist.all_reduce(values, group=ctx.group_for("batch", "dp", "cp"))
    return {**gradients, "losses": values}


@contextmanager
def context_mutant(name: str | None) -> Generator[None]:
    """Apply a bug: masks or rotary tables of local positions, or gathered rows whose gradients are not summed."""
    if name == "gradients":
        join = ContextSplit.join
        with mock.patch.object(
            ContextSplit, "join", lambda self, tree, dim=1, gradient="equal": join(self, tree, dim=dim)
        ):
            yield
        return
    part = _Parts._part

    def local(self: Any, tensor: Tensor, dim: int) -> Tensor:
        is_mask = dim == 2 and tensor.dim() == 4 and not tensor.requires_grad
        is_table = tensor.is_floating_point() and not tensor.requires_grad and not is_mask
        if (name == "masks" and is_mask) or (name == "rotary tables" and is_table):
            return tensor.narrow(dim, 0, tensor.shape[dim] // self._split.mesh.size())
        return part(self, tensor, dim)

    with mock.patch.object(_Parts, "_part", local) if name is not None else nullcontext():
        yield


def differences(names: Sequence[str], meshes: Sequence[Mapping[str, int]], folder: str) -> dict[str, list[str]]:
    """Train in layouts and return the differences from the plain loop; refusals start with "refused".

    Collective. The list of a module without differences is empty.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        expected = torch.load(trace_path(folder, name), weights_only=True)
        found[name] = []
        for mesh in meshes:
            if "tensor_parallel" in mesh and not entry(name).has_tensor_plan:
                continue
            layout = ",".join(f"{axis}={size}" for axis, size in mesh.items()) or "one process"
            try:
                trace = train_entry(entry(name), mesh, trace_path(folder, f"{name} {layout}"))
            except UserError as error:
                found[name].append(f"refused: {error}")
                break
            except Exception as error:
                found[name].append(f"{layout}: {type(error).__name__}: {error}"[:600])
                continue
            found[name] += [f"{layout}: {line}" for line in compare_traces(trace, expected, prod(mesh.values()))][:4]
    return found


def compiled_differences(name: str, mesh: Mapping[str, int], folder: str) -> tuple[list[str], int, str]:
    """Train a module that Inductor compiles.

    Returns:
        The differences from the plain loop, the number of compiled graphs, and what the job printed.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.graph_break_reasons.clear()
    printed = io.StringIO()
    expected = torch.load(trace_path(folder, name), weights_only=True)
    with redirect_stdout(printed):
        trace = train_entry(entry(name), mesh, Path(folder) / f"compiled {len(mesh)}", compile="inductor")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return list(compare_traces(trace, expected, prod(mesh.values()))), graphs, printed.getvalue()


def train_entry(
    animal: Entry,
    mesh: Mapping[str, int],
    folder: Path,
    *,
    model: ModelProvider | None = None,
    task: Task | None = None,
    **settings: Any,
) -> Trace:
    """Train a module by the Trainer; return its trace. Collective."""
    batch = animal.batch()
    samples = [{name: x[row] for name, x in batch.items()} for row in range(BATCH)]
    trace: Trace = {"steps": [{} for _ in range(STEPS)]}

    def values(model: torch.nn.Module) -> dict[str, Tensor]:
        buffers = {canonical_name(name): buffer for name, buffer in model.named_buffers()}
        return {**full_parameters(model), **full_tree(buffers)}

    trainer = Trainer(
        _config(mesh, folder, settings),
        model=model or _provider(animal, mesh, settings),
        data=samples,
        task=task or _Sum(),
        optimizer=_sgd,
        lr_schedule=_constant,
    )
    trainer.events.on(ModelReady, lambda event: trace.update(built=values(event.model)))
    trainer.events.on(
        GradientsReady, lambda event: trace["steps"][event.step - 1].update(gradients=full_gradients(event.model))
    )
    trainer.events.on(StepDone, lambda event: trace["steps"][event.step - 1].update(loss=event.loss.item()))
    trainer.events.on(Finished, lambda event: trace.update(trained=values(event.model)))
    trainer.train()
    return trace


def _provider(
    animal: Entry, mesh: Mapping[str, int], settings: Mapping[str, Any]
) -> ModelProvider | Callable[[StageInfo], torch.nn.Module]:
    if "pipeline" in settings:
        return _InStages(animal)
    return _WithItsPlan(animal) if "tensor_parallel" in mesh else lambda stage: animal.module()


def _sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    # Not fused or foreach: these do not support mixed dtypes.
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, foreach=False)


def _constant(_step: int) -> float:
    return 1.0


def _config(mesh: Mapping[str, int], folder: Path, settings: Mapping[str, Any]) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            "steps": STEPS,
            "seed": SEED,
            "batch": {"global_size": BATCH},
            **settings,
            "run": {"folder": folder},
            "mesh": mesh,
            "gradients": {"max_norm": None},
            "trackers": (),
            "logging": {"progress": False, "draw_lr_schedule": False},
            "export": False,
            "rehearsal": False,
            "host": {"collect_garbage_every": None},
            "resilience": {
                "health": {"enabled": False},
                "watchdog": {"enabled": False},
                "timeouts": {"startup_seconds": 300, "step_seconds": 300},
            },
        }
    )


def compare_traces(trace: Trace, expected: Trace, num_ranks: int) -> Iterator[str]:
    """Yield the differences. The bounds of losses, gradients and trained values follow from their error E of rounding.

    A layout of R ranks rounds R parts of each sum over samples, and log2(R) sums of them, where the plain loop rounds
    once: its error is at most (1 + log2(R)) E. The plain loop's own error is E.
    """
    bounds = {what: (2 + log2(num_ranks)) * error for what, error in expected["errors"].items()}
    for name, value in expected["built"].items():
        if name not in trace["built"]:
            yield f"built: {name} is missing"
        elif trace["built"][name].dtype != value.dtype or not torch.equal(trace["built"][name], value):
            yield f"built: {name} has other values"
    for name in trace["built"]:
        if name not in expected["built"]:
            yield f"built: {name} was not built"
    yield from compare_values("losses", _losses(trace), _losses(expected), bounds["loss"])
    for step, (ours, theirs) in enumerate(zip(trace["steps"], expected["steps"], strict=True), start=1):
        yield from compare_values(f"gradient {step}", ours["gradients"], theirs["gradients"], bounds["gradient"])
    yield from compare_values("trained", trace["trained"], expected["trained"], bounds["trained"])


def _losses(trace: Trace) -> dict[str, Tensor]:
    """Return the losses as one tensor: a loss may be a sum that cancels in some step."""
    return {"of all steps": torch.tensor([step["loss"] for step in trace["steps"]], dtype=torch.float64)}


def compare_values(what: str, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], bound: float) -> Iterator[str]:
    """Compare to within 1e-9 of a tensor's norm plus the rounding of canceling sums, in units of the module's norm.

    A gradient that is zero in exact arithmetic is a sum of about a thousand numbers of the size of the others.
    """
    wide = {name: x.to(torch.complex128 if x.is_complex() else torch.float64) for name, x in theirs.items()}
    scale = sum(float(x[x.isfinite()].norm()) ** 2 for x in wide.values()) ** 0.5
    slack = max(bound, 2.0**-40) * scale
    for name, expected in wide.items():
        if name not in ours:
            if expected.any():
                yield f"{what} {name}: missing"
            continue
        error = (ours[name].to(expected.dtype) - expected).nan_to_num(0.0, 0.0, 0.0).norm()
        if not error <= 1e-9 * expected[expected.isfinite()].norm() + slack:
            yield f"{what} {name}: error {float(error):.3g} of {float(expected.norm()):.3g}, bound {slack:.3g}"
    for name in ours:
        if name not in wide and ours[name].any():
            yield f"{what} {name}: not expected"


def trace_path(folder: str, name: str) -> Path:
    return Path(folder) / name.replace("/", "_")
