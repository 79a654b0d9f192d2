"""Rehearsal of the first microbatch before a job starts, so that mistakes in the user's code are found early.

A forked process reads the samples, and runs the task and the model on fake tensors: torch propagates shapes and dtypes,
and computes nothing. Caches, counters and random states that the user's code changes are discarded with the process.
Code that depends on values, such as `.item()`, cannot be rehearsed; its errors appear in the first step.
"""

import gc
import inspect
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_dist import ContextSplit, UserError
from d9d_dist.data_parallel.parallelize import refuse_lost_writes
from d9d_dist.values.late_init import allocate
from d9d_loop.data.batch_reader import describe_none, seed_sample
from d9d_loop.data.in_fork import in_fork
from d9d_loop.data.indexed_stream import held_out_stream
from d9d_loop.data.sample_stream import SampleStream
from d9d_loop.job.flop_measurement import measure_flops
from d9d_loop.job.in_place import InPlaceCheck
from d9d_loop.job.plan import JobPlan
from d9d_loop.job.predictions import checked_predictions
from d9d_loop.job.sum_check import check_parts, check_sum
from d9d_loop.model.built_model import meta_copy
from d9d_loop.task import Loss, Task, row_multiple, to_inputs, with_reference
from d9d_loop.user_frames import describe_frames, user_frames
from d9d_metrics.sync import named_tensors
from d9d_pipeline import Inputs

_SECONDS = 20.0
_COLLATING = "collating the first samples"
_PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm")}
_JOB = ("process group", "accelerator", "forked", "fork-based", "gpu", "triton")
"""Words in messages of code that needs the running job: its process group, autograd's threads, or its device."""
_LIMITS = ("fake", "meta", "device", "data pointer", "data_ptr", "storage", "numpy", "subclass", "symbolic")
"""Words in messages of `RuntimeError` and `TypeError` that only fake tensors raise, and not a real step."""


def rehearse(plan: JobPlan) -> dict[str, Any] | None:
    """Run the first microbatches of a planned job and of its evaluation with fake tensors, in a forked process.

    Return the model FLOPs (`FlopFormula.to_json`), which the same process measures, and print why they are not known.
    If `config.rehearsal` is False, only measure them.

    The whole model runs, also of a pipeline; under context parallelism with the part of rank 0. Batches of another
    size, at the end of an epoch and of the evaluation, run too. No collectives. Only rank 0 rehearses. A job that is
    complete is not rehearsed. Meanwhile, this process collects garbage of all generations.

    Raises:
        UserError: If the dataset, the task or the model raises, or the task returns something other than a loss.
            Also if forward writes to parameters that the job shards.
    """
    if plan.model.launch.rank != 0 or plan.is_complete:
        gc.collect()
        return None
    try:
        found = json.loads(in_fork(lambda: _Rehearsal(plan).to_json(), seconds=_SECONDS, meanwhile=gc.collect))
    except (TimeoutError, EOFError) as error:
        why = f"took longer than {_SECONDS:g} s" if isinstance(error, TimeoutError) else "crashed"
        message = f"model FLOPs are not counted: their measurement {why}."
        if plan.config.rehearsal:
            message = (
                f"the rehearsal of the first batches {why}, so mistakes in the code of the job are found in its first "
                "steps, and model FLOPs are not counted. --rehearsal false skips it."
            )
        print(f"d9d: {message}", flush=True)
        return None
    if found["message"]:
        raise UserError(found["message"])
    if found["note"]:
        print(f"d9d: {found['note']}", flush=True)
    return found["flops"]


