"""Two networks of one engine that take turns, as in a GAN, beside two optimizers of plain torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from d9d_dist import StageInfo, UserError
from d9d_dist.testing import run_ranks
from d9d_loop import Engine, EngineConfig, Loss, Task
from d9d_loop.optimizers import JoinedOptimizer
from d9d_pipeline import Inputs

STEPS, SIZE = 6, 8
TURNS = ("discriminator", "generator")


class _Gan(nn.Module):
    def __init__(self, stage: object = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))

    def forward(self, noise: Tensor, real: Tensor, turn: str) -> tuple[Tensor, Tensor]:
        fake = self.generator(noise)
        if turn == "discriminator":
            fake = fake.detach()
        return self.discriminator(fake), self.discriminator(real)


class _Stage(_Gan):
    """Stage of the two networks: the first one has the generator, the last one the discriminator."""

    def __init__(self, stage: StageInfo) -> None:
        super().__init__()
        self.stage = stage
        if not stage.is_first:
            del self.generator
        if not stage.is_last:
            del self.discriminator

    def forward(self, noise: Tensor, real: Tensor, turn: str) -> Any:
        if not self.stage.is_last:
            return self.generator(noise)
        if self.stage.is_first:
            return super().forward(noise, real, turn)
        return self.discriminator(noise), self.discriminator(real)  # a stage uses its input in every microbatch


class _Play(Task):
    def inputs(self, batch: Any) -> Inputs:
        return Inputs(batch["noise"], real=batch["real"], turn=batch["turn"])

    def loss(self, outputs: tuple[Tensor, Tensor], batch: Any) -> Loss:
        return _loss(outputs, batch["turn"], count=len(batch["noise"]))


def _loss(outputs: tuple[Tensor, Tensor], turn: str, *, count: int) -> Loss:
    fake, real = outputs
    if turn == "generator":
        return Loss.sum(F.softplus(-fake), count)
    return Loss.sum(F.softplus(fake) + F.softplus(-real), count)


def _batch(step: int, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    draws = torch.Generator().manual_seed(step)
    noise, real = torch.randn(SIZE, 3, generator=draws), torch.randn(SIZE, 4, generator=draws) + 1
    return {"noise": noise.chunk(ranks)[rank], "real": real.chunk(ranks)[rank], "turn": TURNS[step % 2]}


def _optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the networks, or of those in a stage."""
    networks = {turn: [each for name, each in model.named_parameters() if name.startswith(turn)] for turn in TURNS}
    adam = [torch.optim.AdamW(each, lr=1e-2, betas=(0.5, 0.9)) for each in [networks["discriminator"]] if each]
    return [*adam, *(torch.optim.SGD(each, lr=1e-1, momentum=0.9) for each in [networks["generator"]] if each)]


def _expected() -> tuple[list[float], list[float], dict[str, Tensor]]:
    model, losses, norms = _Gan(), [], []
    optimizers = _optimizers(model)
    for step in range(STEPS):
        batch = _batch(step)
        loss = _loss(model(**batch), batch["turn"], count=SIZE).total / SIZE
        optimizer = optimizers[step % 2]
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(getattr(model, batch["turn"]).parameters(), 0.3).item())
        losses.append(loss.item())
        optimizer.step()
    return losses, norms, {name: each.detach() for name, each in model.named_parameters()}


def _join(model: nn.Module) -> torch.optim.Optimizer:
    return JoinedOptimizer(_optimizers(model))


def _play(folder: Path, axis: str, stop: int = STEPS) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train until a step, from the checkpoint if there is one, and save."""
    config = EngineConfig.model_validate(
        {"run": {"folder": folder}, "gradients": {"max_norm": 0.3}, "mesh": {axis: -1}, "precision": "parameters"}
    )
    losses, norms = [], []
    with Engine.open(config, model=_Stage, task=_Play(), optimizer=_join) as engine:
        engine.load()
        rank, ranks = engine.ctx.coordinate("batch", "dp"), engine.ctx.size("batch", "dp")
        while engine.num_steps < stop:
            batch = _batch(engine.num_steps, rank, ranks)
            engine.forward_backward([batch], _Play().loss)
            result = engine.step(only=f"^{batch['turn']}")
            losses.append(result.loss.item())
            norms.append(result.grad_norm.item())
        engine.save()
        weights = dict(_whole(engine.model))
    return losses, norms, weights


def _whole(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, each in model.named_parameters():
        yield name, (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()


def _check(found: tuple[list[float], list[float], dict[str, Tensor]]) -> None:
    losses, norms, weights = _expected()
    assert found[0] == pytest.approx(losses, rel=1e-5)
    assert found[1] == pytest.approx(norms, rel=1e-4)
    own = {name: weights[name] for name in found[2]}  # those of this rank's stage
    torch.testing.assert_close(found[2], own, rtol=1e-4, atol=1e-6)


def test_networks_take_turns_as_with_two_optimizers_of_torch(tmp_path: Path) -> None:
    _check(_play(tmp_path, "data_parallel_shard"))


@pytest.mark.slow("data_parallel_shard", "data_parallel_replicate")
@pytest.mark.parametrize("axis", ["data_parallel_shard", "data_parallel_replicate", "pipeline_parallel"])
def test_turns_on_two_ranks_resume_bitwise_from_one_checkpoint(tmp_path: Path, axis: str) -> None:
    whole = run_ranks(_play, tmp_path / "whole", axis, world_size=2)
    run_ranks(_play, tmp_path / "parts", axis, 3, world_size=2)
    rest = run_ranks(_play, tmp_path / "parts", axis, world_size=2)
    for one, two in zip(whole, rest, strict=True):
        _check(one)
        assert two[0] == one[0][3:]
        assert all(torch.equal(each, two[2][name]) for name, each in one[2].items())


def _match(folder: Path) -> None:
    config = EngineConfig.model_validate({"run": {"folder": folder}, "mesh": {"pipeline_parallel": -1}})
    with Engine.open(config, model=_Stage, task=_Play(), optimizer=_join) as engine:
        engine.forward_backward([_batch(0)], _Play().loss)
        with pytest.raises(UserError, match=r"step\(only='critic'\), which matches no trainable parameter; expected"):
            engine.step(only="critic")
        engine.step(only="generator|discriminator")


@pytest.mark.parametrize("num_stages", [1, 2])
def test_only_must_match_a_parameter(tmp_path: Path, num_stages: int) -> None:
    run_ranks(_match, tmp_path, world_size=num_stages)
