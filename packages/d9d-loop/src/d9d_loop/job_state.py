"""What a job must remember to continue as if it had never stopped, and how that is saved and restored."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Protocol

import torch
from pydantic import ConfigDict, JsonValue, TypeAdapter
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.optim import Optimizer

from d9d_dist import DistributedContext, UserError, seed_everything
from d9d_loop.frozen_digest import frozen_digest
from d9d_metrics import Metric
from d9d_state import (
    CheckpointInfo,
    CheckpointStore,
    StateError,
    group_values,
    model_tensors,
    optimizer_numbers,
    optimizer_tensors,
    prepare_optimizer_for_load,
    rng_state,
    set_optimizer_numbers,
    set_rng_state,
)


@dataclass(slots=True, config=ConfigDict(ser_json_inf_nan="strings"))
class Record:
    """Where a job stands.

    Everything else follows from it: the data position and the learning rate are functions of the step.

    Attributes:
        step: Steps done.
        train_loss: Loss of the last step.
        evaluation: Values of the last evaluation.
        weight_per_second: Throughput so far, in units of the loss's weight.
        tracker: What trackers continue from; known to the main process.
    """

    step: int = 0
    train_loss: float | None = None
    evaluation: dict[str, float] = field(default_factory=dict)
    weight_per_second: float | None = None
    tracker: dict[str, JsonValue] = field(default_factory=dict)

    def quality(self, name: str) -> float | None:
        """Return a value of the last evaluation, for `checkpoint.best_by`; `None` if it has no such value.

        It is NaN if the evaluation's loss is not finite: a metric that compares may praise a model of NaNs.
        """
        value = self.evaluation.get(name)
        return value if value is None or math.isfinite(self.evaluation["loss"]) else math.nan

    def take(self, other: "Record") -> None:
        """Stand where another record does."""
        self.step, self.train_loss = other.step, other.train_loss
        self.evaluation, self.weight_per_second = other.evaluation, other.weight_per_second
        self.tracker = other.tracker


@dataclass(frozen=True, slots=True)
class _RankState:
    """What a checkpoint keeps for each rank."""

    random: JsonValue
    metrics: dict[str, dict[str, list[str]]]
    optimizer: JsonValue


_RECORD = TypeAdapter(Record)
_RANK_STATE = TypeAdapter(_RankState)


class Stateful(Protocol):
    """A part of a job with a state of its own, which is JSON and the same on every rank."""

    def state_dict(self) -> JsonValue:
        """What it is to continue from."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Continue from what `state_dict` gave."""
        ...


