import copy
from collections import Counter
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_dist import UserError
from d9d_modules import CheckpointPolicy, SwiGLU, checkpoint_activations
from d9d_modules.checkpointing import Operator, checkpoint_layers


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = SwiGLU(4, 6, init_std=1.0)
        self.calls: list[int] = []  # a number would count only once per forward

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return cast("Tensor", self.block(x))


class _Operators(TorchDispatchMode):
    """Count the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Operator] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("policy", "calls"), [("none", 1), ("full", 2), ("selective", 2)])
def test_backward_recomputes_forward_and_gradients_are_unchanged(policy: CheckpointPolicy, calls: int) -> None:
    module = _Counting()
    x = torch.randn(3, 4, requires_grad=True)
    inputs = (x, *module.parameters())
    names = list(module.state_dict())
    expected = torch.autograd.grad(module(x).square().sum(), inputs)
    module.calls.clear()
    checkpoint_activations(module, policy=policy)
    got = torch.autograd.grad(module(x).square().sum(), inputs)
    assert len(module.calls) == calls
    assert list(module.state_dict()) == names
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_running_statistics_change_once(policy: CheckpointPolicy) -> None:
    x = torch.randn(6, 3, requires_grad=True)
    norms = [nn.BatchNorm1d(3) for _ in range(2)]
    checkpoint_activations(norms[1], policy=policy)
    for norm in norms:
        norm(x).square().sum().backward()
    assert norms[0].num_batches_tracked == 1
    torch.testing.assert_close(norms[1].state_dict(), norms[0].state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("keep", "again"),
    [
        (None, {torch.ops.aten.mul.Tensor, torch.ops.aten.silu.default}),
        ([torch.ops.aten.silu.default], {torch.ops.aten.mul.Tensor, torch.ops.aten.mm.default}),
    ],
)
def test_selective_recomputes_all_but_the_kept_operators(keep: list[Operator] | None, again: set[Operator]) -> None:
    block = SwiGLU(4, 6)
    checkpoint_activations(block, policy="selective", keep=keep)
    # Backward calls all operators of forward again to recompute it. `mm` is also part of the gradients.
    x = torch.randn(3, 4)
    for _ in range(2):  # backward of these calls also recomputes the outputs, to compare them
        block(x)
    with _Operators() as forward:
        y = block(x)
    with _Operators() as backward:
        y.sum().backward()
    called = {operator for operator in forward.calls if backward.calls[operator] >= forward.calls[operator]}
    products = torch.ops.aten.mm.default
    # Backward needs two products for `down`, and one each for `gate` and `up`, whose input needs no gradient.
    assert backward.calls[products] == (4 if keep is None else 4 + 2)
    assert {torch.ops.aten.silu.default, torch.ops.aten.mul.Tensor} & called == again - {products}


class _MarkedInRecomputation(_Counting):
    """Record a profiler range only in the recomputation, as FSDP of experts inside a block does on accelerators."""

    def forward(self, x: Tensor) -> Tensor:
        if self.calls:
            record = torch.ops.profiler._record_function_enter_new("all-gather")
            torch.ops.profiler._record_function_exit._RecordFunction(record)
        return super().forward(x)


def test_selective_ignores_profiler_ranges_that_forward_did_not_have() -> None:
    module = _MarkedInRecomputation()
    checkpoint_activations(module, policy="selective")
    x = torch.randn(3, 4, requires_grad=True)
    module(x).sum().backward()
    assert len(module.calls) == 2
    assert x.grad is not None


def test_every_nth_layer_counts_in_the_whole_model() -> None:
    layers = nn.ModuleDict({str(index): _Counting() for index in range(3, 8)})
    checkpoint_layers(layers, every=3)
    for layer in layers.values():
        layer(torch.randn(2, 4)).sum().backward()
    again = {name: len(cast("_Counting", layer).calls) == 2 for name, layer in layers.items()}
    assert again == {"3": True, "4": False, "5": False, "6": True, "7": False}


def test_a_copy_runs_its_own_parameters() -> None:
    module = _Counting()
    checkpoint_activations(module)
    other = copy.deepcopy(module)
    nn.init.zeros_(other.block.down_proj.weight)
    x = torch.randn(2, 4)
    assert other(x).eq(0).all()
    assert module(x).ne(0).any()


def test_an_unknown_policy_raises() -> None:
    policy: Any = "half"
    with pytest.raises(UserError, match=r"checkpoint policy 'half'; expected one of none, full, selective"):
        checkpoint_activations(_Counting(), policy=policy)


def test_invalid_input_raises() -> None:
    with pytest.raises(UserError, match=r"every = 0; expected 1 \(each layer\) or more"):
        checkpoint_layers(nn.ModuleDict(), every=0)
    with pytest.raises(
        UserError, match=r"keep = \['aten.mm.default'\] with policy = 'full'; expected policy = 'selective'"
    ):
        checkpoint_activations(_Counting(), keep=[torch.ops.aten.mm.default])
    with pytest.raises(UserError, match=r"a ModuleList has no forward; expected a layer"):
        checkpoint_activations(nn.ModuleList([_Counting()]))
