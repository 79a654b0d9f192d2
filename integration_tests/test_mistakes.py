"""Plausible mistakes of a new user. Each gives one message with the remedy, before a run folder or a group exists."""

# ruff: noqa: E501 - a table of messages

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mistakes_table import BEFORE, NEVER, ROWS
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from d9d_dist.testing import run_ranks
from d9d_loop import Loss, ModelProvider, Task, Trainer, TrainerConfig, TrainResult, cli_main
from d9d_loop.resilience.bad_steps import BadStepError

REHEARSES = True  # see quick_jobs.py

ROOT = Path(__file__).resolve().parents[1]
Batch = dict[str, torch.Tensor]


class Mlp(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


class Regression(Task):
    def inputs(self, batch: Batch) -> Any:
        return {"x": batch["x"]}

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Any:
        return Loss(F.mse_loss(outputs, batch["y"], reduction="sum"), weight=batch["y"].numel())


class NoReturn(Regression):
    def inputs(self, batch: Batch) -> Any:
        pass


class Tuple(Regression):
    def inputs(self, batch: Batch) -> Any:
        return (batch["x"],)


class OtherName(Regression):
    def inputs(self, batch: Batch) -> Any:
        return {"input": batch["x"]}


class OtherKey(Regression):
    def inputs(self, batch: Batch) -> Any:
        return {"x": batch["features"]}


class ReturnsTensor(Regression):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> Any:
        return F.mse_loss(outputs, batch["y"])


class NoLoss(Regression):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> Any:
        Loss(outputs.sum(), weight=1)


class NotSummed(Regression):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> Any:
        return Loss((outputs - batch["y"]).square(), weight=1)


class Detached(Regression):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> Any:
        return Loss(F.mse_loss(outputs.detach(), batch["y"], reduction="sum"), weight=1)


class PythonNumber(Regression):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> Any:
        return Loss(3.5, weight=1)  # ty: ignore[invalid-argument-type] - the mistake


class NoWeight(Regression):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> Any:
        return Loss(outputs.sum(), weight=0)


class WeightPerItem(Regression):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> Any:
        return Loss(outputs.sum(), weight=torch.ones(8, 1))


class TruthValue(Regression):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> Any:
        return Loss.sum(outputs, True)


class Typo(Regression):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> Any:
        return Loss(F.mse_los(outputs, batch["y"]), weight=1)  # ty: ignore[missing-attribute] - the mistake


class MetricTypo(Regression):
    def update_metrics(self, metrics: Any, *, outputs: Any, batch: Any, loss: Loss) -> None:
        metrics["accuracy"].update(outputs)


class NoMetrics(Regression):
    def metrics(self) -> Any:
        pass


class OtherMetric(Regression):
    def metrics(self) -> Any:
        return {"accuracy": nn.L1Loss()}


class WrongShape(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).view(-1, 3))


class Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 1)]  # a list does not register modules

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


class InPlace(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).sigmoid()
        hidden += 1
        return self.down(hidden)


class InPlaceModule(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(F.relu(self.up(x))))


