"""Scores of tokens: forward passes without gradients that return values per token in the order of the batches."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from d9d_dist import UserError
from d9d_dist.collectives.tree_gather import all_gather_trees
from d9d_loop.engine.pipeline import Pipeline
from d9d_loop.isolation import evaluation_mode
from d9d_loop.task import BatchTask, Task
from d9d_pipeline import Inputs

RecordLayers: TypeAlias = Callable[[nn.Module], AbstractContextManager[Mapping[int, Sequence[Tensor]]]]
"""Context manager such as `d9d_moe.record_experts`: records values [B, L, A] of each layer in each forward pass.

Yields the records by the index of the layer in the whole model; layers without values have empty lists.
"""

ReadTokens: TypeAlias = Callable[[Any, Any], Mapping[str, Tensor]]
"""Function of the model's outputs for a batch and the batch; returns values per token [B, L] by name."""


@runtime_checkable
class ReadsScores(Protocol):
    """Task that reads the scores of its batches from the outputs of the model, such as logits."""

    def scores(self, outputs: Any, batch: Any) -> Mapping[str, Tensor]:
        """Return values per token [B, L] by name."""
        ...


def score(
    batches: Sequence[Any],
    num_own: int,
    *,
    pipeline: Pipeline,
    task: BatchTask,
    read: ReadTokens | None,
    experts: RecordLayers | None,
) -> list[Mapping[str, Tensor]]:
    """Return values per token of the first `num_own` batches; see `Engine.score`. `batches` are on the device."""
    if read is None and isinstance(task, ReadsScores) and callable(task.scores):
        read = task.scores
    if read is None:
        _check(pipeline)
    values: dict[int, Mapping[str, Tensor]] = {}

    def scoring_inputs(batch: Any) -> Inputs:
        inputs = pipeline.inputs_of(task, batch)
        return Inputs(*inputs.first, **{**inputs.shared, "scores": True})

    def take(outputs: Any, index: int, batch: Any) -> None:
        if index < num_own:
            values[index] = _scores_of(outputs) if read is None else read(outputs, batch)

    record = nullcontext({}) if experts is None else experts(pipeline.model)
    with evaluation_mode(pipeline.model), record as found:
        inputs = scoring_inputs if read is None else partial(pipeline.inputs_of, task)
        pipeline.forward(batches, len(batches), inputs=inputs, on_output=take)
    if experts is not None:
        of_layers = _joined(found, pipeline)
        values = {index: {**each, "expert_indices": of_layers[index]} for index, each in values.items()}
    return pipeline.gather_tokens([values[index] for index in sorted(values)])


def reference_values(
    batches: Iterable[Any],
    num_batches: int,
    *,
    pipeline: Pipeline,
    task: Task,
    inputs: Callable[[Any], Inputs] | None = None,
) -> dict[int, Mapping[str, Tensor]]:
    """Return `Task.reference_values` by the index of the batch, on the ranks of the last stage. Collective.

    Call it while the model acts as its reference. `inputs` returns the arguments of the model for a batch; by default
    those of the task.
    """
    found: dict[int, Mapping[str, Tensor]] = {}

    def take(outputs: Any, index: int, batch: Any) -> None:
        found[index] = task.reference_values(outputs, batch)

    with evaluation_mode(pipeline.model):
        pipeline.forward(batches, num_batches, inputs=inputs or partial(pipeline.inputs_of, task), on_output=take)
    return found


def _joined(found: Mapping[int, Sequence[Tensor]], pipeline: Pipeline) -> list[Tensor]:
    """Return for each batch the records of all layers, [B, L, layers, A]; -1 for layers without any. Collective."""
    layers = {str(layer): list(records) for layer, records in found.items()}
    if pipeline.group is not None:
        layers = {name: each for tree in all_gather_trees(layers, pipeline.group) for name, each in tree.items()}
    records = [layers[str(layer)] for layer in range(len(layers))]
    first = next(filter(None, records), None)
    if first is None:
        raise UserError("got experts=..., but the model has no layer with experts. Remove this argument.")
    return [
        torch.stack([each[index] if each else torch.full_like(like, -1) for each in records], dim=2)
        for index, like in enumerate(first)
    ]


_REMEDY = (
    "expected a decoder of d9d_modules, or a model with this argument. Otherwise pass `read` to `score`: a function "
    "that reads values per token from the model's outputs."
)


def _check(pipeline: Pipeline) -> None:
    for stage in pipeline.stages.values():
        arguments = inspect.signature(stage.forward).parameters
        if "scores" not in arguments and not any(each.kind is each.VAR_KEYWORD for each in arguments.values()):
            raise UserError(f"{type(stage).__name__}.forward has no argument `scores`; {_REMEDY}")


def _scores_of(outputs: Any) -> Mapping[str, Tensor]:
    if not isinstance(outputs, Mapping) or ("logits" in outputs and "log_probs" not in outputs):
        raise UserError(f"the model ignored the argument `scores`, and returned a {type(outputs).__name__}; {_REMEDY}")
    return outputs
