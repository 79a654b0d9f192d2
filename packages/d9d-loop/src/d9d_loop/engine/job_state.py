"""State of a training job, saved and restored as checkpoints."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Any, Protocol

import torch
from pydantic import ConfigDict, JsonValue, TypeAdapter
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.optim import Optimizer

from d9d_dist import DistributedContext, UserError, agree, gather_json, rank_role, seed_everything
from d9d_dist.values.parameter_writes import refuse_later_writes
from d9d_loop.engine.optimizer_fit import check_state_fits
from d9d_loop.engine.subscriber_states import load_subscribers, subscriber_states
from d9d_loop.event_bus import Events
from d9d_loop.events import CheckpointSaved
from d9d_loop.model.model_digest import model_digest
from d9d_loop.optimizers.weight_average import WeightAverage
from d9d_loop.resilience.finite_check import check_finite
from d9d_loop.resilience.replica_check import check_buffers
from d9d_metrics import Metric
from d9d_state import (
    CheckpointStore,
    Retention,
    StateError,
    check_saveable,
    model_tensors,
    non_tensor_optimizer_state,
    optimizer_tensors,
    prepare_optimizer_for_load,
    rng_state,
    set_non_tensor_optimizer_state,
    set_rng_state,
)
from d9d_state.checkpoint.info import CheckpointInfo
from d9d_state.checkpoint.non_tensor_optimizer_state import group_values


@dataclass(slots=True, config=ConfigDict(ser_json_inf_nan="strings"))
class Patience:
    """Best value of the evaluations, and the number of evaluations since then."""

    best: float | None = None
    waited: int = 0
    cooldown: int = 0


@dataclass(slots=True, config=ConfigDict(ser_json_inf_nan="strings"))
class Record:
    """Progress of a training job.

    Attributes:
        train_loss: Training loss of the last step that was saved; `None` before the first save.
        evaluation: Results of the last evaluation, by name; empty before the first one.
        evaluated: Step of the last evaluation; 0 before the first one.
        weight_per_second: Mean training throughput since the last start or resume, in units of the loss weight, e.g.
            tokens. Updated at each save; `None` before the first one.
        tracker: State of the trackers; set on the main process only.
        learning_rate: Learning rate of the schedule in the last step that was saved; `None` before the first save. Only
            compared on a resume, because the learning rate is a function of the step.
        rate_factor: Factor of the learning rates, from reductions on a plateau.
        ended: Number of planned steps of a job that ended early, as complete; else `None`.
    """

    step: int = 0
    train_loss: float | None = None
    evaluation: dict[str, float] = field(default_factory=dict)
    weight_per_second: float | None = None
    tracker: dict[str, JsonValue] = field(default_factory=dict)
    learning_rate: float | None = None
    evaluated: int = 0
    early_stopping: Patience = field(default_factory=Patience)
    plateau: Patience = field(default_factory=Patience)
    rate_factor: float = 1.0
    ended: int | None = None

    def quality(self, name: str) -> float | None:
        """Return a metric of this step's evaluation; `None` if it does not exist, NaN if the loss was not finite.

        For NaN outputs, other metrics may be good by chance.
        """
        value = self.evaluation.get(name) if self.evaluated == self.step else None
        return value if value is None or math.isfinite(self.evaluation["loss"]) else math.nan

    def take(self, other: "Record") -> None:
        """Copy all fields of another record into this one."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))


_RECORD = TypeAdapter(Record)
_AVERAGE = "average."
_FROZEN, _REFERENCE = "frozen_digest", "reference_digest"
_OMITTED = {
    _FROZEN: "the frozen parameters of this job, which are not in its checkpoints",
    _REFERENCE: "the initial weights, which are the reference of this job",
}


def _dump(record: Record) -> JsonValue:
    """Return a record as JSON, which has no NaN or infinity, as a loss or a perplexity may be: these become strings."""
    return json.loads(_RECORD.dump_json(record))


class _Stateful(Protocol):
    """Component of a job whose state is JSON and equal on every rank."""

    def state_dict(self) -> JsonValue: ...

    def load_state_dict(self, state: Any) -> None: ...