class JobState:
    """The model, the optimizer, the metrics and the record of a job, saved and restored together.

    Args:
        store: Where checkpoints are.
        model: Materialised and parallelised.
        optimizer: Over its parameters, as its provider built it.
        metrics: Those that gather values between two reports, on this rank.
        config: The resolved configuration, kept in each checkpoint for people to read.
        parts: What else continues where it was, by name; equal on every rank, and kept as JSON.
        data_identity: What the order of samples follows from.
        seed: The job's seed.
        ctx: The job's context.
        trainable_only: Whether checkpoints leave out parameters that do not require gradients. They keep a digest of
            them, and are restored over the weights that the job began with.
        on_saved: Called with the step of each checkpoint that is complete: at the end of `save`, or for one that was
            written in the background before the next one begins; at the same moment on every rank.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        metrics: Mapping[str, Metric],
        config: JsonValue,
        parts: Mapping[str, Stateful],
        data_identity: JsonValue,
        seed: int,
        ctx: DistributedContext,
        trainable_only: bool = False,
        on_saved: Callable[[int], None] = lambda _step: None,
    ) -> None:
        self._store, self._model, self._optimizer = store, model, optimizer
        self._trainable_only = trainable_only
        self._frozen_digest: str | None = None
        self._is_digest_checked = False
        self._metrics, self._config = metrics, config
        self._parts, self._data_identity = parts, data_identity
        self._seed, self._ctx = seed, ctx
        self._built_groups = group_values(optimizer)
        self._built_values = [_values_of(group) for group in optimizer.param_groups]
        self._on_saved = on_saved
        self._being_written: int | None = None

    def restore(self, initialize: Callable[[], object] = lambda: None) -> Record:
        """Continue from the newest sound checkpoint, or begin if there is none. Collective.

        Random states are those of the checkpoint if it was saved by as many ranks; else they are seeded anew from the
        seed and the step.

        Args:
            initialize: Gives the model what a new job begins with. Called unless checkpoints have all of it.

        Raises:
            UserError: On every rank, if the checkpoint has trainable parameters only, and the frozen ones are not those
                that it was saved with.
            StateError: On every rank, if there are checkpoints, but none that is sound.
        """
        self._store.discard_partials(self._ctx)
        info = self._store.newest(self._ctx)
        expected = None if info is None else frozen_digest_of(info)
        if info is None:
            self._store.check_new(self._ctx)
        depends_on_initial = self._trainable_only or expected is not None
        if info is None or depends_on_initial:
            initialize()
        if depends_on_initial:
            self._frozen_digest = frozen_digest(self._model, self._ctx)
        if info is None:
            return Record()
        if expected is not None and self._frozen_digest != expected:
            raise UserError(_other_frozen(info))
        self._load_tensors(info, trainable_only=expected is not None)
        state: Any = info.state
        record = _RECORD.validate_python(state["record"])
        for name, part in self._parts.items():
            part.load_state_dict(state["parts"][name])
        rank_states = [_RANK_STATE.validate_python(rank_state) for rank_state in info.rank_states]
        set_optimizer_numbers(self._model, self._optimizer, [rank_state.optimizer for rank_state in rank_states])
        for metric in self._metrics.values():
            metric.reset()
        for rank_state in rank_states[self._ctx.rank :: self._ctx.world_size]:
            _gather_into(self._metrics, rank_state.metrics)
        if len(rank_states) == self._ctx.world_size:
            set_rng_state(rank_states[self._ctx.rank].random)
        else:
            seed_everything(self._seed, self._ctx, step=record.step)
        return record

    def _load_tensors(self, info: CheckpointInfo, *, trainable_only: bool) -> None:
        prepare_optimizer_for_load(self._model, self._optimizer, info)
        self._store.load(info, self._tensors(trainable_only=trainable_only), self._ctx)
        if not trainable_only:  # it may have brought frozen parameters that the job does not begin with
            self._check_frozen()
            self._is_digest_checked = False

    def rewind(self) -> Record:
        """Go back to the newest sound checkpoint. Collective.

        Raises:
            StateError: On every rank, if there is none.
        """
        self._store.wait()
        if not self._store.complete():
            raise StateError(
                "there is no checkpoint to go back to; expected one. Set checkpoint.every to fewer steps, or the "
                "policy for bad steps to skip or stop."
            )
        # A checkpoint has what changed before it. What changed since then is as it was built, too.
        for group, values in zip(self._optimizer.param_groups, self._built_values, strict=True):
            group.update(values)
        return self.restore()

    def prepare(self) -> None:
        """Make room for saves in the background, once the optimizer has all of its state. Collective.

        Raises:
            UserError: On every rank, if frozen parameters would be left out that are not what the job began with.
        """
        self._check_frozen()
        self._store.prepare(self._tensors(trainable_only=self._trainable_only), self._ctx)

    def save(self, record: Record, *, metric: float | None = None, background: bool = False) -> None:
        """Save a checkpoint of the record's step. Collective.

        Args:
            record: Where the job stands.
            metric: How good the model is, if it was evaluated.
            background: Whether training may go on before it is complete.

        Raises:
            UserError: On every rank, if frozen parameters would be left out that are not what the job began with.
            StateError: On every rank, if this save failed on one, or the one before in the background.
        """
        self._check_frozen()
        self.finish()
        write = self._store.save_async if background else self._store.save
        write(
            record.step,
            self._tensors(trainable_only=self._trainable_only),
            # A loss may be NaN and a perplexity infinite, which JSON knows as text only.
            state={
                "record": json.loads(_RECORD.dump_json(record)),
                "config": self._config,
                "data_identity": self._data_identity,
                "frozen_digest": self._frozen_digest if self._trainable_only else None,
                "parts": {name: part.state_dict() for name, part in self._parts.items()},
            },
            rank_state={
                "random": rng_state(),
                "metrics": _gathered(self._metrics),
                # The schedule sets the learning rate of every step from what the optimizer was built with.
                "optimizer": optimizer_numbers(self._model, self._optimizer, since=self._built_groups, without=("lr",)),
            },
            metric=metric,
            ctx=self._ctx,
        )
        self._being_written = record.step if background else None
        if not background:
            self._on_saved(record.step)

    def finish(self) -> None:
        """Wait until the last checkpoint is complete. Collective.

        Raises:
            StateError: On every rank, if it failed.
        """
        self._store.wait()
        if self._being_written is not None:
            self._on_saved(self._being_written)
            self._being_written = None

    def raise_if_failed(self) -> None:
        """Raise what went wrong in a save in the background. Local and cheap.

        Raises:
            StateError: If one failed.
        """
        self._store.raise_if_failed()

    def _check_frozen(self) -> None:
        """Refuse, the first time, to leave out what could not be brought back: a handler may have changed it."""
        if not self._trainable_only or self._is_digest_checked:
            return
        if frozen_digest(self._model, self._ctx) != self._frozen_digest:
            raise UserError(
                "checkpoint.trainable_only = true, but parameters that do not require gradients are not what the job "
                "begins with, and no checkpoint would bring them back; expected the values of initial_weights, or "
                "those of the seed. Name the initial_weights that the run began with, do not change them in handlers "
                "or in the optimizer, or set checkpoint.trainable_only to false."
            )
        self._is_digest_checked = True

    def _tensors(self, *, trainable_only: bool) -> dict[str, Tensor]:
        return {
            **model_tensors(self._model, trainable_only=trainable_only),
            **optimizer_tensors(self._model, self._optimizer),
        }


def frozen_digest_of(info: CheckpointInfo) -> str | None:
    """The digest of the frozen parameters that a checkpoint leaves out; `None` if it has all parameters.

    Raises:
        StateError: If the checkpoint is damaged.
    """
    state: Any = info.state
    return state.get("frozen_digest")


def _other_frozen(info: CheckpointInfo) -> str:
    return (
        f"{info.folder} has trainable parameters only, and the frozen ones of this job are not those it was saved "
        "with; expected the same initial_weights, or without them the same seed. Use what the run began with, or "
        "--run.name for a new run."
    )


def _values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group of an optimizer holds besides its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _gathered(metrics: Mapping[str, Metric]) -> dict[str, dict[str, list[str]]]:
    """What metrics hold, as text: counts in decimal, and other numbers in hexadecimal, exact, infinities among them."""
    return {
        name: {
            key: [_written(value) for value in state.flatten().tolist()] for key, state in metric.state_dict().items()
        }
        for name, metric in metrics.items()
    }


def _written(value: float) -> str:
    return str(value) if isinstance(value, int) else value.hex()


def _gather_into(metrics: Mapping[str, Metric], saved: Mapping[str, Mapping[str, list[str]]]) -> None:
    """Let metrics take in what metrics of the same names held, on whichever rank that was."""
    for name in metrics.keys() & saved.keys():
        for key, accumulator in metrics[name].accumulators().items():
            read = float.fromhex if accumulator.value.is_floating_point() else int
            values = torch.tensor([read(value) for value in saved[name][key]], dtype=accumulator.value.dtype)
            accumulator.update(values.view(accumulator.value.shape).to(accumulator.value.device))