class Frozen(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Complex(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(1, dtype=torch.complex128))


class Provider(ModelProvider):
    def build(self, stage: Any) -> nn.Module:
        return Mlp()


class NoLength(Dataset[Batch]):
    def __getitem__(self, index: int) -> Batch:
        return SAMPLES[index]


class Iterates(IterableDataset[Batch]):
    def __iter__(self) -> Iterator[Batch]:
        return iter(SAMPLES)


class Fails(Dataset[Batch]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Batch:
        return {"x": torch.load("absent.pt"), "y": torch.zeros(1)}


SAMPLES = [{"x": torch.randn(4), "y": torch.randn(1)} for _ in range(16)]
DOUBLES = [{"x": each["x"].double(), "y": each["y"].double()} for each in SAMPLES]
RAGGED = [{"x": torch.randn(4 + index % 2), "y": torch.randn(1)} for index in range(16)]
WIDE = [{"x": torch.randn(5), "y": torch.randn(1)} for _ in range(16)]


def _generator() -> Iterator[Batch]:
    yield from SAMPLES


def _dataset_dict() -> Any:
    import datasets

    return datasets.DatasetDict({"train": datasets.Dataset.from_dict({"x": [1]})})


def _no_model() -> Any:
    Mlp()


def _failing_model() -> nn.Module:
    return Mlp(hidden=4)  # ty: ignore[unknown-argument] - the mistake


# Name: (arguments of the Trainer, command line, message). The message is a regular expression.
MISTAKES: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "loss returns a tensor": ({"task": ReturnsTensor()}, [], r"ReturnsTensor\.loss returned a tensor of shape \[\]; expected Loss"),
    "loss has no return": ({"task": NoLoss()}, [], r"NoLoss\.loss returned None \(is a return missing\?\)"),
    "loss is not summed": ({"task": NotSummed()}, [], r"total of a tensor of shape \[8, 1\]; .* total\.sum\(\)"),
    "loss is detached": ({"task": Detached()}, [], r"without a gradient, .* Remove detach\(\)"),
    "loss is a number": ({"task": PythonNumber()}, [], r"total of a float; expected a 0-dim tensor"),
    "weight 0": ({"task": NoWeight()}, [], r"returned weight = 0; expected a positive number"),
    "weight per item": ({"task": WeightPerItem()}, [], r"weight of a tensor of shape \[8, 1\]; .* mask\.sum\(\)"),
    "truth value as weight": ({"task": TruthValue()}, [], r"got weight = True of a Loss; expected the number of the summed items"),
    "typo in the loss": ({"task": Typo()}, [], r"fails in Typo\.loss: AttributeError: .*\n.*test_mistakes\.py, line \d+, in loss:"),
    "metric that does not exist": ({"task": MetricTypo()}, [], r"MetricTypo\.update_metrics: KeyError: 'accuracy'"),
    "inputs has no return": ({"task": NoReturn()}, [], r"NoReturn\.inputs returned None \(is a return missing\?\); expected a dict"),
    "inputs returns a tuple": ({"task": Tuple()}, [], r'Tuple\.inputs returned a tuple; .* Mlp\.forward\(x\).* return \{"x": \.\.\.\}'),
    "inputs names another argument": ({"task": OtherName()}, [], r"Mlp\.forward\(x\) cannot be called with .*\(input\): missing"),
    "key that the batch lacks": ({"task": OtherKey()}, [], r"KeyError: 'features'\.\n.*\nThe batch is \{x: float32\[8, 4\], y: float32\[8, 1\]\}"),
    "task class": ({"task": Regression}, [], r"got the class Regression as task; .* Pass Regression\(\)"),
    "function as task": ({"task": lambda batch: batch}, [], r"got a function as task; expected a Task"),
    "shape mismatch in the model": ({"model": WrongShape()}, [], r"fails in WrongShape\.forward: RuntimeError: .*\n.*in forward: return self\.down"),
    "in-place operation": ({"model": InPlace()}, [], r"in-place operation in InPlace changes a value of shape \[8, 8\] that the backward in InPlace needs\.\n  changed in .*test_mistakes\.py, line \d+, in forward: hidden \+= 1\n  needed by .*, in forward: hidden = self\.up\(x\)\.sigmoid\(\)\nUse"),
    "in-place module": ({"model": InPlaceModule()}, [], r"in-place operation in drop changes a value of shape \[8, 8\] that the backward in InPlaceModule needs"),
    "other width than the data": ({"data": WIDE}, [], r"fails in Mlp\.forward: .*(\n.*)*The batch is \{x: float32\[8, 5\]"),
    "dtype mismatch": ({"data": DOUBLES}, [], r"fails in Mlp\.forward: .*(\n.*)*The parameters are float32: convert the batch"),
    "model is None": ({"model": None}, [], r"got model = None; expected a module"),
    "model function has no return": ({"model": _no_model}, [], r"_no_model returned None \(is a return missing\?\)"),
    "model function fails": ({"model": _failing_model}, [], r"cannot be built: TypeError: .*hidden.*\n.*in _failing_model: return Mlp"),
    "provider class": ({"model": Provider}, [], r"got the class Provider as model; .* Pass Provider\(\.\.\.\)"),
    "layers in a plain list": ({"model": Unregistered()}, [], r"nothing to train: it has no parameters; .* nn\.ModuleList"),
    "everything is frozen": ({"model": Frozen()}, [], r"nothing to train: all 4 parameters are frozen"),
    "data is None": ({"data": None}, [], r"got data = None; .* Is a return missing"),
    "data is a generator": ({"data": _generator()}, [], r"got data = a generator; .* Pass list\(data\)"),
    "data is a DataLoader": ({"data": DataLoader(SAMPLES)}, [], r"got data = a DataLoader; .* Pass loader\.dataset"),  # ty: ignore[invalid-argument-type] - a list
    "data is a path": ({"data": "train.jsonl"}, [], r"got data = 'train\.jsonl'; .* Read the file first"),
    "data is a dict of columns": ({"data": {"x": [1], "y": [2]}}, [], r"got data = a dict; .* pass a list of samples"),
    "data is a DatasetDict": ({"data": _dataset_dict}, [], r"Choose one of the splits 'train'"),
    "data is iterable only": ({"data": Iterates()}, [], r"got data = a Iterates; .*IteratedStream"),
    "dataset without a length": ({"data": NoLength()}, [], r"got data = a NoLength; .*"),
    "evaluation data is a generator": ({"evaluation_data": _generator()}, [], r"got evaluation_data = a generator"),
    "no data": ({"data": []}, [], r"the training data (are empty|have 0 samples)"),
    "fewer samples than the batch": ({"data": SAMPLES[:5]}, [], r"global_size = 8, but the training data have 5 samples.*global_size 5 or less"),
    "samples of several shapes": ({"data": RAGGED}, [], r"fails in collating the first samples: .*(\n.*)*or pass collate="),
    "dataset that fails": ({"data": Fails()}, [], r"fails in reading sample \d+: FileNotFoundError: .*absent\.pt.*\n.*in __getitem__"),
    "sample that is None": ({"data": [None, *SAMPLES]}, ["--data.shuffle", "false"], r"fails in collating the first samples: TypeError: .*\. sample 0 is None; expected a value \(is a return missing"),
    "value of a sample that is None": ({"data": [{**SAMPLES[0], "y": None}, *SAMPLES]}, ["--data.shuffle", "false"], r"\['y'\] of sample 0 is None; expected a value"),
    "parameter of complex128": ({"model": Complex()}, [], r"a trained parameter cannot be saved: turn: safetensors files do not support torch\.complex128; use complex64"),
    "V schedule without a pipeline": ({}, ["--pipeline.schedule", "zbv"], r"zbv has 2 stages on each rank, but mesh\.pipeline_parallel = 1"),
    "pipeline of a module": ({"model": Mlp(), "world": 2}, ["--mesh.pipeline_parallel", "2"], r"got 2 pipeline stages, but the model is a Mlp that is already built"),
    "context parallelism with a task that cannot split": ({"world": 2}, ["--mesh.context_parallel_shard", "2"], r"Regression cannot split a batch over them; expected a method Regression\.split_sequence"),
    "optimizer that is already built": ({"optimizer": torch.optim.SGD(Mlp().parameters(), lr=0.1)}, [], r"got a SGD as optimizer; expected a function of the model\. Pass optimizer=lambda"),
    "class of an optimizer": ({"optimizer": torch.optim.AdamW}, [], r"got the class AdamW as optimizer; .*lambda model: AdamW\(model\.parameters\(\)"),
    "schedule without an argument": ({"lr_schedule": lambda: 1.0}, [], r"got a function as lr_schedule that does not take one argument; expected a function of the step"),
    "schedule that returns a tensor": ({"lr_schedule": torch.tensor}, [], r"the learning-rate schedule returned a Tensor; expected a float"),
    "name of a pipeline schedule": ({"pipeline_schedule": "1f1b"}, [], r"got '1f1b' as pipeline_schedule; expected a schedule of d9d_pipeline"),
    "learning rate as a schedule": ({"lr_schedule": 0.1}, [], r"got a float as lr_schedule; expected a function of the step"),
    "metrics has no return": ({"task": NoMetrics()}, [], r"NoMetrics\.metrics returned None \(is a return missing\?\); expected a mapping"),
    "metric of another library": ({"task": OtherMetric()}, [], r"OtherMetric\.metrics returned a L1Loss as accuracy; expected a Metric of d9d_metrics"),
    "mesh without ranks": ({}, ["--mesh.data_parallel_shard", "4"], r"mesh: data_parallel_shard 4 make 4 ranks, but the job has 1"),
    "typo in a key": ({}, ["--optimizer.learning_rat", "1"], r"did you mean optimizer\.learning_rate\?"),
    "word as a number": ({}, ["--steps", "many"], r"steps = 'many'; expected a valid integer"),
    "no file": ({}, ["absent.toml"], r"configuration file absent\.toml cannot be read: No such file"),
    "no weights": ({}, ["--initial_weights", "absent"], r"initial_weights = absent"),
    "weights of another model": ({}, ["--initial_weights", "{other}"], r"initial_weights = .*(\n.*)*(up\.weight|down\.weight)"),
    "microbatch that does not divide": ({}, ["--batch.microbatch_size", "3"], r"global_size = 8 cannot be divided evenly over .* Use 6 or 9"),
    "run folder is a file": ({}, ["--run.folder", "{file}"], r"is a file, not a folder"),
    "unknown tracker": ({}, ["--trackers", '[{kind = "comet"}]'], r"kind = 'comet'; expected one of"),
    "configuration is a dict": ({"config": {"steps": 3}}, [], r"got a dict as config; expected a TrainerConfig"),
    "configuration lacks a section": ({"config": lambda: TrainerConfig(steps=3)}, [], r"TrainerConfig is invalid:\n +batch is missing"),  # ty: ignore[missing-argument] - the mistake
}  # fmt: skip


def _train(folder: Path, parts: dict[str, Any], arguments: list[str]) -> TrainResult:
    parts = dict(parts)
    common = ["--steps", "3", "--batch.global_size", "8", "--run.folder", str(folder / "runs")]
    if parts.get("data") is _dataset_dict:
        parts["data"] = _dataset_dict()
    config: Any = parts.pop("config", None)
    if config is None:
        overridden = {word for word in arguments if word.startswith("--")}
        kept = [
            word for pair in zip(common[::2], common[1::2], strict=True) if pair[0] not in overridden for word in pair
        ]
        config = TrainerConfig.from_cli(arguments=[*kept, *arguments])
    elif callable(config):
        config = config()
    given: Any = {"model": Mlp, "data": SAMPLES, "task": Regression(), **parts}
    return Trainer(config, **given).train()


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_gives_one_message(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, arguments, message = MISTAKES[name]
    places = {"{other}": tmp_path / "other", "{file}": tmp_path / "file"}
    if "{other}" in arguments:
        _train(tmp_path / "before", {"model": nn.Linear(4, 1), "task": _named("input")}, [])
        (tmp_path / "before/runs/run/export").rename(tmp_path / "other")
    places["{file}"].write_text("")
    capsys.readouterr()
    if world := parts.get("world"):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(SystemExit) as ended, cli_main():
        _train(
            tmp_path / "job",
            {key: value for key, value in parts.items() if key != "world"},
            [str(places.get(word, word)) for word in arguments],
        )
    assert ended.value.code == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert re.match(r"d9d: ", errors)
    assert re.search(message, errors), errors
    assert "Traceback" not in errors
    assert not (tmp_path / "job").exists()


def test_an_in_place_operation_that_the_rehearsal_cannot_find_is_an_error_of_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, cli_main():
        _train(tmp_path, {"model": InPlace()}, ["--rehearsal", "false"])
    assert ended.value.code == 2
    expected = r"changed a value that backward needs \(\[torch\.FloatTensor \[8, 8\]\].* version 0 instead\)\. Use an"
    assert re.search(expected, capsys.readouterr().err)


def _named(argument: str) -> Task:
    class Named(Regression):
        def inputs(self, batch: Batch) -> Any:
            return {argument: batch["x"]}

    return Named()


def test_the_page_lists_each_mistake_that_is_found_late_and_counts_the_others() -> None:
    page = (ROOT / "docs/when_something_fails.md").read_text(encoding="utf-8")
    late = [row for row in ROWS if row.seen != BEFORE]
    rows = [f"| {each.mistake} | {each.seen} | {each.message} | {each.code or '-'} |" for each in late]
    assert not [row for row in rows if row not in page]
    total = len(MISTAKES) + len(ROWS)
    assert f"Tests make {total} mistakes" in page
    assert f"{total - len(late)} are found before the start" in page


def test_each_mistake_of_the_table_has_a_test_or_a_reason() -> None:
    for row in ROWS:
        file, _, name = row.test.partition("::")
        assert row.message
        assert row.seen == NEVER or f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), row


def test_at_least_forty_mistakes_are_tested() -> None:
    assert len(MISTAKES) >= 40


@pytest.mark.parametrize("model", [Mlp(), Mlp, lambda: Mlp(4), lambda stage: Mlp()])
def test_a_model_may_be_a_module_or_a_function(model: Any, tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()} if isinstance(model, Mlp) else {}
    assert _train(tmp_path, {"model": model}, []).steps == 3
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value)  # a copy was trained