class JobState:
    """Model, optimizer, metrics, random states and `Record` of a job, saved and restored as one checkpoint.

    Args:
        metrics: This rank's training metrics by name. Their values since the last report are saved.
        config, code: Resolved configuration, and digests of the user's code, stored as information only.
        data_identity: JSON value that determines the order of samples, stored in each checkpoint.
        events: Event bus for `CheckpointSaved`, emitted at the end of `save` or of the next `finish`.
        trainable_only: True to save only parameters that require gradients, and a digest of the frozen ones, which keep
            their initial values on restore.
        rank_state: Returns more state of this rank, which may differ between ranks. None for a job whose learning rates
            follow a schedule; otherwise, learning rates are saved too.

    Attributes:
        restored: Checkpoint of the last `restore`; `None` if there was none.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        average: WeightAverage | None = None,
        metrics: Mapping[str, Metric],
        config: JsonValue,
        parts: Mapping[str, _Stateful],
        data_identity: JsonValue,
        code: JsonValue = None,
        seed: int,
        ctx: DistributedContext,
        events: Events,
        trainable_only: bool = False,
        rank_state: Callable[[], dict[str, JsonValue]] | None = None,
    ) -> None:
        self.store, self._model, self._optimizer, self._metrics, self._parts = store, model, optimizer, metrics, parts
        self._config, self._data_identity, self._code, self._seed = config, data_identity, code, seed
        self._ctx, self._events = ctx, events
        self._trainable_only, self._is_digest_checked = trainable_only, False
        self._digests: dict[str, str] = {}  # of initial values that the checkpoints omit, by the keys of `_OMITTED`
        self._rank_state, self._average = rank_state, average
        self.restored: CheckpointInfo | None = None
        self._built_groups = group_values(optimizer)
        self._built_values = [dict(group) for group in optimizer.param_groups]
        self._being_written: int | None = None
        self._saved: int | None = None

    def restore(self, *, is_rollback: bool = False) -> Record:
        """Load the newest valid checkpoint and return its record; without one, keep the initial values. Collective.

        Call it when the model has its initial values. Random states are restored if the saved mesh had a rank with this
        rank's role. Otherwise the generators are seeded from the job's seed, the step and the role. All ranks agree.

        Raises:
            UserError: On every rank, if the values of `keep_reference` have changed since the save, or the frozen
                parameters, if the checkpoint has none. Also if a subscriber's state cannot be saved, or differed
                between the ranks of another mesh.
            StateError: On every rank, if there are checkpoints, but none is valid.
        """
        subscriber_states(self._events)  # a state that cannot be saved is an error before the first step
        self.restored = info = self._find(is_rollback=is_rollback)
        has_frozen = info is not None and not omits_frozen(info)
        if self._trainable_only or not (info is None or has_frozen):
            self._digests[_FROZEN] = model_digest(self._model, self._ctx, frozen=True)
        if info is None:
            return Record()
        state: Any = info.state
        for key, what in _OMITTED.items():
            if len({state.get(key), self._digests.get(key)} - {None}) > 1:
                raise UserError(
                    f"{what}, have changed since {info.root} was saved. Use the run's original initial_weights (or its "
                    "original seed if it had none), or start a new run with --run.name."
                )
        self._load(info)
        if has_frozen:  # the checkpoint may have replaced the frozen parameters
            self._check_frozen()
            self._is_digest_checked = False
        # A rank may not see yet that another host amended the state.
        record = _RECORD.validate_python(gather_json(state["record"])[0])
        for name, part in self._parts.items():
            part.load_state_dict(state["parts"][name])
        rank_states: Any = info.rank_states
        role = rank_role(self._ctx)
        for metric in self._metrics.values():
            metric.reset()
        for rank_state in _metric_share(rank_states, role):
            _add_to_metrics(self._metrics, rank_state["metrics"])
        same_role = [each for each in rank_states if each["role"] == role]
        if same_role:
            set_rng_state(same_role[0]["random"])
        else:
            seed_everything(self._seed, self._ctx, step=record.step)
        saved = state.get("subscribers", rank_states)  # handlers of an evaluation may have changed them after the save
        load_subscribers(self._events, [each for each in saved if each["role"] == role] or saved)
        return record

    def keep_reference(self) -> None:
        """Save the digest of the current trainable values, the reference's, with each checkpoint. Collective."""
        self._digests[_REFERENCE] = model_digest(self._model, self._ctx, frozen=False)

    def _load(self, info: CheckpointInfo) -> None:
        """Load the model, its average and the optimizer. Collective."""
        prepare_optimizer_for_load(self._model, self._optimizer, info)
        tensors = self._tensors(trainable_only=omits_frozen(info))
        # A run may start to average when it resumes: then its average starts at the loaded weights.
        tensors = {k: each for k, each in tensors.items() if k in info.tensors or not k.startswith(_AVERAGE)}
        self.store.load(info, tensors, self._ctx)
        state: Any = info.state
        self._restore_average(info, state.get("average"))
        if self._rank_state is not None:  # learning rates that equal the initial ones are not saved
            self._reset_groups("lr")
        rank_states: Any = info.rank_states
        set_non_tensor_optimizer_state(self._model, self._optimizer, [each["optimizer"] for each in rank_states])

    def load_step(self, step: int | None, retention: Retention) -> int:
        """Load the model of the checkpoint of a step, or of the best one; return its step. Collective.

        All other state remains, so the job cannot train on.

        Raises:
            UserError: On every rank, if there is no such checkpoint.
        """
        complete = self.store.complete()
        best = retention.ranked({info.step: info.metric for info in complete})
        wanted = gather_json(next(iter(best), -1) if step is None else step)[0]
        found = next((info for info in complete if info.step == wanted), None)
        steps = ", ".join(str(info.step) for info in complete) or "none"
        what = "with a metric of an evaluation" if step is None else f"of step {step}"
        agree(None if found else f"there is no checkpoint {what}; expected one of the steps that are kept: {steps}.")
        assert found is not None
        self._load(found)
        return found.step

    @property
    def optimizer_before(self) -> str | None:
        """Class of the optimizer whose state the restored checkpoint has; `None` if unknown."""
        state: Any = {} if self.restored is None else self.restored.state
        return state.get("optimizer_class")

    def check_optimizer(self) -> None:
        """Raise `UserError` on every rank if the optimizer cannot continue from the state of another class. Collective.

        Call it after `restore`, before a step.
        """
        problem: UserError | None = None
        if self.optimizer_before not in {None, type(self._optimizer).__qualname__}:
            try:
                check_state_fits(self._optimizer, str(self.optimizer_before))
            except UserError as error:
                problem = error
        agree(problem)

    def _find(self, *, is_rollback: bool) -> CheckpointInfo | None:
        """Return the newest valid checkpoint; `None` if the run has no checkpoint yet. Collective."""
        self.store.discard_partials(self._ctx)
        info = self.store.newest(self._ctx)
        if info is None:
            self.store.check_new(self._ctx)
            if is_rollback:
                raise StateError(
                    "there is no checkpoint to roll back to. Set checkpoint.every to fewer steps, or set "
                    'resilience.bad_steps.non_finite and spike to "skip" or "stop".'
                )
        return info

    def _restore_average(self, info: CheckpointInfo, num_steps: int | None) -> None:
        if self._average is not None:
            loaded = {name.removeprefix(_AVERAGE) for name in info.tensors if name.startswith(_AVERAGE)}
            self._average.load_state_dict(num_steps or 0, loaded=loaded)

    def roll_back(self) -> Record:
        """Roll back to the newest valid checkpoint; raise `StateError` on every rank if there is none. Collective."""
        self.store.wait()
        # A checkpoint stores only the param-group values that differ from the initial ones. Reset all values first, to
        # undo changes made after the checkpoint.
        self._reset_groups()
        return self.restore(is_rollback=True)

    def _reset_groups(self, *keys: str) -> None:
        """Set values of the optimizer's groups to the initial ones; without keys, all values."""
        for group, values in zip(self._optimizer.param_groups, self._built_values, strict=True):
            group.update({key: values[key] for key in keys or values})

    def check_tensors(self) -> None:
        """Raise `UserError` on every rank if the model or the optimizer has a tensor that cannot be saved. Collective.

        Call it after the first optimizer step, which creates the state of the optimizer.
        """
        problem: UserError | None = None
        try:
            check_saveable(self._tensors(trainable_only=self._trainable_only))
        except ValueError as error:
            problem = UserError(str(error))
        agree(problem)

    def prepare(self) -> None:
        """Allocate the host buffer of background saves, after the first optimizer step. Collective.

        Raises `UserError` on every rank if `trainable_only` is set and a frozen parameter has changed.
        """
        self._check_frozen()
        self.store.prepare(self._tensors(trainable_only=self._trainable_only), self._ctx)

    def save(self, record: Record, *, metric: float | None = None, background: bool = False) -> None:
        """Wait for a pending background save, then save a checkpoint. Collective.

        Args:
            record: Progress of the job; its step is the checkpoint's step.
            metric: Evaluation metric of this step, for the retention of the best checkpoints; `None` without one.
            background: True to return after the copy to host memory and write the files in the background.

        Raises:
            UserError: On every rank, if `trainable_only` is set and a frozen parameter has changed.
            BadStepError: On every rank, if a trained parameter is not finite; see `check_finite`.
            ReplicaError: On every rank, if persistent buffers differ between ranks.
            StateError: On every rank, if this save or the previous background save failed on any rank.
        """
        self._check_frozen()
        self._check_values(record.step)
        self.finish()
        self.store.save(record.step, **self._content(record), metric=metric, background=background)
        self._being_written = record.step if background else None
        if not background:
            self._saved = record.step
            self._events.emit(CheckpointSaved(record.step))

    def amend(self, record: Record, *, metric: float | None) -> None:
        """Add the evaluation of a step to its checkpoint, if it was saved before the evaluation. Collective.

        The states of subscribers, which may have handled the evaluation, are added too. A resumed job continues after
        the evaluation. The retention of the best checkpoints uses `metric`.

        Raises:
            StateError: On every rank, if the file cannot be written.
        """
        info = self.restored
        is_restored = info is not None and info.step == record.step and info.root.parent == self.store.root
        if is_restored or self._saved == record.step:
            own = {"role": rank_role(self._ctx), "subscribers": subscriber_states(self._events)}
            states = gather_json(own)
            entries = {"record": _dump(record), "subscribers": states}
            self.store.amend(record.step, entries, metric=metric, ctx=self._ctx)

    def save_local(self, record: Record) -> None:
        """Save the state in the local tiers that are due, in the background. Collective.

        Raises:
            UserError: On every rank, if the job has too few hosts for the replicas of a tier.
            BadStepError, ReplicaError: As `save` does.
            StateError: On every rank, if this save or the tier's previous save failed on any rank.
        """
        if any(record.step % tier.every == 0 for tier in self.store.tiers):
            self._check_values(record.step)
        self.store.save_local(record.step, **self._content(record))

    def _check_values(self, step: int) -> None:
        check_finite(self._model, step=step, ctx=self._ctx)
        check_buffers(self._model, step=step, ctx=self._ctx)

    def _content(self, record: Record) -> dict[str, Any]:
        """Return the content of a save, as keyword arguments of `CheckpointStore.save`."""
        refuse_later_writes(self._model)
        return {
            "tensors": self._tensors(trainable_only=self._trainable_only),
            "state": {
                "record": _dump(record),
                "config": self._config,
                "data_identity": self._data_identity,
                "code": self._code,
                "optimizer_class": type(self._optimizer).__qualname__,
                **{key: self._digests[key] for key in self._digests if key != _FROZEN or self._trainable_only},
                "average": None if self._average is None else self._average.state_dict(),
                "parts": {name: part.state_dict() for name, part in self._parts.items()},
            },
            "rank_state": {
                "role": rank_role(self._ctx),
                "random": rng_state(),
                "metrics": _metric_states(self._metrics),
                # A learning-rate schedule sets `lr` in every step.
                "optimizer": non_tensor_optimizer_state(
                    self._model,
                    self._optimizer,
                    since=self._built_groups,
                    without=("lr",) if self._rank_state is None else (),
                ),
                "subscribers": subscriber_states(self._events),
                **({} if self._rank_state is None else self._rank_state()),
            },
            "ctx": self._ctx,
        }

    def finish(self) -> None:
        """Wait for a pending background save (`StateError` if it failed), then emit `CheckpointSaved`. Collective."""
        self.store.wait()
        if self._being_written is not None:
            self._saved = self._being_written
            self._events.emit(CheckpointSaved(self._being_written))
            self._being_written = None

    @property
    def last_saved(self) -> int | None:
        """Last step whose checkpoint this process has completed; `None` before the first one. No collectives."""
        is_written = self._being_written is not None and not self.store.is_saving
        return self._being_written if is_written else self._saved

    def _check_frozen(self) -> None:
        """With `trainable_only`, check once that no event handler has changed a frozen parameter. Collective."""
        if not self._trainable_only or self._is_digest_checked:
            return
        if model_digest(self._model, self._ctx, frozen=True) != self._digests[_FROZEN]:
            raise UserError(
                "checkpoint.trainable_only = true, but frozen parameters do not have their initial values, and no "
                "checkpoint could restore them. Use the run's original initial_weights or seed, do not change frozen "
                "parameters in handlers or in the optimizer, or set checkpoint.trainable_only to false."
            )
        self._is_digest_checked = True

    def _tensors(self, *, trainable_only: bool) -> dict[str, Tensor]:
        averages = {} if self._average is None else self._average.tensors()
        return {
            **model_tensors(self._model, trainable_only=trainable_only),
            **optimizer_tensors(self._model, self._optimizer),
            **{_AVERAGE + name: each for name, each in averages.items()},
        }


