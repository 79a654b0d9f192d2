import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pydantic import JsonValue
from torch import nn
from torch.utils.data import default_collate

from d9d_dist import ContextSplit, StageInfo, UserError
from d9d_dist.testing import run_ranks
from d9d_loop import FunctionProvider, Inference, InferenceConfig, InferenceTask, PartWritten, validate_config
from d9d_loop.data.batch_reader import BatchReader
from d9d_loop.inference import inference as inference_module
from d9d_pipeline import Inputs
from d9d_state import save_model_state

Batch = dict[str, torch.Tensor]


class _Net(nn.Module):
    """Two layers, which may be on separate stages; dropout shows whether the model is in evaluation mode."""

    def __init__(self, stage: StageInfo) -> None:
        super().__init__()
        layers = {str(index): nn.Linear(3, 3, dtype=torch.float64) for index in stage.layers(2)}
        self.layers = nn.ModuleDict(layers)
        self.drop = nn.Dropout(0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(self.drop(x)))
        return x


class _Sums(InferenceTask):
    def inputs(self, batch: Batch) -> Any:
        return Inputs(batch["x"])

    def results(self, outputs: torch.Tensor, batch: Batch) -> Sequence[JsonValue]:
        numbers = batch["number"].tolist()
        return [
            {"number": number, "sum": value} for number, value in zip(numbers, outputs.sum(1).tolist(), strict=True)
        ]


def _data(size: int) -> list[Batch]:
    x = torch.randn(size, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [{"x": x[index], "number": torch.tensor(index)} for index in range(size)]


def _config(folder: Path, **values: Any) -> InferenceConfig:
    sizes = {"batch_size": 2, "part_size": 5, "logging": {"progress": False}}
    return validate_config(InferenceConfig, {"run": {"folder": str(folder)}, **sizes, **values})


def _inference(folder: Path, size: int = 23, **values: Any) -> Inference:
    return Inference(_config(folder, **values), model=_Net, data=_data(size), task=_Sums())


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "results" / "results.jsonl").read_text().splitlines()]


def _expected(model: nn.Module, size: int = 23) -> list[float]:
    with torch.no_grad():
        return [model(sample["x"][None]).sum().item() for sample in _data(size)]


def _weights(folder: Path) -> nn.Module:
    model = _Net(StageInfo()).eval()
    save_model_state(model, folder)
    return model


class _Records(_Sums):
    def __init__(self) -> None:
        self._seen: list[int] = []

    def results(self, outputs: torch.Tensor, batch: Batch) -> Sequence[JsonValue]:
        self._seen += batch["number"].tolist()
        return super().results(outputs, batch)


def _run(folder: str, weights: str, mesh: dict[str, int]) -> int:
    return _inference(Path(folder), weights=weights, mesh=mesh).run().num_samples


def _run_recorded(folder: str, weights: str, mesh: dict[str, int]) -> tuple[int, list[int]]:
    task, config = _Records(), _config(Path(folder), weights=weights, mesh=mesh)
    return Inference(config, model=_Net, data=_data(23), task=task).run().num_samples, task._seen


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        (1, {}),
        (2, {"data_parallel_shard": 2}),
        (3, {"data_parallel_replicate": 3}),  # five parts: the last round has two
        (4, {"data_parallel_shard": 2, "pipeline_parallel": 2}),
    ],
)
def test_every_sample_has_its_result_in_order_on_any_ranks(tmp_path: Path, ranks: int, mesh: dict[str, int]) -> None:
    model = _weights(tmp_path / "weights")
    arguments = str(tmp_path), str(tmp_path / "weights"), mesh
    found = [_run_recorded(*arguments)] if ranks == 1 else run_ranks(_run_recorded, *arguments, world_size=ranks)
    assert [num_samples for num_samples, _ in found] == [23] * ranks
    assert sorted(number for _, seen in found for number in seen) == list(range(23))  # not those of dummy batches
    lines = _lines(tmp_path)
    assert [line["number"] for line in lines] == list(range(23))
    torch.testing.assert_close([line["sum"] for line in lines], _expected(model), rtol=1e-12, atol=1e-12)


def test_a_restart_computes_only_the_missing_parts(tmp_path: Path) -> None:
    first, seen = _inference(tmp_path), []

    def stop(event: PartWritten) -> None:
        if event.step == 3:
            raise KeyboardInterrupt

    first.events.on(PartWritten, stop)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    again = _inference(tmp_path)
    again.events.on(PartWritten, lambda event: seen.append((event.step, event.part)))
    result = again.run()
    assert seen == [(4, 3), (5, 4)]
    assert (result.num_samples, result.file) == (23, tmp_path / "run" / "results" / "results.jsonl")
    assert [line["number"] for line in _lines(tmp_path)] == list(range(23))
    done = _inference(tmp_path)
    done.events.on(PartWritten, lambda event: seen.append((event.step, event.part)))
    assert done.run() == result
    assert len(seen) == 2