def test_a_hugging_face_dataset_is_read_as_tensors(tmp_path: Path) -> None:
    import datasets

    raw = datasets.Dataset.from_list([{key: value.tolist() for key, value in each.items()} for each in SAMPLES])
    assert _train(tmp_path / "raw", {"data": raw}, []).train_loss == pytest.approx(
        _train(tmp_path / "own", {}, []).train_loss, rel=1e-6
    )


class _Values(Regression):
    """Code that depends on values, which the rehearsal cannot run."""

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        assert torch.isfinite(outputs).all()
        return Loss(outputs.square().sum(), weight=int((batch["y"] > -9).sum()))


_CACHE: dict[int, torch.Tensor] = {}


class _Caching(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + _CACHE.setdefault(len(x), torch.zeros(len(x), 1)))


def test_the_rehearsal_leaves_no_fake_tensor_in_a_cache_of_the_model(tmp_path: Path) -> None:
    _CACHE.clear()
    assert _train(tmp_path, {"task": _Values(), "model": _Caching()}, []).steps == 3
    assert type(_CACHE[8]) is torch.Tensor


class _OverRanks(Regression):
    """Loss that needs the process group, as contrastive losses do, and a model that needs a kernel of the device."""

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        return Loss(outputs.square().sum() / dist.get_world_size(), weight=len(outputs))