def omits_frozen(info: CheckpointInfo) -> bool:
    """Return True if a checkpoint has only trainable parameters, and a digest of the frozen ones."""
    state: Any = info.state
    return state.get(_FROZEN) is not None


def _metric_states(metrics: Mapping[str, Metric]) -> dict[str, dict[str, list[str]]]:
    """Return the flattened accumulators of metrics as text: decimal integers, and exact hexadecimal floats."""
    return {
        name: {
            key: [str(value) if isinstance(value, int) else value.hex() for value in state.flatten().tolist()]
            for key, state in metric.state_dict().items()
        }
        for name, metric in metrics.items()
    }


def _metric_share(rank_states: list[Any], role: Mapping[str, list[int]]) -> list[Any]:
    """Return the saved states of ranks whose metrics the rank with this role continues.

    Tensor-parallel ranks see the same samples: only the first of them is read, and all ranks of a coordinate of pp, dp
    and cp get the same states. On the saved mesh, each rank gets the state of its own coordinates.
    """
    split = ("pp", "dp", "cp")
    saved = [each for each in rank_states if each["role"]["tp"][0] == 0]
    saved.sort(key=lambda each: [each["role"][axis][0] for axis in split])
    own, num = 0, 1
    for coordinate, size in (role[axis] for axis in split):
        own, num = own * size + coordinate, num * size
    return saved[own::num]


def _add_to_metrics(metrics: Mapping[str, Metric], saved: Mapping[str, Mapping[str, list[str]]]) -> None:
    """Add the saved state of one rank's metrics to the metrics of the same names."""
    for name in metrics.keys() & saved.keys():
        for key, accumulator in metrics[name].accumulators().items():
            read = float.fromhex if accumulator.value.is_floating_point() else int
            values = torch.tensor([read(value) for value in saved[name][key]], dtype=accumulator.value.dtype)
            accumulator.update(values.view(accumulator.value.shape).to(accumulator.value.device))