def test_results_of_another_job_are_refused(tmp_path: Path) -> None:
    _inference(tmp_path, size=6).run()
    for other, difference in (
        ({"seed": 3}, "seed was 0, and now is 3"),
        ({"batch_size": 3}, "batch_size was 2, and now is 3"),
        ({"size": 7}, "num_samples was 6, and now is 7"),
    ):
        values = {"size": 6, **other}
        with pytest.raises(UserError, match=rf"holds results of another job(.*\n)*  {difference}\n"):
            _inference(tmp_path, **values).run()


@dataclass(slots=True)
class _Scaled(_Sums):
    factor: float = 1.0
    words: list[int] = field(default_factory=lambda: [1])
    limit: float = math.inf
    _started: float = field(default_factory=time.perf_counter)


def _start(folder: Path, *, seed: int = 0, weights: int = 0, task: InferenceTask | None = None, size: int = 6) -> None:
    """Start a job whose data and weights have equal names and sizes for each seed."""
    generator = torch.Generator().manual_seed(seed)
    data = [{**each, "x": torch.randn(3, generator=generator, dtype=torch.float64)} for each in _data(size)]
    torch.manual_seed(weights)
    _weights(folder / "weights")
    config = _config(folder, weights=str(folder / "weights"))
    Inference(config, model=_Net, data=data, task=task or _Scaled()).run()


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"seed": 1}, "the data.contents was .*"),
        ({"weights": 1}, "the values of the model was .*"),
        ({"task": _Scaled(2.0)}, "the task's factor was 1.0, and now is 2.0"),
        ({"task": _Scaled(words=[2])}, "the task's words was .*"),
    ],
)
def test_other_contents_of_equal_names_and_sizes_are_an_error(
    tmp_path: Path, other: dict[str, Any], difference: str
) -> None:
    _start(tmp_path)
    before = _lines(tmp_path)
    with pytest.raises(UserError, match=rf"holds results of another job.*\n  {difference}\n"):
        _start(tmp_path, **other)
    _start(tmp_path)
    assert _lines(tmp_path) == before


def test_the_contents_are_equal_in_every_layout(tmp_path: Path) -> None:
    model, weights = _weights(tmp_path / "weights"), str(tmp_path / "weights")
    first = _inference(tmp_path, weights=weights)
    first.events.on(PartWritten, partial(_stop_at_two, stops=True))
    with pytest.raises(KeyboardInterrupt):
        first.run()
    plan = tmp_path / "run/results/plan.json"
    before = json.loads(plan.read_text())
    mesh = {"pipeline_parallel": 2, "data_parallel_shard": 2}
    assert run_ranks(_run, str(tmp_path), weights, mesh, world_size=4) == [23] * 4
    after = json.loads(plan.read_text())
    names = ["the structure of the model", "the model", "the code of the job"]
    assert [after["code"][name] for name in names] == [before["code"][name] for name in names]
    torch.testing.assert_close([line["sum"] for line in _lines(tmp_path)], _expected(model), rtol=1e-12, atol=1e-12)


def _scaled_batch(samples: list[Batch], *, by: float) -> Batch:
    batch = default_collate(samples)
    return {**batch, "x": batch["x"] * by}


def test_changed_code_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for by, source in ((1.0, "a"), (1.0, "a"), (2.0, "a"), (1.0, "b")):
        job = Inference(
            _config(tmp_path), model=_Net, data=_data(6), task=_Sums(), collate=partial(_scaled_batch, by=by)
        )
        with mock.patch.object(inference_module, "source_digests", lambda _weights, source=source: {"my.py": source}):
            job.run()
        _, _, changed = capsys.readouterr().out.partition("are kept, which other code has computed:\n")
        expected = {(2.0, "a"): "  the code of the job has changed\n", (1.0, "b"): "  my.py has changed\n"}
        assert changed == expected.get((by, source), "")


def test_results_of_an_earlier_version_are_kept(tmp_path: Path) -> None:
    _start(tmp_path)
    plan = tmp_path / "run/results/plan.json"
    names = ("weights", "batch_size", "seed", "task", "num_samples", "part_size")
    plan.write_text(json.dumps({name: value for name, value in json.loads(plan.read_text()).items() if name in names}))
    _start(tmp_path)


class _Doubles(_Sums):
    def results(self, outputs: torch.Tensor, batch: Batch) -> Sequence[JsonValue]:
        return [*super().results(outputs, batch)] * 2


class _NotNumbers(_Sums):
    def results(self, outputs: torch.Tensor, batch: Batch) -> Sequence[JsonValue]:
        return [float("nan")] * len(outputs)


def test_a_task_with_a_wrong_number_of_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^_Doubles\.results returned 4 results for a batch of 2 samples; expected one result per"
    ):
        Inference(_config(tmp_path), model=_Net, data=_data(6), task=_Doubles()).run()
    with pytest.raises(UserError, match=r"cannot be written as JSON: .*; NaN may be written as None\."):
        Inference(_config(tmp_path / "other"), model=_Net, data=_data(6), task=_NotNumbers()).run()


