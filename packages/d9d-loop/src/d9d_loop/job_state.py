"""What a job must remember to continue as if it had never stopped, and how that is saved and restored."""

from dataclasses import asdict, dataclass, field

from pydantic import JsonValue, TypeAdapter
from torch import Tensor, nn
from torch.optim import Optimizer

from d9d_dist import DistributedContext, seed_everything
from d9d_state import (
    CheckpointStore,
    model_tensors,
    optimizer_tensors,
    prepare_optimizer_for_load,
    rng_state,
    set_rng_state,
)


@dataclass(slots=True)
class Record:
    """Where a job stands.

    Everything else follows from it: the data position and the learning rate are functions of the step.

    Attributes:
        step: Steps done.
        train_loss: Loss of the last step.
        evaluation: Values of the last evaluation.
        weight_per_second: Throughput so far, in units of the loss's weight.
    """

    step: int = 0
    train_loss: float | None = None
    evaluation: dict[str, float] = field(default_factory=dict)
    weight_per_second: float | None = None


_RECORD = TypeAdapter(Record)


class JobState:
    """The model, the optimizer and the record of a job, saved and restored together.

    Args:
        store: Where checkpoints are.
        model: Materialised and parallelised.
        optimizer: Over its parameters.
        config: The resolved configuration, kept in each checkpoint for people to read.
        seed: The job's seed.
        ctx: The job's context.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        config: JsonValue,
        seed: int,
        ctx: DistributedContext,
    ) -> None:
        self._store, self._model, self._optimizer = store, model, optimizer
        self._config, self._seed, self._ctx = config, seed, ctx

    def restore(self) -> Record:
        """Continue from the newest complete checkpoint, if there is one. Collective.

        Random states are those of the checkpoint if it was saved by as many ranks; else they are seeded anew from the
        seed and the step.
        """
        self._store.discard_partials(self._ctx)
        info = self._store.newest(self._ctx)
        if info is None:
            return Record()
        prepare_optimizer_for_load(self._model, self._optimizer, info)
        self._store.load(info, self._tensors(), self._ctx)
        state = info.state
        assert isinstance(state, dict)
        record = _RECORD.validate_python(state["record"])
        rank_states = info.rank_states
        if len(rank_states) == self._ctx.world_size:
            set_rng_state(rank_states[self._ctx.rank])
        else:
            seed_everything(self._seed, self._ctx, step=record.step)
        return record

    def save(self, record: Record) -> None:
        """Save a checkpoint of the record's step. Collective."""
        self._store.save(
            record.step,
            self._tensors(),
            state={"record": asdict(record), "config": self._config},
            rank_state=rng_state(),
            ctx=self._ctx,
        )

    def _tensors(self) -> dict[str, Tensor]:
        return {**model_tensors(self._model), **optimizer_tensors(self._model, self._optimizer)}
