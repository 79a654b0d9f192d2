"""Each setting is changed on a resume, and the rest of the run is compared with the promise of the documentation."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import UserError
from d9d_loop import Finished, Loss, StepDone, Task, Trainer, TrainerConfig, validate_config
from d9d_loop.job.resume_settings import EFFECTS, changes, describe, effect_of

STEPS, SAVED = 6, 4
DOCS = Path(__file__).parents[4] / "docs" / "training.md"

CHANGED: dict[str, Any] = {
    "steps": 8,
    "epochs": 9,
    "batch.global_size": 8,
    "batch.microbatch_size": 1,
    "seed": 3,
    "precision": "parameters",
    "pipeline.draw": False,
    "pipeline.schedule.kind": "gpipe",
    "data.num_workers": 1,
    "data.prefetch": 3,
    "data.worker_timeout": None,
    "data.shuffle": False,
    "optimizer.kind": "adam",
    "optimizer.learning_rate": 0.2,
    "optimizer.weight_decay": 0.0,
    "optimizer.decays": "all",
    "optimizer.layer_decay": 0.5,
    "optimizer.groups": [{"pattern": "bias", "learning_rate": 0.5}],
    "optimizer.betas": [0.5, 0.5],
    "optimizer.eps": 1e-3,
    "average": {"decay": 0.5},
    "early_stopping": {"patience": 9},
    "freeze": ["bias"],
    "activation_checkpointing": ".*",
    "plateau": {"patience": 9},
    "lr_schedule.kind": "wsd",
    "lr_schedule.warmup_steps": 3,
    "lr_schedule.final_fraction": 0.5,
    "gradients.max_norm": 0.01,
    "gradients.reduce_each_microbatch": True,
    "checkpoint.every": 3,
    "checkpoint.background": True,
    "checkpoint.trainable_only": True,
    "checkpoint.keep_last": None,
    "checkpoint.keep_every": 4,
    "checkpoint.keep_best": 1,
    "checkpoint.best_by": "other",
    "checkpoint.higher_is_better": True,
    "checkpoint.replicas": 1,
    "evaluation.every": 1,
    "evaluation.num_samples": 2,
    "logging.every": 1,
    "logging.progress": True,
    "logging.report": False,
    "logging.stamps": False,
    "logging.draw_lr_schedule": True,
    "logging.peak_flops": 1e12,
    "host.collect_garbage_every": None,
    "profile.first_step": 5,
    "resilience.timeouts.step_seconds": 100.0,
    "resilience.timeouts.startup_seconds": 100.0,
    "resilience.timeouts.lock_seconds": 100.0,
    "resilience.watchdog.enabled": True,
    "resilience.health.enabled": True,
    "resilience.stop.every": 2,
    "resilience.bad_steps.non_finite": "stop",
    "resilience.bad_steps.spike": "ignore",
    "resilience.bad_steps.max_in_a_row": 2,
    "resilience.replicas.every": 1,
    "trackers": [],
    "compile": "eager",
    "rehearsal": True,
    "export": True,
}
"""New value of each setting that is changed in a resumed run."""

UNTRIED = (
    *("run", "mesh", "checkpoint.memory_every", "checkpoint.local_every", "checkpoint.local_folder"),
    *(
        "checkpoint.folder",
        "evaluation.only",
        "gradients.dtype",
        "initial_weights",
        "pipeline.schedule",
    ),
    *("profile", "resilience.health", "resilience.stop", "resilience.bad_steps"),
)
"""Settings of other tests (meshes, tiers, folders, the process's signals), and options of settings that are off."""


class _Squares(Task):
    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"input": batch["x"]}

    def loss(self, outputs: Tensor, batch: Any) -> Loss:
        return Loss((outputs - batch["y"]).square().sum(), weight=len(outputs))


class _Cut(Exception):  # noqa: N818 - not an error of the job
    pass


def _data(size: int, seed: int) -> list[dict[str, Tensor]]:
    draws = torch.Generator().manual_seed(seed)
    shapes = (("x", 3), ("y", 2))
    return [{name: torch.randn(n, generator=draws, dtype=torch.float64) for name, n in shapes} for _ in range(size)]


def _model(_stage: Any) -> nn.Module:
    return nn.Linear(3, 2).double()


