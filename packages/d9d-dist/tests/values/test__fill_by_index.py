import random
from collections.abc import Callable
from math import prod

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from d9d_dist import MeshConfig, materialize, parallelize_hsdp, parallelize_replicate
from d9d_dist.testing import full_tree, run_ranks
from d9d_dist.values._fill_by_index import ELEMENTWISE

Write = Callable[["_Written", Tensor], object]


def _swallow(module: "_Written", weight: Tensor) -> None:
    weight.normal_()
    try:
        weight[0] = 0.3
    except Exception:
        weight.fill_(9.0)


def _assign_mask(module: "_Written", weight: Tensor) -> None:
    weight.normal_()[weight > 0.3] = 0.1


def _assign_rows(module: "_Written", weight: Tensor) -> None:
    weight.normal_()[torch.tensor([0, weight.shape[0] - 1])] = torch.randn(2, weight.shape[1])


def _assign_data(module: "_Written", weight: Tensor) -> None:
    weight.data = torch.full_like(weight.data, 0.7).cumsum(0)


def _replace(module: "_Written", weight: Tensor) -> None:
    module.weight = nn.Parameter(torch.randn(weight.shape))


def _halve_if_any(module: "_Written", weight: Tensor) -> None:
    if (weight.normal_() > 1.5).any():
        weight.mul_(0.3)


def _truncate_and_draw(module: "_Written", weight: Tensor) -> None:
    nn.init.trunc_normal_(weight, std=0.3, a=-0.3, b=0.3)
    module.table.copy_(nn.init.normal_(torch.empty(5)))  # must not depend on the number of redraws of each rank
    nn.init.trunc_normal_(module.bias, std=0.3, a=-0.3, b=0.3)


