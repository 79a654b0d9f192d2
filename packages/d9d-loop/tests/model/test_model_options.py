"""Options of a configuration for any model, beside a plain loop of torch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from d9d_dist import UserError
from d9d_dist.testing import run_ranks
from d9d_loop import Finished, Loss, StepDone, Task, Trainer, TrainerConfig, validate_config

CALLS = {"blocks": 0, "counted": 0}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)
        self.num_calls: torch.Tensor
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS["blocks"] += 1
        self.num_calls += 1
        return x + self.linear(self.norm(x)).tanh()


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(3, 4), nn.ModuleList([_Block(), _Block()]), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _Fit(Task):
    def inputs(self, batch: torch.Tensor) -> dict[str, Any]:
        return {"x": batch}

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        assert outputs.dtype == torch.float32
        return Loss.sum(F.mse_loss(outputs, batch.sum(1, keepdim=True), reduction="none"), len(batch))


def _data() -> list[torch.Tensor]:
    return list(torch.randn(12, 3, generator=torch.Generator().manual_seed(0)))


def _net() -> _Net:
    torch.manual_seed(0)
    return _Net()


def _run(folder: Path, **sections: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and the exported parameters."""
    values = {
        "steps": 3,
        "batch": {"global_size": 4},
        "run": {"folder": folder},
        "mesh": {"data_parallel_shard": -1},
        "data": {"shuffle": False},
        "logging": {"progress": False, "report": False},
        "optimizer": {"kind": "sgd", "learning_rate": 0.1},
        "lr_schedule": {"final_fraction": 1.0},
        "resilience": {"health": {"memory_mib": 1, "message_mib": 1, "matrix_size": 32}},
    }
    trainer = Trainer(validate_config(TrainerConfig, {**values, **sections}), model=_net, data=_data(), task=_Fit())
    losses: list[float] = []
    state: dict[str, torch.Tensor] = {}
    trainer.events.on(StepDone, lambda done: losses.append(done.loss.item()))
    trainer.events.on(Finished, lambda done: state.update(_full_state(done.model)))
    trainer.events.on(Finished, lambda done: CALLS.update(counted=int(done.model.get_buffer("blocks.1.num_calls"))))
    CALLS["blocks"] = 0
    trainer.train()
    return losses, state


def _full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each.detach().clone()
        for name, each in model.named_parameters()
    }


def _plain(*, autocast: bool = False, freeze: str = "") -> tuple[list[float], dict[str, torch.Tensor]]:
    model = _net()
    for name, each in model.named_parameters():
        each.requires_grad_(not freeze or freeze not in name)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    losses = []
    for batch in torch.stack(_data()).split(4):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            outputs = model(batch)
        loss = F.mse_loss(outputs.float(), batch.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def test_autocast_equals_that_of_torch(tmp_path: Path) -> None:
    expected, _ = _plain(autocast=True)
    assert _run(tmp_path, precision="autocast")[0] == pytest.approx(expected, rel=1e-6)
    assert _plain()[0] != pytest.approx(expected, rel=1e-4)


def _run_on_ranks(folder: Path) -> None:
    sections = {"freeze": ["embed", r"^blocks\.0"], "activation_checkpointing": "blocks", "precision": "autocast"}
    losses, state = _run(folder, **sections, rehearsal=False)
    assert CALLS["blocks"] == 3 * 3  # nothing before block 1 has a gradient
    assert losses[0] == pytest.approx(_plain(autocast=True)[0][0], rel=1e-6)
    initial = _net().state_dict()
    for name, each in state.items():
        assert torch.equal(each, initial[name]) == name.startswith(("embed", "blocks.0")), name


def test_options_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(_run_on_ranks, tmp_path, world_size=2)


@pytest.mark.parametrize(("pattern", "calls"), [("blocks", 4), ("blocks.*", 4), (r"blocks\.1", 3)])
def test_recomputed_blocks_change_no_value(pattern: str, calls: int, tmp_path: Path) -> None:
    expected, _ = _plain()
    assert _run(tmp_path, activation_checkpointing=pattern, rehearsal=False)[0] == pytest.approx(expected)
    assert (CALLS["blocks"], CALLS["counted"]) == (3 * calls, 3)


def test_frozen_parameters_are_not_trained(tmp_path: Path) -> None:
    assert _run(tmp_path, freeze=["embed"])[0] == pytest.approx(_plain(freeze="embed")[0], rel=1e-6)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"freeze": ["embedding"]}, r"freeze: 'embedding' matches no parameter; expected at least one of embed.weight"),
        ({"freeze": ["("]}, r"freeze: '\(' is not a regular expression"),
        (
            {"activation_checkpointing": "layers"},
            r"'layers' matches no module; expected at least one of embed, blocks\.0, blocks\.0\.norm",
        ),
        ({"activation_checkpointing": "block."}, r"'block.' matches no module"),  # a list of modules is never called
        ({"freeze": ["."]}, r"has nothing to train: all 12 parameters are frozen"),
    ],
)
def test_patterns_that_match_nothing_are_errors(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        _run(tmp_path, **sections)