class _Noise(_Sums):
    def results(self, outputs: torch.Tensor, batch: Batch) -> Sequence[JsonValue]:
        return torch.rand(len(outputs)).tolist()


def test_random_numbers_do_not_depend_on_restarts(tmp_path: Path) -> None:
    texts = []
    for name, stops in (("whole", False), ("cut", True)):
        for tries in range(2 if stops else 1):
            job = Inference(_config(tmp_path / name), model=_Net, data=_data(12), task=_Noise())
            job.events.on(PartWritten, partial(_stop_at_two, stops=stops and tries == 0))
            torch.manual_seed(tries + 1)
            if stops and tries == 0:
                with pytest.raises(KeyboardInterrupt):
                    job.run()
            else:
                job.run()
        texts.append((tmp_path / name / "run" / "results" / "results.jsonl").read_text())
    assert texts[0] == texts[1]
    assert len(set(texts[0].splitlines())) == 12


def _stop_at_two(event: PartWritten, *, stops: bool) -> None:
    if stops and event.step == 2:
        raise KeyboardInterrupt


class _Tokens(_Sums):
    def split_sequence(self, batch: Batch, split: ContextSplit) -> Batch:
        return {"x": split.split(batch["x"]), "number": batch["number"]}

    def join_sequence(self, outputs: torch.Tensor, split: ContextSplit) -> torch.Tensor:
        return split.join(outputs)

    def results(self, outputs: torch.Tensor, batch: Batch) -> Sequence[JsonValue]:
        return outputs[..., 0].tolist()


def _long_data() -> list[Batch]:
    x = torch.randn(3, 8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [{"x": each, "number": torch.tensor(0)} for each in x]


def _run_sequences(folder: str, mesh: dict[str, int]) -> None:
    Inference(_config(Path(folder), mesh=mesh), model=_Net, data=_long_data(), task=_Tokens()).run()


def test_sequences_split_over_ranks_are_joined(tmp_path: Path) -> None:
    run_ranks(_run_sequences, str(tmp_path / "two"), {"context_parallel_shard": 2})
    _run_sequences(str(tmp_path / "one"), {})
    one, two = (_lines(tmp_path / name) for name in ("one", "two"))
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-12, atol=1e-12)
    assert torch.tensor(one).shape == (3, 8)


def test_bad_jobs_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data are empty"):
        _inference(tmp_path, size=0).run()
    with pytest.raises(UserError, match=r"weights = .*nowhere"):
        _inference(tmp_path, weights=str(tmp_path / "nowhere")).run()
    with pytest.raises(UserError, match="cannot join outputs under context parallelism"):
        _Sums().join_sequence(torch.ones(1), None)  # ty: ignore[invalid-argument-type]
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="part_sise is not a configuration key; did you mean part_size"):
        _config(tmp_path, part_sise=3)


def _threes(stage: StageInfo) -> nn.Module:
    layer = nn.Linear(4, 1, bias=False)
    layer.load_state_dict({"weight": torch.full((1, 4), 3.0)})
    return layer


class _Scores(InferenceTask):
    def inputs(self, batch: torch.Tensor) -> Any:
        return Inputs(batch)

    def results(self, outputs: torch.Tensor, batch: torch.Tensor) -> Sequence[JsonValue]:
        return outputs[:, 0].tolist()


def _scores(folder: Path, mesh: dict[str, int]) -> list[JsonValue]:
    data = [torch.full((4,), float(value)) for value in range(4)]
    job = Inference(_config(folder, mesh=mesh), model=_threes, data=data, task=_Scores())
    return [json.loads(line) for line in job.run().file.read_text().splitlines()]


@pytest.mark.parametrize("mesh", [{}, {"data_parallel_shard": 2}])
def test_weights_that_the_function_loaded_are_used(tmp_path: Path, mesh: dict[str, int]) -> None:
    for results in run_ranks(_scores, tmp_path, mesh, world_size=len(mesh) + 1):
        assert results == [0.0, 12.0, 24.0, 36.0]


def test_data_workers_have_the_prefetch_and_timeout_of_the_configuration(tmp_path: Path) -> None:
    _weights(tmp_path / "weights")
    data = {"num_workers": 1, "prefetch": 3, "worker_timeout": 77.0}
    with mock.patch.object(inference_module, "BatchReader", wraps=BatchReader) as reader:
        _inference(tmp_path, weights=str(tmp_path / "weights"), data=data).run()
    used = reader.call_args.kwargs
    assert (used["num_workers"], used["prefetch"], used["timeout"]) == (1, 3, 77.0)
    with pytest.raises(UserError, match=r"data\.shuffle is not a configuration key"):
        _config(tmp_path, data={"shuffle": False})


def test_a_model_on_meta_without_weights_is_refused(tmp_path: Path) -> None:
    provider = FunctionProvider(_Net, late_init=True)
    job = Inference(_config(tmp_path), model=provider, data=_data(3), task=_Sums())
    message = "weights is not set, and FunctionProvider builds on `meta`, so the results would be random"
    with pytest.raises(UserError, match=message):
        job.run()
    assert not list(tmp_path.iterdir())
