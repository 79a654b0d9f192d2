import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from d9d_dist import ContextSplit, DistributedContext, MeshConfig, UserError
from d9d_dist.testing import run_ranks
from d9d_loop import Evaluator, FunctionProvider, Loss, Task
from d9d_loop.data import IndexedStream, IteratedStream
from d9d_loop.data.indexed_stream import held_out_stream
from d9d_metrics import Max, Metric

NUM_SAMPLES = 7


class _Net(nn.Module):
    """Model with random training outputs, so that a forward in the wrong mode is detected."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1, dtype=torch.float64)
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(1, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        return self.norm(self.linear(self.dropout(x)))


class _Weighted(Task):
    def inputs(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        torch.rand(())  # a task may draw random numbers
        return {"x": batch["x"]}

    def loss(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> Loss:
        return Loss((outputs[:, 0].square() * batch["weight"]).sum(), weight=batch["weight"].sum())

    def metrics(self) -> dict[str, Metric]:
        return {"largest": Max()}

    def update_metrics(self, metrics: Mapping[str, Metric], *, outputs: Any, batch: Any, loss: Loss) -> None:
        largest = metrics["largest"]
        assert isinstance(largest, Max)
        largest.update(batch["x"])


def _samples() -> list[dict[str, torch.Tensor]]:
    x = torch.randn(NUM_SAMPLES, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return [{"x": x[index], "weight": torch.tensor(index + 1.0)} for index in range(NUM_SAMPLES)]


def _evaluator(
    model: nn.Module, ctx: DistributedContext, *, batch_size: int = 2, num_samples: int | None = None
) -> Evaluator:
    return Evaluator(
        model,
        _samples(),
        task=_Weighted(),
        collate=default_collate,
        num_samples=num_samples,
        batch_size=batch_size,
        ctx=ctx,
    )


def _expected(indices: Sequence[int] = range(NUM_SAMPLES)) -> dict[str, float]:
    batch = default_collate([_samples()[index] for index in indices])
    with torch.no_grad():
        outputs = _Net().eval()(batch["x"])
    loss = (outputs[:, 0].square() * batch["weight"]).sum() / batch["weight"].sum()
    return {"loss": loss.item(), "largest": batch["x"].max().item()}


@pytest.mark.parametrize("batch_size", [1, 2, 7, 100])
def test_every_sample_counts_once(ctx: DistributedContext, batch_size: int) -> None:
    assert _evaluator(_Net(), ctx, batch_size=batch_size)() == pytest.approx(_expected(), rel=1e-12)


@pytest.mark.parametrize("num_samples", [3, 100])
def test_takes_a_subset_of_the_data(ctx: DistributedContext, num_samples: int) -> None:
    chosen = held_out_stream(range(NUM_SAMPLES), num_samples).cursor().take(NUM_SAMPLES)
    assert _evaluator(_Net(), ctx, num_samples=num_samples)() == pytest.approx(_expected(chosen), rel=1e-12)


def test_a_stream_of_samples_is_evaluated_like_a_dataset(ctx: DistributedContext) -> None:
    stream = IndexedStream(_samples(), seed=4, epochs=1)
    for num_samples in (None, 3):
        evaluate = Evaluator(
            _Net(),
            stream,
            task=_Weighted(),
            collate=default_collate,
            num_samples=num_samples,
            batch_size=2,
            ctx=ctx,
        )
        expected = _expected(stream.cursor().take(num_samples or NUM_SAMPLES))
        assert evaluate() == pytest.approx(expected, rel=1e-12)
        assert evaluate() == evaluate()


def test_repeated_evaluations_give_equal_values(ctx: DistributedContext) -> None:
    evaluate = _evaluator(_Net(), ctx)
    assert evaluate() == evaluate()


def test_an_evaluation_restores_modes_and_random_state(ctx: DistributedContext) -> None:
    model = _Net().train()
    model.norm.eval()  # set to eval by a user
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    _evaluator(model, ctx)()
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.training, model.dropout.training, model.norm.training) == (True, True, False)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())
    assert torch.is_grad_enabled()


def test_a_failed_evaluation_restores_the_state(ctx: DistributedContext) -> None:
    class Broken(_Weighted):
        def loss(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> Loss:
            raise RuntimeError("no loss")

    model, state = _Net(), torch.get_rng_state()
    evaluate = Evaluator(
        model, _samples(), task=Broken(), collate=default_collate, num_samples=None, batch_size=2, ctx=ctx
    )
    with pytest.raises(RuntimeError, match="no loss"):
        evaluate()
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def _on_ranks(batch_size: int) -> dict[str, float]:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        model = _Net()
        FunctionProvider(lambda stage: model).parallelize(model, ctx)
        return _evaluator(model, ctx, batch_size=batch_size)()


@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 3), (4, 3)])
def test_samples_are_divided_over_ranks(world_size: int, batch_size: int) -> None:
    """Three batches: with two ranks one rank has an uncounted repeated sample, with four one rank has only that."""
    expected = pytest.approx(_expected(), rel=1e-9)
    assert run_ranks(_on_ranks, batch_size, world_size=world_size) == [expected] * world_size


def _epochs_on_ranks() -> dict[str, float]:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        stream = IndexedStream(_samples()[:5], seed=0, epochs=2)
        options: dict[str, Any] = {"task": _Weighted(), "collate": default_collate, "num_samples": None, "ctx": ctx}
        return Evaluator(_Net(), stream, batch_size=2, **options)()


def test_stand_ins_between_epochs_do_not_count() -> None:
    """The second rank has no sample in the second of the three batches of an epoch."""
    assert run_ranks(_epochs_on_ranks, world_size=2) == [pytest.approx(_expected(range(5)), rel=1e-9)] * 2


class _NoSamples:
    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


@pytest.mark.parametrize("samples", [[], IteratedStream(lambda epoch: _NoSamples(), name="none", epochs=1)])
def test_data_without_a_sample_are_an_error(ctx: DistributedContext, samples: Any) -> None:
    with pytest.raises(UserError, match=r"(got 0 samples|evaluation data are empty); expected .*Check the path"):
        Evaluator(_Net(), samples, task=_Weighted(), collate=list, num_samples=None, batch_size=2, ctx=ctx)


class _Noisy(_Weighted):
    """Task whose inputs and loss have noise, such as that of a diffusion model."""

    def inputs(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"x": batch["x"] + torch.randn_like(batch["x"])}

    def loss(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> Loss:
        return super().loss(outputs + random.gauss() + torch.randn(1, dtype=outputs.dtype), batch)


def _noisy_losses() -> list[float]:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        options: dict[str, Any] = {"task": _Noisy(), "collate": default_collate, "num_samples": None, "ctx": ctx}
        evaluator = Evaluator(_Net(), _samples(), batch_size=2, **options)
        torch.rand(1 + ctx.rank)  # the states of the ranks differ
        return [evaluator()["loss"] for _ in range(2)]


def test_noise_of_an_evaluation_depends_neither_on_ranks_nor_on_earlier_draws() -> None:
    alone, again = _noisy_losses()
    assert alone == again
    for losses in run_ranks(_noisy_losses, world_size=2):
        assert losses == pytest.approx([alone] * 2, rel=1e-12)


def _part(batch: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Return a context-parallel rank's part of a batch, with values and weights that differ between ranks."""
    return {"x": batch["x"] * (1.1, -0.7)[rank], "weight": batch["weight"].double() * (0.3, 0.6)[rank]}


class _Split(_Weighted):
    def split_sequence(self, batch: dict[str, torch.Tensor], split: ContextSplit) -> dict[str, torch.Tensor]:
        return _part(batch, int(split.positions(4)[0, 0]))  # the first position of a rank is its index


def _on_context_parallel_ranks() -> dict[str, float]:
    with MeshConfig(context_parallel_shard=-1).build() as ctx:
        evaluator = Evaluator(
            _Net(), _samples(), task=_Split(), collate=default_collate, num_samples=None, batch_size=2, ctx=ctx
        )
        return evaluator()


def test_values_of_context_parallel_ranks_are_summed() -> None:
    parts = [_part(default_collate(_samples()), rank) for rank in range(2)]
    with torch.no_grad():
        losses = torch.stack([_Net().eval()(part["x"])[:, 0].square() @ part["weight"] for part in parts])
    weights = torch.stack([part["weight"].sum() for part in parts])
    largest = max(part["x"].max().item() for part in parts)
    expected = {"loss": (losses.sum() / weights.sum()).item(), "largest": largest}
    assert run_ranks(_on_context_parallel_ranks) == [pytest.approx(expected, rel=1e-9)] * 2
