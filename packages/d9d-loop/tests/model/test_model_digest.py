import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

from d9d_dist import (
    ColumnParallel,
    DistributedContext,
    MeshConfig,
    RowParallel,
    materialize,
    parallelize_hsdp,
    parallelize_tensor,
)
from d9d_dist.testing import run_ranks
from d9d_loop.model.model_digest import model_digest


class _Model(nn.Module):
    """Frozen parameters of several shapes and dtypes, one of them tied, and a trained parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.empty(1))
        self.same = self.up
        self.requires_grad_(False)
        self.trained = nn.Parameter(torch.empty(7))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        nn.init.normal_(self.trained)


def _built(parallelize: Callable[[nn.Module], object] = lambda _model: None) -> nn.Module:
    with torch.device("meta"):
        model = _Model()
    parallelize(model)
    materialize(model, device=torch.device("cpu"), seed=3)
    return model


def _by_the_equation(model: nn.Module) -> str:
    total = 0
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            bits = parameter.detach().flatten().view(torch.int16 if parameter.element_size() == 2 else torch.int32)
            factor = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), signed=True) | 1
            total += factor * sum((2 * place + 1) * bit for place, bit in enumerate(bits.tolist()))
    return f"{total % 2**64:016x}"


def test_the_digest_equals_its_formula(ctx: DistributedContext, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _built()
    assert model_digest(model, ctx, frozen=True) == _by_the_equation(model)
    monkeypatch.setattr("d9d_dist.shards._BLOCK_ELEMENTS", 4)
    assert model_digest(model, ctx, frozen=True) == _by_the_equation(model)


def test_the_digest_depends_only_on_frozen_values(ctx: DistributedContext) -> None:
    model = _built()
    before = model_digest(model, ctx, frozen=True)
    model.get_parameter("trained").data.zero_()
    assert model_digest(model, ctx, frozen=True) == before
    with torch.no_grad():
        weight = model.get_parameter("up.weight")
        weight.copy_(weight.roll(1, 0))
    assert model_digest(model, ctx, frozen=True) != before


def test_the_digest_of_all_values_has_the_trained_ones(ctx: DistributedContext) -> None:
    model = _built()
    before = model_digest(model, ctx)
    own = [model_digest(model, ctx, frozen=each) for each in (False, True)]
    assert (int(own[0], 16) + int(own[1], 16)) % 2**64 == int(before, 16)
    model.get_parameter("trained").data.zero_()
    assert model_digest(model, ctx) != before
    model.register_buffer("turns", torch.full((4,), 1 + 2j, dtype=torch.complex128))
    with_turns = model_digest(model, ctx)
    model.get_buffer("turns").mul_(1j)
    assert model_digest(model, ctx) != with_turns


def _on_ranks() -> list[str]:
    found = []
    for mesh in (
        MeshConfig(data_parallel_replicate=2, data_parallel_shard=2),
        MeshConfig(tensor_parallel=2, data_parallel_shard=2),
        MeshConfig(tensor_parallel=2, data_parallel_replicate=2),
        MeshConfig(data_parallel_shard=4),
    ):
        with mesh.build() as ctx:

            def parallelize(model: nn.Module, ctx: DistributedContext = ctx) -> None:
                dense = ctx.mesh_for("dense")
                if dense["tp"].size() > 1:
                    parallelize_tensor(model, dense["tp"], {"up": ColumnParallel(), "down": RowParallel()})
                if ctx.size("batch", "dp") > 1:
                    axes = dense["dp_replicate", "dp_cp_shard", "cp_replicate"]
                    parallelize_hsdp(model, axes, shard_axis="dp_cp_shard")

            found.append(model_digest(_built(parallelize), ctx, frozen=True))
    return found


def test_the_digest_does_not_depend_on_the_layout(ctx: DistributedContext) -> None:
    # In one layout replicated parameters are on ranks with different shards: they are counted once.
    expected = model_digest(_built(), ctx, frozen=True)
    assert run_ranks(_on_ranks, world_size=4) == [[expected] * 4] * 4
