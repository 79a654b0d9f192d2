"""Checkpoints of an engine, in its run folder."""

from contextlib import ExitStack
from typing import final

from pydantic import JsonValue
from torch import nn
from torch.optim import Optimizer

from d9d_dist import DistributedContext
from d9d_loop.config.engine_config import EngineConfig
from d9d_loop.event_bus import Events
from d9d_loop.job.job_state import JobState, Record
from d9d_loop.job.local_tiers import local_tiers
from d9d_loop.resilience import StepGuard
from d9d_metrics import redact_secrets
from d9d_state import CheckpointStore, Retention


@final
class EngineCheckpoints:
    """Checkpoints of an engine: model, optimizer, random states, step, and a JSON value of the caller.

    The run folder is locked from the first save or load until `close`. Nothing is written before the lock. `guard` is
    the guard of the engine's steps.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        guard: StepGuard,
        ctx: DistributedContext,
        events: Events,
    ) -> None:
        self._ctx, self._open, self._is_locked = ctx, ExitStack(), False
        self._caller_state: JsonValue = None
        self._num_loads = 0
        self._store = CheckpointStore(
            config.run.dir / "checkpoints",
            retention=Retention(last=config.keep_last),
            tiers=local_tiers(config.tiers, config.run.dir),
        )
        self._state = JobState(
            self._store,
            model=model,
            optimizer=optimizer,
            metrics={},
            config=redact_secrets(config.model_dump(mode="json")),
            parts={"bad_steps": guard, "caller": self},
            data_identity=None,
            seed=config.seed,
            ctx=ctx,
            events=events,
        )

    def state_dict(self) -> JsonValue:
        """Return the caller's state, which `JobState` saves."""
        return self._caller_state

    def load_state_dict(self, state: JsonValue) -> None:
        """Receive the caller's state of a checkpoint from `JobState`."""
        self._caller_state = state
        self._num_loads += 1

    def save(self, step: int, state: JsonValue, *, background: bool) -> None:
        """Save a checkpoint of a step. Collective."""
        self._lock()
        self._caller_state = state
        self._state.save(Record(step), background=background)

    def save_local(self, step: int, state: JsonValue) -> None:
        """Save a step in the local tiers that are due, in the background. Collective."""
        self._lock()
        self._caller_state = state
        self._state.save_local(Record(step))

    def delete_local(self) -> None:
        """Delete the local tiers on all hosts. Collective."""
        self._store.wait()
        self._store.clear_tiers(self._ctx)

    def load(self) -> tuple[int, JsonValue] | None:
        """Load the newest valid checkpoint; return its step and the caller's state, `None` without one. Collective."""
        self._lock()
        self._store.wait()
        num_loads = self._num_loads
        record = self._state.restore()
        return (record.step, self._caller_state) if self._num_loads > num_loads else None

    def close(self) -> None:
        """Finish a pending save, and unlock the folder. Collective."""
        if self._is_locked:
            self._state.finish()
        self._open.close()

    def _lock(self) -> None:
        if not self._is_locked:
            self._open.enter_context(self._store.locked(self._ctx))
            self._open.enter_context(self._store)
            self._is_locked = True
