"""A job that ends after any step and is started again gives results bitwise equal to an uninterrupted one.

Covers every optimizer, every schedule, and every source and wrapper of data. Each job is resumed from the checkpoint of
each step, which is the state after a kill between that checkpoint and the next. `test_killed_jobs.py` kills jobs at any
moment, and `test_resume_meshes.py` resumes in other layouts.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_loop import BadStepFound, Loss, StepDone, Task, Trainer, TrainerConfig
from d9d_loop.config._config_keys import kinds_of
from d9d_loop.data import (
    BucketedStream,
    DataProvider,
    DocumentStream,
    IndexedStream,
    IteratedStream,
    MixtureStream,
    PackedStream,
    Phase,
    SampleStream,
    ShuffledStream,
    TokenFile,
    TokenFileWriter,
    TokenizedStream,
)
from d9d_loop.optimizers.optimizer import OptimizerConfig
from d9d_metrics import Metric, Sum
from d9d_state import CheckpointStore

STEPS = 5
NUM_SAMPLES = 7  # an epoch ends within the second step, and another one at the end of a step
GLOBAL_SIZE = 4
VOCAB, LENGTH = 13, 6

_REST = ({"of": "vectors", "optimizer": {"kind": "adamw"}}, {"pattern": "embed", "optimizer": {"kind": "adamw"}})
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{kind: {"kind": kind} for kind in kinds_of(OptimizerConfig)},
    "adamw": {"kind": "adamw", "groups": ({"pattern": "mix", "learning_rate": 0.3, "weight_decay": 0.5},)},
    "adam": {"kind": "adam", "weight_decay": 0.1},
    "sgd": {"kind": "sgd", "momentum": 0.9, "nesterov": True},
    "plain sgd": {"kind": "sgd"},
    "muon": {"kind": "muon", "groups": _REST},
    "averaged": {"kind": "adamw"},
    "stochastic, bfloat16 averages": {"kind": "stochastic_adamw", "averages": "bfloat16", "seed": 3},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "warm-up and cosine": {"kind": "warmup_cosine", "warmup_steps": 2},
    "wsd": {"kind": "wsd", "warmup_steps": 1, "decay_percent": 40},
    "ends with its warm-up": {"kind": "warmup_cosine", "warmup_steps": 9},
    "waits two steps": {
        "kind": "piecewise",
        "start": 0.0,
        "phases": [{"kind": "constant", "steps": 1}, {"kind": "linear", "to": 1.0}],
    },
    "piecewise": {
        "kind": "piecewise",
        "start": 0.5,
        "phases": [
            {"kind": "linear", "steps": 1, "to": 1.0},
            {"kind": "exponential", "steps": 1, "to": 0.5},
            {"kind": "polynomial", "percent": 20, "power": 2, "to": 0.3},
            {"kind": "rex", "to": 0.1},
        ],
    },
}


def _lists(size: int = NUM_SAMPLES, first: int = 0) -> list[list[int]]:
    """Return different samples of different lengths."""
    return [[first + number, *range(number % 4)] for number in range(size)]


class _Epoch:
    """Streamed epoch that can save its position."""

    def __init__(self, epoch: int) -> None:
        self._epoch, self._next = epoch, 0

    def __iter__(self) -> Iterator[list[int]]:
        while self._next < NUM_SAMPLES:
            self._next += 1
            yield [self._epoch, *range(self._next)]
        self._next = 0

    def state_dict(self) -> Any:
        return {"next": self._next}

    def load_state_dict(self, state: Any) -> None:
        self._next = state["next"]


def _documents(folder: Path, seed: int) -> SampleStream:
    if not folder.exists():
        with TokenFileWriter(folder, vocab_size=VOCAB) as writer:
            for number in range(NUM_SAMPLES):
                writer.append([(number + place) % VOCAB for place in range(2 + 5 * number % 11)])
    return DocumentStream(TokenFile(folder), max_length=LENGTH, seed=seed)


def _packed(documents: SampleStream, seed: int) -> SampleStream:
    return PackedStream(documents, row_length=LENGTH, window=5, seed=seed)


def _mixture(folder: Path, seed: int) -> SampleStream:
    sources = {"tokens": _documents(folder, seed), "lists": _tokenized(folder, seed)}
    annealed = [Phase({"tokens": 1}), Phase({"lists": 1}, start=20, ramp=60)]
    return _packed(MixtureStream(sources, weights=annealed, unit="tokens", seed=seed), seed)


def _tokenized(_folder: Path, seed: int) -> SampleStream:
    stream = IndexedStream(_lists(), seed=seed)
    return TokenizedStream(stream, _tokens, max_length=LENGTH, window=3, name="numbers")


def _tokens(sample: list[int]) -> list[int]:
    return [number % VOCAB for number in (*sample, 1, 2)]


def _hugging_face(_folder: Path, seed: int) -> SampleStream:
    datasets = pytest.importorskip("datasets", reason="needs datasets, which is optional")
    data = datasets.Dataset.from_dict({"ids": _lists()})
    return ShuffledStream(
        IteratedStream(lambda epoch: data.to_iterable_dataset(num_shards=2), name="lists", transform=_ids),
        window=3,
        seed=seed,
    )


def _ids(row: dict[str, list[int]]) -> list[int]:
    return row["ids"]


Source = Callable[[Path, int], SampleStream]
"""Makes a stream of a folder, where it may keep files, and a seed."""

SOURCES: dict[str, Source] = {
    "indexed": lambda folder, seed: IndexedStream(_lists(), seed=seed),
    "indexed, in order": lambda folder, seed: IndexedStream(_lists(), seed=seed, shuffle=False),
    "iterated": lambda folder, seed: IteratedStream(_Epoch, name="epochs"),
    "Hugging Face": _hugging_face,
    "shuffled": lambda folder, seed: ShuffledStream(IteratedStream(_Epoch, name="epochs"), window=5, seed=seed),
    "bucketed": lambda folder, seed: BucketedStream(
        IndexedStream(_lists(), seed=seed), group_size=2, num_groups=3, seed=seed
    ),
    "mixed": lambda folder, seed: MixtureStream(
        {"a": IndexedStream(_lists(), seed=seed), "b": IteratedStream(_Epoch, name="epochs")},
        weights={"a": 2, "b": 1},
        temperature=2.0,
        seed=seed,
    ),
    "documents": _documents,
    "packed": lambda folder, seed: _packed(_documents(folder, seed), seed),
    "tokenized and packed": lambda folder, seed: _packed(_tokenized(folder, seed), seed),
    "annealed, packed and shuffled": lambda folder, seed: ShuffledStream(_mixture(folder, seed), window=3, seed=seed),
}


@final
class _Data(DataProvider):
    """A data source with a random collate function, which changes one token of each sample."""

    def __init__(self, source: Source, folder: Path) -> None:
        self._source, self._folder = source, folder

    def training(self, *, seed: int) -> SampleStream:
        return self._source(self._folder, seed)

    def evaluation(self) -> list[Any]:
        return _lists(3)

    def collate(self, samples: list[Any]) -> Tensor:
        ids = torch.stack([_row(sample) for sample in samples])
        ids[:, torch.randint(LENGTH, ())] = torch.randint(VOCAB, ())
        return ids


def _row(sample: Any) -> Tensor:
    if isinstance(sample, Mapping):
        sample = sample["input_ids"] if "input_ids" in sample else sample["tokens"]
    ids = sample.tolist() if isinstance(sample, Tensor) else list(sample)
    return torch.tensor((ids * LENGTH)[:LENGTH]) % VOCAB


class _Net(nn.Module):
    """Model with tied weights, dropout, and accumulating buffers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 4, dtype=dtype)
        self.mix, self.dropout = nn.Linear(4, 4, dtype=dtype), nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(4, dtype=dtype)
        self.head = nn.Linear(4, VOCAB, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(torch.tanh(self.mix(self.embed(ids))))
        return self.head(self.norm(x.flatten(0, 1)).view_as(x))


class _NextToken(Task):
    """Task in which the first microbatch of step 4 is optionally non-finite, the first time."""

    def __init__(self, *, bad_call: int | None = None) -> None:
        self.bad_call, self.num_calls = bad_call, 0

    def inputs(self, batch: Tensor) -> dict[str, Tensor]:
        return {"ids": batch[:, :-1]}

    def loss(self, outputs: Tensor, batch: Tensor) -> Loss:
        labels = batch[:, 1:].flatten()
        loss = F.cross_entropy(outputs.flatten(0, 1).double(), labels, reduction="sum")
        if torch.is_grad_enabled():
            self.num_calls += 1
            loss = loss * torch.nan if self.num_calls == self.bad_call else loss
        return Loss(loss, weight=labels.numel())

    def metrics(self) -> dict[str, Metric]:
        return {"gathered": Sum()}

    def update_metrics(self, metrics: Mapping[str, Metric], *, outputs: Any, batch: Any, loss: Loss) -> None:
        gathered = metrics["gathered"]
        assert isinstance(gathered, Sum)
        gathered.update(loss.total)


@dataclass(frozen=True)
class _Row:
    """Configuration of a job."""

    optimizer: str = "adamw"
    schedule: str = "warm-up and cosine"
    source: str = "indexed"
    data: dict[str, Any] = field(default_factory=dict)

    def trainer(self, folder: Path, *, goes_back: bool) -> Trainer:
        off = {"enabled": False}
        config = {
            "steps": STEPS,
            "batch": {"global_size": GLOBAL_SIZE, "microbatch_size": 2},
            "optimizer": {"learning_rate": 0.05, **OPTIMIZERS[self.optimizer]},
            "average": {"decay": 0.7, "warmup": True} if self.optimizer == "averaged" else None,
            "lr_schedule": SCHEDULES[self.schedule],
            "gradients": {"max_norm": 1.0},
            "data": self.data,
            "evaluation": {"every": 2},
            "checkpoint": {"every": 2 if goes_back else 1, "keep_last": None, "background": False},
            "run": {"folder": folder},
            "trackers": (),
            "logging": {"every": 3, "progress": False},  # metrics accumulate between two reports, also across a resume
            "resilience": {"health": off, "watchdog": off, "bad_steps": {"non_finite": "roll_back"}},
            "host": {
                "collect_garbage_every": None
            },  # the first garbage collection of all objects would take longer than the job
            "export": False,
        }
        dtype = torch.bfloat16 if self.optimizer.startswith("stochastic") else torch.float64
        return Trainer(
            TrainerConfig.model_validate(config),
            model=lambda stage: _Net(dtype),
            data=_Data(SOURCES[self.source], folder.parent / "tokens"),
            task=_NextToken(bad_call=3 * 2 + 1 if goes_back else None),
        )


@dataclass(frozen=True)
class _Ended:
    """Result of a job: the contents of its last checkpoint, except times, and the loss of each step."""

    losses: dict[int, float]
    tensors: dict[str, Tensor]
    rank_states: Any
    parts: Any
    evaluation: Any


def _run(row: _Row, folder: Path, *, sleeps: bool = False, goes_back: bool = False) -> _Ended:
    losses: dict[int, float] = {}
    decisions: list[tuple[int, str]] = []

    def on_step(done: StepDone) -> None:
        losses[done.step] = done.loss.item()
        if sleeps:
            with done.offloaded():
                pass

    trainer = row.trainer(folder, goes_back=goes_back)
    trainer.events.on(StepDone, on_step)
    trainer.events.on(BadStepFound, lambda found: decisions.append((found.step, found.decision)))
    trainer.train()
    assert decisions == ([(4, "roll_back")] if goes_back else [])
    store = CheckpointStore(folder / "run" / "checkpoints")
    info = store.newest()
    assert info is not None
    tensors = {name: torch.empty(wanted.shape, dtype=wanted.dtype) for name, wanted in info.tensors.items()}
    store.load(info, tensors)
    state: Any = info.state
    return _Ended(losses, tensors, info.rank_states, state["parts"], state["record"]["evaluation"])


def _assert_same_bits(found: _Ended, expected: _Ended, *, after: int = 0) -> None:
    assert found.losses == {step: loss for step, loss in expected.losses.items() if step > after}, after
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in found.tensors.items():
        assert torch.equal(tensor, expected.tensors[name]), f"{name}, continued after step {after}"
    assert found.rank_states == expected.rank_states, after
    assert found.parts == expected.parts, after
    assert found.evaluation == expected.evaluation, after


ROWS = {
    **{optimizer: _Row(optimizer=optimizer) for optimizer in OPTIMIZERS},
    **{schedule: _Row(schedule=schedule) for schedule in list(SCHEDULES)[1:]},
    **{source: _Row(source=source) for source in list(SOURCES)[1:]},
    "two workers": _Row(source="annealed, packed and shuffled", data={"num_workers": 2, "prefetch": 3}),
    "Hugging Face, a worker": _Row(source="Hugging Face", data={"num_workers": 1}),
}
"""The first schedule and the first source are used by all other rows."""


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.sample("averaged", "schedule_free_adamw", "annealed, packed and shuffled")
@pytest.mark.slow("muon", "stochastic, bfloat16 averages")
def test_a_job_resumed_after_any_step_gives_bitwise_equal_results(tmp_path: Path, row: _Row) -> None:
    whole = _run(row, tmp_path / "whole")
    assert len(set(whole.losses.values())) == STEPS
    for step in range(1, STEPS):
        _left_after(step, tmp_path / "whole", tmp_path / f"after-{step}")
        _assert_same_bits(_run(row, tmp_path / f"after-{step}"), whole, after=step)


def _left_after(step: int, whole: Path, folder: Path) -> None:
    """Copy the state of a job that was killed after it saved a step."""
    shutil.copytree(whole, folder)
    for checkpoint in (folder / "run" / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [*((optimizer, "wsd") for optimizer in OPTIMIZERS), ("schedule_free_adamw", "waits two steps")],
)
@pytest.mark.sample("averaged-wsd", "schedule_free_adamw-waits two steps")
def test_a_job_offloaded_after_every_step_or_rolled_back_gives_bitwise_equal_results(
    tmp_path: Path, optimizer: str, schedule: str
) -> None:
    row = _Row(optimizer=optimizer, schedule=schedule)
    whole = _run(row, tmp_path / "whole")
    _assert_same_bits(_run(row, tmp_path / "slept", sleeps=True), whole)
    # From the fourth step to the second: the update of the third is taken again.
    _assert_same_bits(_run(row, tmp_path / "back", goes_back=True), whole)