@final
class _Rehearsal:
    """Batches of the training and of the evaluation: read, collated, passed to the model and to the loss."""

    def __init__(self, plan: JobPlan) -> None:
        self._plan, self._task, self._model = plan, plan.task, plan.model.built.module
        self._name, self._batch = type(plan.task).__name__, ""  # the description of the batch, when it is read
        self._which = ""
        self._first_batch: Any = None  # whole rows
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        mesh = plan.model.mesh
        self._num_parts = num_parts = mesh.context_parallel_shard * mesh.context_parallel_replicate
        self._multiple = row_multiple(num_parts, mesh.tensor_parallel)
        self._split: Any = ContextSplit(_Rank(num_parts, 0)) if num_parts > 1 else None  # ty: ignore[invalid-argument-type] - no process group

    def to_json(self) -> str:
        """Return the mistake, and if there is none the FLOPs of the model and a note about them, as JSON."""
        config, whole = self._plan.config, self._plan.model.built.module
        found: dict[str, Any] = {"message": "", "flops": None, "note": ""}
        try:
            model: Any = meta_copy(whole)  # before code that keeps tensors in the model
        except Exception as error:
            model = error
        if config.rehearsal:
            found["message"] = self.message()
        if not found["message"]:
            try:
                if isinstance(model, Exception):
                    raise model
                if self._first_batch is None:
                    self._read(self._plan.stream, self._plan.microbatch_size)
                with _eager():
                    has_reference = self._plan.reference is not None
                    formula, has_unknown_mask = measure_flops(
                        model, self._task, self._first_batch, has_reference=has_reference
                    )
                found["flops"] = formula.to_json()
                if has_unknown_mask:
                    found["note"] = "model FLOPs count attention with a mask of its own as causal attention."
            except Exception as error:
                why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                found["note"] = f"model FLOPs are not counted: the model cannot be run without values ({why})."
        return json.dumps(found)

    def message(self) -> str:
        """Run the batches and return the message about the first mistake; empty if there is none."""
        with self._mode:
            if not _make_fake(self._model):
                return ""
        for which, stream, size in self._batches():
            try:
                self._which = which
                is_evaluation = stream is not self._plan.stream
                if is_evaluation:
                    self._model.eval()  # the last batches; those of the training run in the modes of the built model
                batch = self._read(stream, size)
                with torch.set_grad_enabled(not is_evaluation):
                    outputs = self._run(batch)
                if not is_evaluation:
                    check_sum(self._task, outputs, batch, has_reference=self._plan.reference is not None)
                    if self._split is not None and self._plan.reference is None and which == "first batch":
                        ranks = [_Rank(self._num_parts, rank) for rank in range(self._num_parts)]
                        check_parts(self._task, outputs, self._first_batch, [ContextSplit(each) for each in ranks])  # ty: ignore[invalid-argument-type] - no process group
            except UserError as error:
                return str(error)
            except _UserCodeError as failure:
                if not _is_limit(failure.error, is_fake=failure.is_fake):
                    return self._describe(failure)
        return ""

    def _batches(self) -> Iterator[tuple[str, SampleStream, int]]:
        """Yield name, stream and size of each batch to run: the first ones, and those of another size."""
        plan, size = self._plan, self._plan.microbatch_size
        yield "first batch", plan.stream, size
        if rest := plan.rest % size:
            yield f"last batch of an epoch, of {rest} samples,", plan.stream, rest
        data, num_samples = plan.evaluation_data, plan.config.evaluation.num_samples
        if isinstance(data, SampleStream):
            yield "first evaluation batch", data, size
        elif data is not None:
            stream, length = held_out_stream(data, num_samples), min(len(data), num_samples or len(data))
            yield "first evaluation batch", stream, size
            if length > size and length % size:
                yield f"last evaluation batch, of {length % size} samples,", stream, length % size

    def _read(self, stream: SampleStream, size: int) -> Any:
        """Read a batch, as the job reads it; under context parallelism, the part of rank 0."""
        plan = self._plan
        seed_sample(plan.config.seed, 0)
        first = stream is plan.stream and size == plan.microbatch_size
        entries = plan.first_entries() if first else stream.cursor().take(size)
        names = [f"sample {entry!r:.60}" for entry in entries]
        samples = [
            _call(f"reading {name}", stream.read, entry, is_fake=False)
            for entry, name in zip(entries, names, strict=True)
        ]
        note = partial(describe_none, samples, names)
        batch = _call(_COLLATING, plan.data.collate, samples, is_fake=False, note=note)
        self._batch = _describe_tree(batch)
        if self._multiple > 1:
            batch, _ = _call(f"{self._name}.pad_sequence", self._task.pad_sequence, batch, self._multiple)
        self._first_batch = batch if self._first_batch is None else self._first_batch
        if self._split is not None:
            batch = _call(f"{self._name}.split_sequence", self._task.split_sequence, batch, self._split)
            self._batch = _describe_tree(batch)
        return batch

    def _run(self, batch: Any) -> Any:
        """Pass a batch, as fake tensors, to the model, the loss and the metrics; return the outputs of the model."""
        with self._mode, _SameDtypes(), _eager():
            return self._run_fake(pytree.tree_map_only(Tensor, self._mode.from_tensor, batch))

    def _run_fake(self, batch: Any) -> Any:
        given = _call(f"{self._name}.inputs", self._task.inputs, batch)
        if not isinstance(given, Inputs | Mapping):
            first = next(iter(inspect.signature(self._model.forward).parameters), "x")
            raise UserError(
                f"{self._name}.inputs returned {_type_of(given)}; expected a dict with the arguments of "
                f'{self._signature()}, or Inputs. Name each argument: return {{"{first}": ...}}.'
            )
        inputs = to_inputs(given)
        if self._split is not None and "attention_mask" in inputs.shared:
            mask = pytree.tree_map_only(Tensor, self._part_of_mask, inputs.shared["attention_mask"])
            inputs = Inputs(*inputs.first, **{**inputs.shared, "attention_mask": mask})
        self._check_arguments(inputs)
        in_place = InPlaceCheck(self._model)
        with in_place:
            with refuse_lost_writes(self._model) if self._plan.model.shards_by_default else nullcontext():
                forward = partial(self._model, *inputs.first, **inputs.shared)
                outputs = _call(f"{type(self._model).__name__}.forward", forward)
            if self._plan.reference is not None:
                batch = _call(f"{self._name}.reference_values", with_reference, self._task, outputs, batch)
            loss = _call(f"{self._name}.loss", self._task.loss, outputs, batch)
        if torch.is_grad_enabled():
            check_loss(self._task, loss, outputs)
            if problem := in_place.message(loss.total):
                raise UserError(problem)
        metrics = _call(f"{self._name}.metrics", self._task.metrics)
        _call(
            f"{self._name}.update_metrics",
            lambda: self._task.update_metrics(metrics, outputs=outputs, batch=batch, loss=loss),
        )
        if self._plan.compute_metrics is not None and not torch.is_grad_enabled():
            _call(f"{self._name}.predictions", checked_predictions, self._task, outputs, batch)
        for name, metric in metrics.items():
            value = _call(f"compute() of the metric {name}", metric.compute)
            dict(named_tensors({name: value}))
        return outputs

    def _part_of_mask(self, mask: Tensor) -> Tensor:
        """Return the part of a mask [B, H, L, L], which tasks do not split, for the model, which is not split here."""
        if mask.dim() < 4 or mask.shape[-1] != mask.shape[-2]:
            return mask
        part = mask.shape[-1] // self._num_parts
        return mask[..., :part, :part]

    def _check_arguments(self, inputs: Inputs) -> None:
        try:
            inspect.signature(self._model.forward).bind(*inputs.first, **inputs.shared)
        except TypeError as error:
            names = [*(f"argument {number + 1}" for number in range(len(inputs.first))), *inputs.shared]
            raise UserError(
                f"{self._signature()} cannot be called with the result of {self._name}.inputs ({', '.join(names)}): "
                f"{error}. Rename the keys that {self._name}.inputs returns."
            ) from None

    def _signature(self) -> str:
        signature = inspect.signature(self._model.forward).replace(return_annotation=inspect.Signature.empty)
        bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
        return f"{type(self._model).__name__}.forward{signature.replace(parameters=bare)}"

    def _describe(self, failure: "_UserCodeError") -> str:
        error = failure.error
        what = f"{type(error).__name__}: {error}".rstrip(". \n") + failure.note.rstrip(".")
        lines = [f"the {self._which} fails in {failure.phase}: {what}.", *describe_frames(user_frames(error))]
        remedy = f"The batch is {self._batch}. {self._remedy(failure)}" if self._batch else _remedy_of_data(failure)
        return "\n".join([*lines, remedy])

    def _remedy(self, failure: "_UserCodeError") -> str:
        if "dtype" in str(failure.error):
            found = sorted({str(each.dtype).removeprefix("torch.") for each in self._model.parameters()})
            return (
                f"The parameters are {', '.join(found)}: convert the batch to this dtype in the dataset or in "
                f"{self._name}.inputs, such as batch[...].float()."
            )
        if isinstance(failure.error, KeyError):
            return "Use one of its keys, or add the key in the dataset or in collate."
        return "Nothing was started; correct the code, or set --rehearsal false if only this check fails."


