from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from d9d_dist import MeshConfig, UserError, materialize, parallelize_fsdp
from d9d_dist.testing import Device, run_ranks
from d9d_dist.values.offload import ModuleOffloader, offload_tensor, onload_tensor

SIZE = 6


class _Model(nn.Module):
    """Tied weights and a buffer, in an FSDP block and an FSDP root."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SIZE, SIZE)
        self.block = nn.Linear(SIZE, SIZE)
        self.head = nn.Linear(SIZE, SIZE, bias=False)
        self.head.weight = self.embedding.weight
        self.block.bias.requires_grad_(False)
        self.register_buffer("steps", torch.zeros(()))

    def reset_parameters(self) -> None:
        self.steps = torch.zeros_like(self.steps)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(ids)).tanh())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    states = [x for x in tree_leaves(list(optimizer.state.values())) if isinstance(x, Tensor)]
    return [*model.parameters(), *model.buffers(), *gradients, *states]


def _identities(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return everything that must be identical after onloading."""
    tensors = _tensors(model, optimizer)
    return [
        [id(tensor) for tensor in tensors],
        [(tensor.requires_grad, tensor.stride(), tensor.device, tensor.dtype) for tensor in tensors],
        [(tensor.placements, tensor.device_mesh) for tensor in tensors if isinstance(tensor, DTensor)],
        [id(key) for key in optimizer.state],
        [_local(tensor).untyped_storage()._cdata for tensor in tensors],
        [tensor._version for tensor in tensors],
    ]


def _train(offloads: bool) -> dict[str, Tensor]:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        with torch.device("meta"):
            model = _Model()
        mesh = ctx.mesh_for("dense")["dp_cp_shard"]
        parallelize_fsdp(model.block, mesh)
        parallelize_fsdp(model, mesh)
        materialize(model, device=ctx.device, seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        offloader = ModuleOffloader(model, optimizer)
        for step in range(3):
            ids = torch.arange(step, step + 4, device=ctx.device) % SIZE
            model(ids).square().sum().backward()
            if offloads:
                _offload_and_check(offloader, model, optimizer)
            optimizer.step()
            model.steps += 1
            with torch.no_grad():
                model(ids)  # after a forward without backward the root stays gathered
            if offloads:
                _offload_and_check(offloader, model, optimizer)
            optimizer.zero_grad()
        state = {name: _local(tensor).cpu() for name, tensor in model.state_dict().items()}
        moments = optimizer.state[model.embedding.weight]
        return {**state, **{name: _local(moment).cpu() for name, moment in moments.items()}}


def _offload_and_check(offloader: ModuleOffloader, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    before, values = _identities(model, optimizer), [_local(x).clone() for x in _tensors(model, optimizer)]
    assert isinstance(model, FSDPModule)
    model.unshard()
    offloader.offload()
    assert all(_local(tensor).untyped_storage().nbytes() == 0 for tensor in _tensors(model, optimizer))
    offloader.onload()
    assert _identities(model, optimizer) == before
    assert all(torch.equal(_local(x), value) for x, value in zip(_tensors(model, optimizer), values, strict=True))


def test_training_is_unchanged_by_offloading(device: Device) -> None:
    expected = run_ranks(_train, False, device=device)
    for found, state in zip(run_ranks(_train, True, device=device), expected, strict=True):
        assert found.keys() == state.keys()
        assert {"exp_avg", "exp_avg_sq", "block.bias", "head.weight", "steps"} < found.keys()
        assert all(torch.equal(found[name], state[name]) for name in state)


def test_tensors_that_share_a_storage_are_offloaded_together() -> None:
    x = torch.arange(12.0).view(3, 4)
    column, other, part = x[:, 1], torch.ones(5, dtype=torch.bfloat16), x.view(-1)[4:]
    bystander = x[0]
    offloaded = offload_tensor(column, x, other, part, torch.empty(0))
    assert offloaded.num_bytes == 12 * 4 + 5 * 2
    for tensor in (x, column, other, part, bystander):
        assert tensor.untyped_storage().nbytes() == 0
    assert x.shape == (3, 4)
    onload_tensor(offloaded)
    assert torch.equal(x, torch.arange(12.0).view(3, 4))
    assert column.tolist() == [1, 5, 9]
    assert torch.equal(other, torch.ones(5, dtype=torch.bfloat16))
    x[0, 1] = -1
    assert column[0] == bystander[1] == -1


def test_saved_tensors_of_autograd_are_onloaded() -> None:
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    expected = 2 * weight.detach().clone()
    loss = (weight * weight).sum()
    onload_tensor(offload_tensor(weight))
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)


def _offload_dtensor() -> list[float]:
    with MeshConfig(data_parallel_shard=-1).build() as ctx:
        x = DTensor.from_local(
            torch.full((2,), float(ctx.rank), device=ctx.device), ctx.mesh_for("dense")["dp_cp_shard"], [Shard(0)]
        )
        offloaded = offload_tensor(x)
        assert offloaded.num_bytes == 8
        assert x.to_local().untyped_storage().nbytes() == 0
        onload_tensor(offloaded)
        return x.full_tensor().tolist()


def test_the_local_tensor_of_a_dtensor_is_offloaded(device: Device) -> None:
    assert run_ranks(_offload_dtensor, device=device) == [[0, 0, 1, 1]] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_device_memory_is_freed() -> None:
    accelerator = torch.accelerator.current_accelerator()
    x = torch.ones(2**22, device=accelerator)
    before = torch.accelerator.memory_allocated()
    offloaded = offload_tensor(x)
    assert before - torch.accelerator.memory_allocated() == x.nbytes
    assert all(copy.is_pinned() for _, copy in offloaded._copies)
    onload_tensor(offloaded)
    assert torch.accelerator.memory_allocated() == before
    assert bool((x == 1).all())


def test_without_an_optimizer_only_the_module_is_offloaded() -> None:
    model = nn.Linear(2, 2)
    offloader = ModuleOffloader(model)
    weight = model.weight.detach().clone()
    offloader.offload()
    assert model.weight.untyped_storage().nbytes() == 0
    offloader.onload()
    assert torch.equal(model.weight, weight)


def test_a_module_is_offloaded_and_onloaded_alternately() -> None:
    offloader = ModuleOffloader(nn.Linear(2, 2))
    message = r"got onload\(\) of a module that is not offloaded; call offload\(\) first\."
    with pytest.raises(UserError, match=message):
        offloader.onload()
    offloader.offload()
    with pytest.raises(
        UserError, match=r"got offload\(\) of a module that is already offloaded; call onload\(\) first"
    ):
        offloader.offload()
    offloader.onload()
    with pytest.raises(UserError, match=message):
        offloader.onload()


def test_tensors_are_offloaded_and_onloaded_alternately() -> None:
    x, y = torch.ones(3), torch.ones(2)
    offloaded = offload_tensor(x)
    with pytest.raises(UserError, match=r"got a tensor of shape \(3,\) that is already offloaded; onload it first"):
        offload_tensor(y, x)
    assert y.tolist() == [1, 1]
    onload_tensor(offloaded)
    with pytest.raises(UserError, match=r"these tensors were already onloaded; expected one onload_tensor"):
        onload_tensor(offloaded)
    assert x.tolist() == [1, 1, 1]


def test_refuses_memory_that_torch_does_not_own() -> None:
    x, foreign = torch.ones(2), torch.from_numpy(np.ones(4))
    with pytest.raises(
        UserError, match=r"got a tensor of shape \(4,\) whose memory belongs to another library, such as NumP"
    ):
        offload_tensor(x, foreign)
    assert x.tolist() == [1, 1]
