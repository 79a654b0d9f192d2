"""Ranks with other code do not train together, and a resumed run names the code that has changed."""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from d9d_dist import UserError
from d9d_dist.testing import run_ranks
from d9d_loop import Loss, Task, Trainer, TrainerConfig
from d9d_loop.data import DatasetProvider
from d9d_loop.engine.code_digest import _own_file, describe_model, source_digests

Activation = Callable[[torch.Tensor], torch.Tensor]


class _Mlp(nn.Module):
    def __init__(self, activation: Activation | nn.Module, width: int = 4, *, deeper: bool = False) -> None:
        super().__init__()
        self.up, self.activation, self.down = nn.Linear(3, width), activation, nn.Linear(width, 1)
        if deeper:
            self.more = nn.Linear(1, 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name of the task's input
        return self.down(self.activation(self.up(input)))


def _squared(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square()


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x) * 2


def _closure(activation: Activation) -> Activation:
    return lambda x: activation(x) + 1


class _Scaled:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


@pytest.mark.parametrize(
    "pair",
    [
        (functional.relu, functional.gelu),
        (nn.ReLU(), nn.GELU()),
        (nn.LeakyReLU(0.1), nn.LeakyReLU(0.2)),
        (_squared, _doubled),
        (lambda x: x * 2, lambda x: x * 3),
        (_closure(torch.relu), _closure(torch.tanh)),
        (partial(functional.leaky_relu, negative_slope=0.1), partial(functional.leaky_relu, negative_slope=0.2)),
        (functional.relu, _Scaled()),
    ],
)
def test_other_functions_give_another_description(pair: tuple[Any, Any]) -> None:
    first, second, again = (dict(describe_model(_Mlp(each))) for each in (*pair, pair[0]))
    assert first != second
    assert first == again


def test_functions_that_call_each_other_are_described_once() -> None:
    number = 40
    calls = "\n".join(
        f"def f{index}(x): return [{', '.join(f'f{i}' for i in range(number))}]" for index in range(number)
    )
    found = []
    for factor in (2, 2, 3):
        functions: dict[str, Any] = {"__name__": "__main__"}
        exec(calls + f"\ndef f0(x): return f1(x) * {factor}", functions)  # noqa: S102
        found.append(dict(describe_model(_Mlp(functions["f1"]))))
    assert found[0] == found[1] != found[2]


class _Regression(Task):
    def __init__(self, power: int = 2, *, is_main: bool = True) -> None:
        self.is_main = is_main
        self.distance = (lambda x: x.square()) if power == 2 else (lambda x: x.abs())

    def inputs(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"input": batch["x"]}

    def loss(self, outputs: torch.Tensor, batch: Any) -> Loss:
        return Loss(self.distance(outputs - 1).sum(), weight=len(outputs))


def _train(folder: Path, what: str) -> str:
    """Train with a difference on rank 1, and return the error."""
    is_odd = os.environ["RANK"] == "1"
    values: dict[str, Any] = {
        "steps": 1,
        "batch": {"global_size": 2},
        "run": {"folder": folder},
        "resilience": {"health": {"enabled": False}},
        "rehearsal": False,
        "trackers": [],
        "export": False,
        "logging": {"report": False},
        "optimizer": {"learning_rate": 0.1 if is_odd and what == "configuration" else 0.2},
        "seed": 1 if is_odd and what == "configuration" else 0,
    }
    activation = functional.gelu if is_odd and what == "model" else functional.relu
    width = 5 if is_odd and what == "structure" else 4
    trainer = Trainer(
        TrainerConfig.model_validate(values),
        model=lambda stage: _Mlp(activation, width, deeper=is_odd and what == "layer"),
        data=[{"x": torch.ones(3)}] * (5 if is_odd and what == "length" else 4),
        task=_Regression(1 if is_odd and what == "task" else 2, is_main=not is_odd),
    )
    try:
        trainer.train()
    except UserError as error:
        return str(error)
    return ""


def test_a_resume_names_other_evaluation_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Metrics before and after are of other samples, of which the best is chosen."""
    for steps, held_out in ((1, 2.0), (2, 2.0), (3, 4.0)):
        values: dict[str, Any] = {"run": {"folder": tmp_path}, "batch": {"global_size": 2}, "evaluation": {"every": 1}}
        config = TrainerConfig.model_validate(
            {**values, "steps": steps, "checkpoint": {"every": 1}, "rehearsal": False}
        )
        data = DatasetProvider([{"x": torch.ones(3)}] * 8, evaluation=[{"x": torch.full((3,), held_out)}] * 2)
        Trainer(config, model=lambda stage: _Mlp(functional.relu), data=data, task=_Regression()).train()
        assert ("  the evaluation data has changed" in capsys.readouterr().out) == (held_out == 4.0)


_EXPECTED = {
    "nothing": "",
    "model": "the model differs between the 2 ranks: rank 1 differs from rank 0 in _Mlp; expected equal values.",
    "task": "the code of the job differs between the 2 ranks: rank 1 differs from rank 0 in the task's distance;",
    "configuration": (
        "the configuration differs between the 2 ranks: rank 1 differs from rank 0 in seed (0 on "
        "rank 0, 1 on rank 1), optimizer.learning_rate (0.2 on rank 0, 0.1 on rank 1); expected equal values."
    ),
    "structure": (
        "the structure of the model differs between the 2 ranks: rank 1 differs from rank 0 in up.weight "
        "(float32[4, 3] on rank 0, float32[5, 3] on rank 1), up.bias (float32[4] on rank 0, "
    ),
    "layer": (
        "the structure of the model differs between the 2 ranks: rank 1 differs from rank 0 in more.weight (absent "
        "on rank 0, float32[1, 1] on rank 1)"
    ),
    "length": (
        "the training data differs between the 2 ranks: rank 1 differs from rank 0 in indexed.samples (4 on "
        "rank 0, 5 on rank 1)"
    ),
}


def _train_each(folder: Path) -> list[str]:
    return [_train(folder / what, what) for what in _EXPECTED]


def test_a_job_names_what_differs_between_its_ranks(tmp_path: Path) -> None:
    for messages in run_ranks(_train_each, tmp_path):
        for found, expected in zip(messages, _EXPECTED.values(), strict=True):
            assert found.startswith(expected)
            assert bool(found) == bool(expected)


def test_a_changed_configuration_of_the_model_has_another_digest(tmp_path: Path) -> None:
    file, name = tmp_path / "config.json", "the model's config.json"
    assert name not in source_digests(tmp_path)
    file.write_text('{"rope_theta": 10000.0}')
    before = source_digests(tmp_path)
    file.write_text('{"rope_theta": 77.0}')
    after = source_digests(tmp_path)
    assert {key for key in after if after[key] != before[key]} == {name}


def test_a_script_is_found_in_the_root_folder_and_relative_to_the_current_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/train.py", raising=False)
    assert _own_file("__main__") == Path("/train.py")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)
        assert _own_file("__main__") == tmp_path.resolve() / name / "train.py"


def test_the_users_modules_are_named() -> None:
    assert f"the code of {__name__}" in source_digests()