@final
class _Rank:
    """Mesh of context-parallel ranks without a process group, for one rank."""

    mesh_dim_names, device_type = ("cp",), "cpu"

    def __init__(self, num_ranks: int, rank: int) -> None:
        self._num_ranks, self._rank = num_ranks, rank

    def size(self) -> int:
        return self._num_ranks

    def get_local_rank(self) -> int:
        return self._rank

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"{name} needs the process group")


@final
class _UserCodeError(Exception):
    """Exception of the user's code in a phase of the rehearsal; `is_fake` if it may have run on fake tensors."""

    def __init__(self, phase: str, error: Exception, *, note: str, is_fake: bool) -> None:
        super().__init__(phase)
        self.phase, self.error, self.note, self.is_fake = phase, error, note, is_fake


def _call(
    phase: str, function: Callable[..., Any], *args: Any, is_fake: bool = True, note: Callable[[], str] = str
) -> Any:
    try:
        return function(*args)
    except UserError:
        raise
    except Exception as error:
        raise _UserCodeError(phase, error, note=note(), is_fake=is_fake) from None


def check_loss(task: Task, loss: Any, outputs: Any) -> None:
    """Raise `UserError` unless a task's loss is a `Loss` with a 0-dim, differentiable total and a positive weight."""
    name = f"{type(task).__name__}.loss"
    if not isinstance(loss, Loss):
        raise UserError(
            f"{name} returned {_type_of(loss)}; expected Loss.sum(values, count): the loss summed over the microbatch, "
            "and the number of summed items. For a mean over n items, return Loss.mean(mean, n)."
        )
    total, weight = loss.total, loss.weight
    if not isinstance(total, Tensor) or total.dim():
        raise UserError(
            f"{name} returned a total of {_type_of(total)}; expected a 0-dim tensor. Sum the losses of the microbatch: "
            "total.sum()."
        )
    tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    if not total.requires_grad and any(leaf.requires_grad for leaf in tensors):
        raise UserError(
            f"{name} returned a total without a gradient, although the model's output has one; expected a total that "
            "is computed from the output by differentiable operations. Remove detach(), item() and no_grad()."
        )
    is_scalar = weight.numel() == 1 if isinstance(weight, Tensor) else isinstance(weight, int | float)
    if not is_scalar:
        raise UserError(
            f"{name} returned a weight of {_type_of(weight)}; expected a number or a 0-dim tensor, the number of the "
            "summed items. Use labels.numel(), or mask.sum()."
        )
    if not isinstance(weight, Tensor) and not (weight > 0 and math.isfinite(weight)):
        raise UserError(
            f"{name} returned weight = {weight}; expected a positive number, the number of the summed items. Use "
            "labels.numel(), or mask.sum()."
        )


