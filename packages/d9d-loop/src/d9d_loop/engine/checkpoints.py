"""Checkpoints of an engine, in its run folder."""

from contextlib import ExitStack
from typing import Any, final

from pydantic import JsonValue

from d9d_dist import DistributedContext, UserError, agree, rank_role
from d9d_loop.config.engine_config import EngineConfig
from d9d_loop.engine.caller_state import decode_state, encode_state
from d9d_loop.engine.job_state import JobState, Record
from d9d_loop.engine.local_tiers import local_tiers
from d9d_loop.engine.start import Training
from d9d_loop.event_bus import Events
from d9d_metrics.trackers.redaction import redact_secrets
from d9d_state import CheckpointStore, Retention


@final
class EngineCheckpoints:
    """Checkpoints of an engine: model, optimizer, learning rates, random states, step, and the caller's state.

    The run folder is locked from the first save or load until `close`. Nothing is written before the lock.
    """

    def __init__(self, config: EngineConfig, training: Training, *, ctx: DistributedContext, events: Events) -> None:
        self._ctx, self._open, self._is_locked = ctx, ExitStack(), False
        self._caller_state: JsonValue = None
        self._lock_seconds = config.timeouts.lock_seconds
        self._store = CheckpointStore(
            config.run.dir / "checkpoints",
            retention=Retention(last=config.keep_last),
            tiers=local_tiers(config.tiers, config.run.dir),
        )
        self._state = JobState(
            self._store,
            model=training.pipeline.model,
            optimizer=training.optimizer,
            average=training.average,
            metrics={},
            config=redact_secrets(config.model_dump(mode="json")),
            parts={"bad_steps": training.guard},
            data_identity=None,
            seed=config.seed,
            ctx=ctx,
            events=events,
            rank_state=lambda: {"caller": self._caller_state},
        )

    def keep_reference(self) -> None:
        """See `JobState.keep_reference`. Collective."""
        self._state.keep_reference()

    def save(self, step: int, state: Any, *, background: bool) -> None:
        """Save a checkpoint of a step. Collective."""
        self._take(state)
        self._state.save(Record(step), background=background)

    def save_local(self, step: int, state: Any) -> None:
        """Save a step in the local tiers that are due, in the background. Collective."""
        self._take(state)
        self._state.save_local(Record(step))

    def delete_local(self) -> None:
        """Delete the local tiers on all hosts. Collective."""
        self._store.wait()
        self._store.clear_tiers(self._ctx)

    def load(self) -> tuple[int, Any] | None:
        """Load the newest valid checkpoint; return its step and the caller's state, `None` without one. Collective.

        The state is that of this rank's coordinates. Raises `UserError` on every rank of another mesh if the states
        differ, and if the optimizer cannot continue from the saved state of another class.
        """
        self._lock()
        self._store.wait()
        record, info = self._state.restore(), self._state.restored
        if info is None:
            return None
        self._state.check_optimizer()
        rank_states: Any = info.rank_states
        mine = rank_role(self._ctx)  # with the sizes of the mesh, so all ranks find their roles, or none
        state, *others = [each["caller"] for each in rank_states if each["role"] == mine] or [
            each["caller"] for each in rank_states
        ]
        if any(other != state for other in others):
            raise UserError(
                "the checkpoint has a state of the caller for each rank, but was saved on another mesh; expected a "
                "state that is equal on all ranks. Load it on the mesh that saved it, and pass the states of all ranks "
                "to save(), such as those of d9d_dist.gather_json(state)."
            )
        return record.step, decode_state(state)

    def close(self) -> None:
        """Finish a pending save, and unlock the folder. Collective."""
        if self._is_locked:
            self._state.finish()
        self._open.close()

    def _take(self, state: Any) -> None:
        """Lock the folder, and encode the caller's state. Collective."""
        self._lock()
        problem: str | UserError | None = None
        try:
            self._caller_state = encode_state(state)
        except UserError as error:
            problem = error
        except RuntimeError as error:  # a tensor without values, a state that contains itself
            problem = f"got a state that cannot be saved: {error}"
        agree(problem)

    def _lock(self) -> None:
        if not self._is_locked:
            self._open.enter_context(self._store.locked(self._ctx, wait_seconds=self._lock_seconds))
            self._open.enter_context(self._store)
            self._is_locked = True
