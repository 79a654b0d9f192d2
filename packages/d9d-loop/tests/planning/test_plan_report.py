"""Warning of a job that does not fit into device memory, with the nearest layout that does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist import UserError
from d9d_loop import Loss, Task, Trainer, TrainerConfig
from d9d_loop.planning import Hardware, plan_cluster, warn_if_too_large
from d9d_loop.planning.html_report import write_html

VOCABULARY, WIDTH, LENGTH = 4096, 32, 128


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class NextToken(Task):
    def inputs(self, batch: Any) -> Any:
        return {"tokens": batch["tokens"]}

    def loss(self, outputs: Any, batch: Any) -> Loss:
        loss = F.cross_entropy(outputs.flatten(0, 1), batch["tokens"].flatten(), reduction="sum")
        return Loss(loss, weight=batch["tokens"].numel())


def _trainer(folder: Path) -> Trainer:
    config = TrainerConfig.model_validate(
        {
            "steps": 1,
            "run": {"folder": folder},
            "batch": {"global_size": 8},
            "rehearsal": False,
            "export": False,
            "trackers": (),
        }
    )
    data = [{"tokens": torch.zeros(LENGTH, dtype=torch.int64)}] * 8
    return Trainer(config, model=Decoder, data=data, task=NextToken())


def _hardware(folder: Path, *, spare_bytes: float) -> str:
    """Write a description of a device with some bytes beside the planner's 1.5 GiB for the device context."""
    device = Hardware.load("h100-dgx").model_dump()
    path = folder / "small.toml"
    lines = ['name = "small"', "devices_per_node = 1"]
    device["device"]["memory_bytes"] = 1.5 * 2**30 + spare_bytes
    for part in ("device", "links", "network", "fitted"):
        lines.append(f"[{part}]")
        values = device[part].items()
        lines += [f"{key} = {json.dumps(value)}" for key, value in values if not isinstance(value, dict)]
        lines += [f"peak_flops.{key} = {value}" for key, value in device[part].get("peak_flops", {}).items()]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.slow
def test_the_warning_of_a_job_that_does_not_fit_names_the_nearest_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, hardware = _trainer(tmp_path / "runs"), _hardware(tmp_path, spare_bytes=2e7)
    plan = plan_cluster(trainer, world_size=1, hardware=hardware)
    assert not plan.fits
    assert plan.nearest is not None
    assert plan.nearest.layout.microbatch_size < 8
    assert plan.nearest.memory.total <= plan.hardware.device.memory_bytes
    write_html(plan, tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "<title>d9d-plan</title><style>" in page
    assert all(f'<img alt="{title}" src=' in page for title in ("Memory by rank", "Time of a step", "Roofline"))
    assert '<p class="verdict"' in page
    warn_if_too_large(trainer, hardware=hardware)
    out = capsys.readouterr().out
    assert "d9d: the job needs 1." in out
    assert "The nearest layout that fits" in out


@pytest.mark.slow
def test_a_job_that_fits_is_not_warned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warn_if_too_large(_trainer(tmp_path / "runs"), hardware="h100-dgx")
    assert capsys.readouterr().out == ""


def test_unknown_hardware_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="got the hardware 'h1000'; expected one of"):
        warn_if_too_large(_trainer(tmp_path / "runs"), hardware="h1000")
