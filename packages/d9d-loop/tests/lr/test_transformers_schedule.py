import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from d9d_dist import UserError
from d9d_loop import TrainerConfig, validate_config
from d9d_loop.lr.lr_schedule import WarmupCosineConfig
from d9d_loop.lr.transformers_schedule import ScheduleName, TransformersScheduleConfig

OPTIONS: dict[str, dict[str, Any]] = {
    "cosine_warmup_with_min_lr": {"min_lr": 1e-4, "warmup_lr_rate": 0.2},
    "cosine_with_min_lr": {"min_lr_rate": 0.25},
    "cosine_with_restarts": {"num_cycles": 2},
    "inverse_sqrt": {"timescale": 3},
    "polynomial": {"lr_end": 1e-4, "power": 2.0},
    "warmup_stable_decay": {"num_decay_steps": 3, "min_lr_ratio": 0.1},
}
PEAK = 3e-3


@pytest.mark.parametrize("name", get_args(ScheduleName))
def test_learning_rates_equal_those_of_transformers_in_every_step(name: str) -> None:
    from transformers import get_scheduler

    warmup, options = 0 if name == "constant" else 3, OPTIONS.get(name, {})
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    scheduler = get_scheduler(name, optimizer, warmup, 10, options or None)
    expected = []
    for _ in range(10):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    absolute = name == "polynomial" or "min_lr" in options
    section = {"kind": "transformers", "name": name, "warmup_steps": warmup, "options": options}
    config = validate_config(
        TrainerConfig,
        {
            "steps": 10,
            "batch": {"global_size": 1},
            "optimizer": {"learning_rate": PEAK},
            "lr_schedule": {**section, "peak_learning_rate": PEAK} if absolute else section,
        },
    )
    schedule = config.lr_schedule.build(10)
    assert [PEAK * schedule(step) for step in range(10)] == expected


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"name": "polynomial"}, "peak_learning_rate = None; expected the optimizer's learning_rate"),
        ({"name": "linear", "peak_learning_rate": 1.0}, "peak_learning_rate = 1.0; expected null"),
        ({"name": "constant", "warmup_steps": 2}, "constant has no warm-up"),
        ({"name": "cosine_with_min_lr", "options": {"min_lr": 1e-5}}, "expected the optimizer's learning_rate"),
        ({"name": "polynomial", "peak_learning_rate": 0.5}, "peak_learning_rate = 0.5, but optimizer.learning_rate = "),
    ],
)
def test_settings_that_would_have_another_effect_are_errors(section: dict[str, Any], problem: str) -> None:
    values = {"steps": 4, "batch": {"global_size": 1}, "lr_schedule": {"kind": "transformers", **section}}
    with pytest.raises(UserError, match=re.escape(problem)):
        validate_config(TrainerConfig, values)


@pytest.mark.parametrize(
    ("name", "options"), [("cosine", {"cycles": 2}), ("cosine_with_min_lr", {}), ("warmup_stable_decay", {})]
)
def test_options_that_the_schedule_does_not_accept_are_errors(name: str, options: dict[str, Any]) -> None:
    config = TransformersScheduleConfig.model_validate({"name": name, "options": options})
    with pytest.raises(UserError, match=f"expected arguments of the schedule {name} of transformers"):
        config.build(4)


def _rates_of_torch() -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    warmup = LinearLR(optimizer, start_factor=1 / 3, total_iters=2)
    schedule = SequentialLR(optimizer, [warmup, CosineAnnealingLR(optimizer, T_max=7)], milestones=[2])
    rates = []
    for _ in range(10):
        rates.append(float(schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
    return rates


def test_the_table_of_the_documentation_is_right() -> None:
    page = Path(__file__).parents[4] / "docs" / "optimizers.md"
    rows = re.findall(
        r"^\| ((?:`(?:warmup|transformers|Linear)|torchtitan).*)$", page.read_text(encoding="utf-8"), re.MULTILINE
    )
    shown = [[float(each) for each in row.strip("| ").split("|")[1:]] for row in rows]
    schedules = [
        WarmupCosineConfig(warmup_steps=2, final_fraction=0.0).build(10),
        _rates_of_torch().__getitem__,
        lambda step: min(1.0, (step + 1) / 2) if step < 2 else (1 + math.cos(math.pi * (step - 2) / 8)) / 2,
        TransformersScheduleConfig(name="cosine", warmup_steps=2).build(10),
        TransformersScheduleConfig(name="linear", warmup_steps=2).build(10),
    ]
    assert shown == [[round(schedule(step), 3) for step in range(10)] for schedule in schedules]