@final
class _SameDtypes(TorchDispatchMode):
    """Mode that checks the operands of matrix products for equal dtypes, because fake tensors do not."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.name in _PRODUCTS:
            dtypes = {each.dtype for each in args if isinstance(each, Tensor)}
            if len(dtypes) > 1:
                names = " and ".join(sorted(str(each).removeprefix("torch.") for each in dtypes))
                raise RuntimeError(f"matrices must have the same dtype, but got {names}")
        return func(*args, **(kwargs or {}))


def _is_limit(error: BaseException, *, is_fake: bool) -> bool:
    """Return True if an exception may come from the fake tensors themselves, or from the missing process group."""
    chain: BaseException | None = error
    while chain is not None:
        if type(chain).__module__.startswith(("torch._subclasses", "torch.fx", "torch._dynamo")):
            return True
        if isinstance(chain, NotImplementedError | MemoryError | RecursionError):
            return True
        if any(word in str(chain).lower() for word in _JOB):
            return True
        is_raised_by_fakes = is_fake and isinstance(chain, RuntimeError | TypeError)
        if is_raised_by_fakes and any(word in str(chain).lower() for word in _LIMITS):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def _make_fake(model: nn.Module) -> bool:
    """Replace the parameters and buffers of a module by fake ones on the CPU; return False for tensor subclasses."""
    if any(type(each) not in {Tensor, nn.Parameter, nn.Buffer} for each in (*model.parameters(), *model.buffers())):
        return False
    allocate(model, device=torch.device("cpu"))
    return True


def _eager() -> Any:
    """Return a context in which compiled code runs eagerly."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else warnings.catch_warnings()


def _remedy_of_data(failure: "_UserCodeError") -> str:
    if failure.phase == _COLLATING:
        return (
            "The default collate function stacks tensors and numbers of equal shape. Make the shapes of all samples "
            "equal, or pass collate=, a function from a list of samples to a batch."
        )
    return "Nothing was started; correct the dataset."


def _describe_tree(tree: Any) -> str:
    """Describe a batch: dtypes and shapes of its tensors, types of other leaves."""
    match tree:
        case Tensor():
            return f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape)}"
        case Mapping():
            return "{" + ", ".join(f"{key}: {_describe_tree(value)}" for key, value in tree.items()) + "}"
        case list() | tuple():
            shown = ", ".join(_describe_tree(each) for each in tree[:4])
            return f"[{shown}{', ...' if len(tree) > 4 else ''}]"
        case _:
            return type(tree).__name__


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "None (is a return missing?)" if value is None else f"a {type(value).__name__}"
