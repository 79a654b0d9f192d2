import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from d9d_dist import MeshConfig, canonical_name, materialize, parallelize_hsdp, parallelize_replicate
from d9d_dist.testing import run_ranks

CPU = torch.device("cpu")


class _Scale(nn.Module):
    """A parameter, a persistent and a non-persistent buffer of its own, and every way to draw."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(9, 3))
        self.truncated = nn.Parameter(torch.empty(40, 30))
        self.register_buffer("count", torch.empty((), dtype=torch.int64))
        self.register_buffer("table", torch.empty(4), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale, mean=1.0, std=0.1)
        nn.init.trunc_normal_(self.truncated, std=0.5, a=-1.0, b=1.0)
        self.get_buffer("count").fill_(3)
        self.get_buffer("table").copy_(torch.arange(4.0))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.middle = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 6))
        self.own = _Scale()
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(ids)))


def _values(layout: str, seed: int) -> dict[str, torch.Tensor]:
    degrees = {"shard": {"data_parallel_shard": 4}, "hybrid": {"data_parallel_replicate": 2, "data_parallel_shard": 2}}
    with MeshConfig(**degrees.get(layout, {"data_parallel_shard": -1})).build() as ctx:
        with torch.device("meta"):
            model = _Tied()
        if layout == "replicate":
            parallelize_replicate(model, ctx.mesh_for("flat"))
        else:
            dense = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard"]
            parallelize_hsdp(model.middle[0], dense, shard_axis="dp_cp_shard")
            parallelize_hsdp(model, dense, shard_axis="dp_cp_shard")
        materialize(model, device=CPU, seed=seed)
        assert model.head.weight is model.embedding.weight
        values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach()
            for name, value in values.items()
        }


@pytest.mark.parametrize("layout", ["shard", "hybrid", "replicate"])
def test_values_do_not_depend_on_the_layout(layout: str) -> None:
    expected = _values("one", seed=5)
    for values in run_ranks(_values, layout, 5, world_size=4):
        assert values.keys() == expected.keys()
        for name, value in values.items():
            assert torch.equal(value, expected[name]), name


def test_values_follow_the_seed_and_the_name() -> None:
    one, other = _values("one", seed=1), _values("one", seed=2)
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])
    assert not torch.equal(one["middle.0.weight"].flatten(), one["middle.2.weight"].flatten())
    assert one["own.count"].item() == 3


def test_values_have_the_asked_distribution() -> None:
    with torch.device("meta"):
        model = nn.Linear(400, 500)
    materialize(model, device=CPU, seed=0)
    bound = 1 / 400**0.5
    assert model.weight.abs().max().item() <= bound
    assert model.weight.mean().item() == pytest.approx(0.0, abs=bound * 0.01)
    assert model.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.01)


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    materialize(model, device=CPU, seed=0)
    assert torch.equal(torch.rand(3), expected)


class _Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.empty(2))
        self.bias = nn.Parameter(torch.empty(2))
        self.register_buffer("mask", torch.empty(2), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)


def test_tells_what_stayed_unset() -> None:
    with torch.device("meta"):
        model = nn.Sequential(_Forgetful())
    with pytest.raises(ValueError, match=r"not set by any reset_parameters: 0\.weight, 0\.mask\. Give the module that"):
        materialize(model, device=CPU, seed=0)


def test_wrappers_leave_no_trace_in_names() -> None:
    assert canonical_name("_orig_mod.layers.0._checkpoint_wrapped_module.up.weight") == "layers.0.up.weight"