WAYS: dict[str, Write] = {
    "row": lambda m, w: w.normal_()[0].fill_(0),
    "rows": lambda m, w: w.uniform_()[1:3].mul_(0.3),
    "steps": lambda m, w: w.normal_()[::2].add_(0.1),
    "column": lambda m, w: w.normal_()[:, 1].uniform_(),
    "index_rows": _assign_rows,
    "index_mask": _assign_mask,
    "index_fill": lambda m, w: w.normal_().index_fill_(0, torch.tensor([1]), 0.3),
    "masked_fill": lambda m, w: w.normal_().masked_fill_(torch.arange(w.shape[1]) % 2 == 0, 0.3),
    "copy_tensor": lambda m, w: w.copy_(torch.arange(w.numel()).view(w.shape) / 7),
    "copy_random": lambda m, w: w.copy_(torch.randn_like(w)),
    "copy_row": lambda m, w: w.normal_()[0].copy_(w[1]),
    "where": lambda m, w: w.copy_(torch.where(w.normal_() > 0, w, -0.1 * w)),
    "data_draw": lambda m, w: w.data.normal_(std=0.3),
    "data_row": lambda m, w: w.data.normal_()[0].zero_(),
    "data_assign": _assign_data,
    "detach": lambda m, w: w.detach().uniform_(-0.1, 0.3),
    "local": lambda m, w: getattr(w, "to_local", lambda: w)().normal_(),
    "replace": _replace,
    "chunks": lambda m, w: [nn.init.xavier_normal_(gate) for gate in w.chunk(3)],
    "flat_view": lambda m, w: w.normal_().view(-1)[3:9].fill_(0.7),
    "transposed": lambda m, w: w.t().normal_().mul_(torch.arange(w.shape[0]) / 3),
    "heads": lambda m, w: w.normal_().unflatten(0, (-1, 1))[0].div_(3),
    "computed": lambda m, w: w.uniform_(-0.9, 0.9).erfinv_().sigmoid_(),
    "normalized": lambda m, w: w.normal_().div_(w.norm()),
    "item": lambda m, w: w.normal_().mul_(w[0, 0].item()),
    "any": _halve_if_any,
    "swallow": _swallow,
    "foreach": lambda m, w: torch._foreach_mul_([w.normal_(), m.bias.fill_(0.1)], 0.3),
    "bias_of_weight": lambda m, w: m.bias.copy_(w.normal_().sum(1)),
    "forget_gate": lambda m, w: (w.normal_(), m.bias.fill_(0.1)[m.bias.shape[0] // 2 :].fill_(1.1)),
    "truncated_row": lambda m, w: nn.init.trunc_normal_(w, std=0.1, a=-0.1, b=0.1)[-1].zero_(),
    "truncated_draws": _truncate_and_draw,
    "orthogonal": lambda m, w: nn.init.orthogonal_(w),
    "eye": lambda m, w: nn.init.eye_(w),
    "dirac": lambda m, w: nn.init.dirac_(w.unsqueeze(-1)),
    "sparse": lambda m, w: nn.init.sparse_(w, sparsity=0.3),
    "exponential": lambda m, w: w.exponential_(),
    "bernoulli": lambda m, w: w.bernoulli_(0.3),
    "random": lambda m, w: w.random_(0, 5),
    "dropout": lambda m, w: w.copy_(nn.functional.dropout(w.fill_(0.3))),
    "python": lambda m, w: w.fill_(random.random()),  # noqa: S311
    "numpy": lambda m, w: w.copy_(torch.from_numpy(np.random.standard_normal(w.shape))),
    "whole": lambda m, w: w.normal_().exp_().mul_(-0.1).clamp_(-0.3, -0.1),
}


class _Written(nn.Module):
    """Fills every tensor, and then writes to the weight in the given `WAYS`."""

    def __init__(self, ways: list[str], rows: int, columns: int) -> None:
        super().__init__()
        self.ways = ways
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.bias = nn.Parameter(torch.empty(rows))
        self.register_buffer("table", torch.empty(5), persistent=False)
        self.table: Tensor

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.bias, 0.1, 0.3)
        self.table.copy_(torch.rand(5))[1:3].fill_(0.3)
        for way in self.ways:
            WAYS[way](self, self.weight)


class _Parent(nn.Module):
    """Changes the values that its children have set: whole parameters, parts of them, and tied parameters."""

    def __init__(self, inner: nn.Module, rows: int, columns: int) -> None:
        super().__init__()
        self.inner = inner
        self.embedding = nn.Embedding(rows, columns, padding_idx=0)
        self.head = nn.Linear(columns, rows)
        self.head.weight = self.embedding.weight

    def reset_parameters(self) -> None:
        self.head.bias.mul_(0.3)  # restored when the next line raises NeedsFullTensor
        self.embedding.weight[1].fill_(0.1)
        for parameter in self.inner.parameters():
            parameter.data.mul_(0.3)


def _build(seed: int) -> nn.Sequential:
    """Build a model that uses each of the `WAYS` to write, some in random combinations."""
    generator = random.Random(seed)  # noqa: S311
    models: list[nn.Module] = []
    for way in WAYS:
        ways = [way, *generator.choices(list(WAYS), k=generator.randrange(2))]
        rows, columns = (12, 4) if seed % 2 else (generator.choice([5, 7, 11]), generator.choice([4, 6]))
        models.append(_Written(generator.sample(ways, len(ways)), rows, columns))
    parents: list[nn.Module] = [_Parent(nn.Linear(4, 8), 12, 4), _Parent(_Written(["orthogonal", "row"], 8, 4), 8, 4)]
    return nn.Sequential(*models, *parents)


def _values(kind: str, degrees: dict[str, int], seed: int) -> dict[str, Tensor]:
    with MeshConfig(**degrees).build() as ctx:
        with torch.device("meta"):
            model = _build(seed)
        mesh = ctx.mesh_for("dense")
        match kind:
            case "replicate":
                parallelize_replicate(model, ctx.mesh_for("flat"))
            case "shard":
                for module in model:
                    parallelize_hsdp(module, mesh["dp_replicate", "dp_cp_shard"], shard_axis="dp_cp_shard")
            case "tp 0" | "tp 1":
                _split(model, mesh["tp"], int(kind[-1]))
                if mesh["dp_cp_shard"].size() > 1:
                    fully_shard(model, mesh=mesh["dp_cp_shard"])
        materialize(model, device=ctx.device, seed=seed)
        for module in model:
            assert not isinstance(module, _Parent) or module.head.weight is module.embedding.weight
        return full_tree({**dict(model.named_parameters()), **dict(model.named_buffers())})


def _split(model: nn.Module, mesh: torch.distributed.DeviceMesh, dim: int) -> None:
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                placement = Shard(dim) if parameter.ndim > dim else Replicate()
                spread = nn.Parameter(distribute_tensor(parameter.data, mesh, [placement]))
                module._parameters[name] = made.setdefault(id(parameter), spread)


LAYOUTS = {
    "1 shard": ("shard", {}),
    "2 shards": ("shard", {"data_parallel_shard": 2}),
    "4 shards": ("shard", {"data_parallel_shard": 4}),
    "2 replicas": ("replicate", {"data_parallel_replicate": 2}),
    "2 replicas x 2 shards": ("shard", {"data_parallel_replicate": 2, "data_parallel_shard": 2}),
    "rows over tp": ("tp 0", {"tensor_parallel": 3}),
    "columns over tp": ("tp 1", {"tensor_parallel": 2}),
    "2 shards x rows over tp": ("tp 0", {"data_parallel_shard": 2, "tensor_parallel": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sample("2 shards", "columns over tp")
def test_sharded_initialization_equals_one_process_for_every_kind_of_write(layout: str) -> None:
    kind, degrees = LAYOUTS[layout]
    seed = 1 if " x rows" in layout else 2  # if several axes split a dim, they must divide it
    expected = _values("one", {}, seed)
    for values in run_ranks(_values, kind, degrees, seed, world_size=prod(degrees.values())):
        assert values.keys() == expected.keys()
        different = [name for name, value in values.items() if not torch.equal(value, expected[name])]
        assert not different, [
            (name, getattr(_build(seed)[int(name.split(".")[0])], "ways", "parent")) for name in different
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("operator", sorted(ELEMENTWISE, key=str), ids=str)
def test_listed_operators_compute_bitwise_equal_elements_on_any_shard(
    operator: torch._ops.OpOverload, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    full = torch.rand(20_000, generator=generator, dtype=torch.float64).mul_(3).add_(1e-3).to(dtype)
    numbers = [-0.1, 0.3] if "clamp_.default" in str(operator) else [0.3]
    arguments = numbers if len(operator._schema.arguments) > 1 else []
    expected = operator(full.clone(), *arguments)
    for _ in range(100):
        begin, size = (int(n) for n in torch.randint(1, 200, (2,), generator=generator))
        part = operator(full[begin : begin + size].clone(), *arguments)
        assert torch.equal(part, expected[begin : begin + size])