class _OnDevices(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not dist.is_initialized():
            raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")
        return super().forward(x)


@pytest.mark.parametrize("change", [{"task": _OverRanks()}, {"model": _OnDevices()}], ids=["process group", "kernel"])
def test_the_rehearsal_accepts_code_that_needs_the_job(change: dict[str, Any], tmp_path: Path) -> None:
    assert _train(tmp_path, change, []).steps == 3


class _MaskedOut(Regression):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        return Loss(outputs.sum() * 0, weight=(batch["y"] > 1e9).sum())


def test_a_loss_weight_of_zero_in_the_first_step_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, cli_main():
        _train(tmp_path, {"task": _MaskedOut()}, [])
    assert ended.value.code == 2
    assert "the loss weight of step 1 is 0 over all samples" in capsys.readouterr().err


class _NotANumber(Regression):
    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        return Loss(outputs.sum() * float("nan"), weight=1)


def test_a_run_without_any_update_fails(tmp_path: Path) -> None:
    with pytest.raises(BadStepError, match=r"no update was applied in the steps 1 to 3: all were bad steps\."):
        _train(tmp_path, {"task": _NotANumber()}, [])


def test_an_error_in_a_step_shows_the_users_lines_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Late(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum().item() != 12345:
                raise RuntimeError("numpy is required")  # the rehearsal ignores errors with this word
            return x

    with pytest.raises(RuntimeError, match="numpy is required"), cli_main():
        _train(tmp_path, {"model": Late()}, [])
    first, second, *_ = capsys.readouterr().err.splitlines()[-3:]
    assert first == "d9d: RuntimeError: numpy is required"
    assert re.search(r'test_mistakes\.py, line \d+, in forward: raise RuntimeError\("numpy', second)


def test_a_resumed_run_lists_changed_settings_and_refuses_another_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _train(tmp_path, {}, [])
    capsys.readouterr()
    _train(tmp_path, {}, ["--steps", "4", "--batch.global_size", "4", "--optimizer.learning_rate", "0.5"])
    out = capsys.readouterr().out
    assert "d9d: resumed at step 3 with other settings:\n" in out
    assert "  batch.global_size was 8, and now is 4\n" in out
    assert re.search(r"  optimizer\.learning_rate was 0\.\d+, and now is 0\.5\n", out)
    with pytest.raises(SystemExit), cli_main():
        _train(tmp_path, {}, ["--steps", "5", "--optimizer.kind", "sgd"])
    expected = (
        r"has completed 4 steps with other settings:\n  optimizer\.kind was .*adamw.*, and now is .*sgd.*\nA resumed"
    )
    assert re.search(expected, capsys.readouterr().err)


def _sharded(folder: Path) -> float:
    return _train(folder, {"model": Mlp()}, ["--mesh.data_parallel_shard", "2", "--run.name", "two"]).train_loss


def test_a_module_is_trained_from_its_values_on_several_ranks(tmp_path: Path) -> None:
    losses = run_ranks(_sharded, tmp_path, world_size=2)
    assert losses[0] == losses[1]