def _run(folder: Path, *, cut: bool = False, **change: Any) -> dict[str, Tensor]:
    """Run or resume a job to its end, or to the step after its last save; return its weights."""
    values: dict[str, Any] = {
        "steps": STEPS,
        "batch": {"global_size": 4, "microbatch_size": 2},
        "run": {"folder": folder},
        "checkpoint": {"every": 2, "background": False},
        "evaluation": {"every": 2},
        "optimizer": {"learning_rate": 0.1},
        "lr_schedule": {"warmup_steps": 2},
        "logging": {"progress": False},
        "resilience": {"health": {"enabled": False, "memory_mib": 1}, "watchdog": {"enabled": False}},
        "export": False,
        "rehearsal": False,
    }
    for name, value in change.items():
        *sections, key = name.split(".")
        section = values
        for each in sections:
            section = section.setdefault(each, {})
        section[key] = value
    if change.get("lr_schedule.kind") == "wsd":
        values["lr_schedule"] = {"kind": "wsd"}
    weights: dict[str, Tensor] = {}
    config = validate_config(TrainerConfig, values)
    trainer = Trainer(config, model=_model, data=_data(16, 0), task=_Squares(), evaluation_data=_data(4, 1))

    def stop(event: StepDone) -> None:
        if cut and event.step == SAVED + 1:
            raise _Cut

    trainer.events.on(StepDone, stop)
    trainer.events.on(Finished, lambda event: weights.update(event.model.state_dict()))
    if cut:
        with pytest.raises(_Cut):
            trainer.train()
    else:
        trainer.train()
    return weights


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Return a job that was killed after a save, and the weights of the uninterrupted job."""
    folder = tmp_path_factory.mktemp("settings")
    _run(folder / "cut", cut=True)
    return folder / "cut", _run(folder / "whole")


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.sample("batch.global_size", "seed", "optimizer.kind", "data.prefetch", "batch.microbatch_size")
def test_a_changed_setting_has_its_documented_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], runs: tuple[Path, dict[str, Tensor]], name: str
) -> None:
    cut, whole = runs
    shutil.copytree(cut, tmp_path / "cut")
    capsys.readouterr()
    effect = effect_of(name)
    more = {"checkpoint.keep_last": 2, "checkpoint.every": 4} if name == "checkpoint.keep_every" else {}
    if effect == "error":
        with pytest.raises(
            UserError, match=rf"(?s)(other settings|training data).*{re.escape(name.rsplit('.', maxsplit=1)[-1])} was"
        ):
            _run(tmp_path / "cut", **{name: CHANGED[name]})
        return
    weights = _run(tmp_path / "cut", **{name: CHANGED[name]}, **more)
    printed = capsys.readouterr().out
    assert (f"  {name} was" in printed) == (effect == "reported")
    if effect == "none":
        assert all(torch.equal(weights[key], whole[key]) for key in whole)
    if effect == "layout":
        torch.testing.assert_close(weights, whole, rtol=1e-12, atol=1e-13)


def _leaves(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _leaves(each, f"{name}.{key}".lstrip("."))
    else:
        yield name


def _is_in(name: str, names: Any) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in names)


def test_every_setting_is_classified_and_tried() -> None:
    config = validate_config(TrainerConfig, {"batch": {"global_size": 1}}).model_dump(mode="json")
    leaves = set(_leaves(config))
    assert not [name for name in leaves if not _is_in(name, EFFECTS)]
    assert not [name for name in leaves if name not in CHANGED and not _is_in(name, UNTRIED)]
    assert CHANGED.keys() <= leaves
    assert effect_of("dataset.length") == "reported"


def test_the_documentation_has_the_table() -> None:
    text = DOCS.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (error|reported|layout|none)\b[^|]*\| (.*) \|$", text, flags=re.MULTILINE)
    documented = {name: effect for effect, names in rows for name in re.findall(r"`([^`]+)`", names)}
    assert documented == dict(EFFECTS)


def test_changes_name_nested_values() -> None:
    before, now = {"a": {"b": 1, "old": 2}, "c": [1]}, {"a": {"b": 2, "new": 3}, "c": [1]}
    assert list(map(describe, changes(before, now, "x", known_only=True))) == ["  x.a.b was 1, and now is 2"]
    assert len(list(changes(before, now))) == 3
