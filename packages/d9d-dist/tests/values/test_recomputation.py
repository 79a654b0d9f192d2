import copy
import gc
import random
import weakref
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.func import functional_call

from d9d_dist import MeshConfig, UserError
from d9d_dist.gradients._local_parameters import compute_locally, distribute_parameters
from d9d_dist.shards import full_tensor
from d9d_dist.values.recomputation import _are_close, recompute


class _Block(nn.Module):
    """Block that normalizes by a running mean, and changes buffers in all ways."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.mean: Tensor
        self.calls: Tensor
        self.scale: Tensor
        self.table: Tensor
        self.register_buffer("mean", torch.ones(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((3,), 0.7))
        self.register_buffer("table", torch.zeros(1 << 14))
        self.double()
        if recomputes:
            recompute(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x)) * self.scale
        with torch.no_grad():
            self.mean.data.lerp_(y.square().mean(0), 0.5)  # torch counts no write
            self.calls = self.calls + 1
            self.table[0] += y.sum()
        return x + torch.tanh(y / self.mean.clone()) * self.calls + self.table[0].clone() * y


class _Breaks(_Block):
    """Block that cannot be compiled as one graph."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def _run(*, recomputes: bool, compiles: bool = False) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return gradients and buffers after the forwards of two microbatches, as in a pipeline, and their backwards."""
    block = (_Breaks if compiles else _Block)(recomputes=recomputes)
    if compiles:
        block.forward = torch.compile(block.forward, backend="aot_eager")
    inputs = [torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)).double() for seed in range(2)]
    outputs = [block(x.requires_grad_()) for x in inputs]
    for output in outputs:
        output.square().sum().backward()
    gradients = [each.grad for each in (*inputs, *block.parameters()) if each.grad is not None]
    return gradients, dict(block.named_buffers())


@pytest.mark.parametrize("compiles", [False, True])
def test_buffers_and_gradients_are_those_without_recomputation(compiles: bool) -> None:
    """Also if the compiler runs the block eagerly, because its forward breaks the graph."""
    gradients, buffers = _run(recomputes=True, compiles=compiles)
    expected, expected_buffers = _run(recomputes=False)
    assert len(gradients) == 2 + 4
    assert expected_buffers["calls"] == 2
    assert expected_buffers["norm.num_batches_tracked"] == 2
    torch.testing.assert_close(buffers, expected_buffers, rtol=0, atol=0)
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)


class _Saves(nn.Module):
    """Module whose graph needs a buffer itself, which forward changes before."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        self.scale += 1
        return x * self.scale


def test_a_graph_has_the_buffers_of_its_forward() -> None:
    """Without recomputation, the first backward raises an error: a later forward has changed what it needs."""
    module, x = _Saves(), torch.ones(3, requires_grad=True)
    recompute(module)
    for first, second in ((module(x), module(x)) for _ in range(2)):
        expected = (first.detach(), second.detach())
        assert torch.autograd.grad(second.sum(), x)[0].equal(expected[1])
        assert torch.autograd.grad(first.sum(), x, retain_graph=True)[0].equal(expected[0])
        assert torch.autograd.grad(first.sum(), x)[0].equal(expected[0])
    assert module.scale.eq(6).all()


class _Count(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, calls: Tensor) -> Tensor:
        ctx.calls = calls
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.calls.add_(1)
        return gradients[0], None


class _CountsBackwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return _Count.apply(x, self.calls).exp()


def test_a_backward_may_write_to_a_buffer() -> None:
    module, x = _CountsBackwards(), torch.ones(3, requires_grad=True)
    recompute(module)
    for _ in range(3):
        module(x).sum().backward()
    assert module.calls == 3


def test_without_gradients_forward_runs_alone() -> None:
    block = _Block(recomputes=True)
    with torch.no_grad():
        assert not block(torch.ones(2, 3).double()).requires_grad
    assert block.calls == 1


class _Draws(nn.Module):
    """Block that scales by numbers of several generators, and chooses a branch by one."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.generator = nn.Linear(3, 3).double(), torch.Generator().manual_seed(5)
        self.python = random.Random(6)  # noqa: S311
        self.numpy, self.older = np.random.default_rng(7), np.random.RandomState(8)
        if recomputes:
            recompute(self)

    def forward(self, x: Tensor) -> Tensor:
        own = self.python.gauss() * float(self.numpy.random()) * float(self.older.rand())
        scale = own * random.gauss() * float(np.random.rand()) * torch.rand((), generator=self.generator).double()
        y = torch.tanh(self.linear(x) * scale * torch.rand(()))
        return x + (y.sin() if random.gauss() < 0 else y)


def test_random_numbers_and_gradients_are_those_without_recomputation() -> None:
    results: list[list[Tensor]] = []
    for recomputes in (True, False):
        blocks = nn.Sequential(
            *(_Draws(recomputes=recomputes) for _ in range(5)), last := _Draws(recomputes=recomputes)
        )
        random.seed(3)
        np.random.seed(4)
        blocks(torch.arange(6.0).double().view(2, 3)).square().sum().backward()
        after = [random.gauss(), np.random.rand(), torch.rand(()), torch.rand((), generator=last.generator)]
        after += [last.python.gauss(), last.numpy.random(), last.older.rand()]
        gradients = [each.grad for each in blocks.parameters() if each.grad is not None]
        results.append([*gradients, *map(torch.as_tensor, after)])
    assert len(results[0]) == 6 * 2 + 7
    torch.testing.assert_close(*results, rtol=0, atol=0)


class _Anneals(nn.Module):
    """Block with a number that each forward changes, and with dropout."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.dropout, self.scale = nn.Linear(3, 3).double(), nn.Dropout(0.5), 1.0
        if recomputes:
            recompute(self)

    def forward(self, x: Tensor) -> Tensor:
        self.scale *= 0.5
        return x + torch.tanh(self.dropout(self.linear(x)) * self.scale)


def test_numbers_and_modes_of_a_later_forward_do_not_change_gradients() -> None:
    results: list[list[Any]] = []
    for recomputes in (True, False):
        block = _Anneals(recomputes=recomputes)
        outputs = [block(torch.full((2, 3), value).double()) for value in (0.5, 2.0)]
        block.eval()
        for output in outputs:
            output.square().sum().backward()
        results.append([block.scale, block.training, *(each.grad for each in block.parameters())])
    assert results[0][:2] == results[1][:2] == [0.25, False]
    torch.testing.assert_close(*(each[2:] for each in results), rtol=0, atol=0)


class _Halves(nn.Module):
    """Block with a number that its constructor sets, one that forward creates, and an attention map."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = nn.Linear(3, 3).double(), 1.0
        self.weights: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.scale *= 0.5
        self.factor: float = getattr(self, "factor", 1.0) * 0.5
        y = self.linear(x) * self.scale * self.factor
        z = torch.tanh(y) + y.softmax(-1)
        self.weights = z.detach() if self.training else z  # after the last activation that backward needs
        return z


def _gradient(block: _Halves) -> tuple[Tensor, float, float]:
    block.zero_grad()
    outputs = [block(torch.full((2, 3), value).double()) for value in (0.5, 2.0)]
    weights = block.weights
    for output in outputs:
        output.square().sum().backward()
    assert block.weights is weights
    assert block.linear.weight.grad is not None
    block.weights = None  # no activation can be copied
    return block.linear.weight.grad.clone(), block.scale, block.factor


def test_numbers_that_forward_creates_and_those_of_a_copy_change_once() -> None:
    expected, block = _Halves(), _Halves()
    recompute(block)
    for _ in range(2):
        torch.testing.assert_close(_gradient(block), _gradient(expected), rtol=0, atol=0)
    torch.testing.assert_close(_gradient(copy.deepcopy(block)), _gradient(copy.deepcopy(expected)), rtol=0, atol=0)
    assert block.factor == 2**-4


def test_an_activation_in_an_attribute_is_freed_with_the_next_forward() -> None:
    block, x = _Halves().eval(), torch.ones(2, 3).double()
    recompute(block)
    held = []
    for _ in range(4):
        output = block(x)
        assert block.weights is not None
        held.append(weakref.ref(block.weights))
    gc.collect()
    assert [each() is None for each in held] == [True, True, True, False]
    assert output.requires_grad


class _Keeps(nn.Module):
    """Block that keeps a tensor for inspection, set at the end of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(3, 3), None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.last = y.detach()
        return y


def test_an_attribute_that_forward_sets_is_the_same_after_backward() -> None:
    block = _Keeps()
    recompute(block)
    for _ in range(3):
        output = block(torch.randn(2, 3))
        last = block.last
        output.sum().backward()
        assert block.last is last
        assert last is not None


class _ChangesRates(nn.Module):
    """Block that changes rates of torch's layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.dropout, self.norm = nn.Linear(8, 8), nn.Dropout(0.5), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        self.dropout.p *= 0.9
        self.norm.eps *= 1.5
        return torch.tanh(self.dropout(self.norm(self.linear(x))))


def test_rates_of_layers_of_torch_change_once() -> None:
    found = []
    for recomputes in (False, True):
        block = _ChangesRates()
        if recomputes:
            recompute(block)
        torch.manual_seed(1)
        block(torch.full((2, 8), 0.7)).square().sum().backward()
        found.append((block.linear.weight.grad, block.dropout.p, block.norm.eps))
    assert found[0][1:] == found[1][1:] == (0.5 * 0.9, 1e-5 * 1.5)
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=0)


class _Generates(nn.Module):
    """Module that computes the weights of another one, as a hypernetwork."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.delta = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(2, 3)
        self.other = nn.Parameter(torch.randn(3, 3))
        self.double()
        if recomputes:
            recompute(self.net)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift = self.delta(c)
        weights = {name: each + shift for name, each in self.net.named_parameters()}
        y = torch.tanh(functional_call(self.net, weights, (x,)))
        return self.net(torch.tanh(functional_call(self.net, {"0.weight": self.other}, (y,))))


def test_parameters_of_a_functional_call_are_those_of_its_recomputation() -> None:
    """Computed weights, and parameters of another module."""
    gradients = []
    for recomputes in (True, False):
        block, x = _Generates(recomputes=recomputes), torch.linspace(-1, 1, 12).double().view(4, 3)
        own = list(block.net.parameters())
        block(x, torch.tensor([0.5, -2.0]).double()).square().sum().backward()
        assert all(now is before for now, before in zip(block.net.parameters(), own, strict=True))
        gradients.append([each.grad for each in block.parameters()])
    assert all(each is not None for each in gradients[1])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


class _MeanTeacher(nn.Module):
    """Block with a slow copy of a layer, which its forward updates; `writes` chooses how."""

    def __init__(self, writes: str) -> None:
        super().__init__()
        self.fast, self.slow, self.writes = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False), writes

    def forward(self, x: Tensor) -> Tensor:
        slow, fast = self.slow.weight, self.fast.weight
        with torch.no_grad():
            if self.writes == "in place":
                slow.lerp_(fast, 0.1)
            elif self.writes == "data":
                slow.data = slow.lerp(fast, 0.1)
        return torch.tanh(self.fast(x)) - torch.tanh(self.slow(x))


@pytest.mark.parametrize("writes", ["in place", "data", "no"])
def test_a_forward_that_writes_to_parameters_is_an_error(writes: str) -> None:
    """Backward would write a second time."""
    block = nn.Sequential(nn.Linear(3, 3), _MeanTeacher(writes))
    recompute(block)
    message = r"forward replaces or writes to 1\.slow\.weight, .* a recomputed one runs twice.* register buffers"
    with nullcontext() if writes == "no" else pytest.raises(UserError, match=message):
        block(torch.ones(2, 3)).sum().backward()


NOISE = np.random.default_rng(0)


class _Conditioned(nn.Module):
    """Blocks that read what their parent sets before each call, or leaves after it."""

    def __init__(self, given: str, *, recomputes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.given, self.generator = given, torch.Generator().manual_seed(0)
        self.block: Any = _ReadsCondition(given)
        self.double()
        if recomputes:
            recompute(self.block)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        self.block.condition = condition
        self.block.context["condition"] = condition
        y = self.block(x, self.generator)
        if self.given == "cleared attribute":
            self.block.condition = None
        return y


class _ReadsCondition(nn.Module):
    def __init__(self, given: str) -> None:
        super().__init__()
        self.linear, self.given = nn.Linear(3, 3), given
        self.context: dict[str, Tensor] = {}
        self.condition: Any = None

    def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
        y = torch.tanh(self.linear(x))
        match self.given:
            case "argument":
                return x + y * torch.rand(3, generator=generator, dtype=x.dtype)
            case "global generator":
                return x + y * NOISE.random()
            case "entry of a dict":
                return x + y * self.context["condition"]
            case _:
                return x + y * self.condition


def _conditioned(given: str, *, recomputes: bool) -> list[Tensor]:
    """Return gradients after the forwards of two microbatches, as in a pipeline, and their backwards."""
    model = _Conditioned(given, recomputes=recomputes)
    x = torch.linspace(-1, 1, 12).double().view(4, 3)
    conditions = [torch.tensor([0.5, 1.0, -2.0]).double() * scale for scale in (1, 3)]
    losses = [model(x, each).square().sum() for each in conditions]
    for loss in losses:
        loss.backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("given", ["argument", "attribute", "cleared attribute"])
def test_generators_in_arguments_and_tensors_in_attributes_are_those_of_the_forward(given: str) -> None:
    found, expected = (_conditioned(given, recomputes=recomputes) for recomputes in (True, False))
    assert len(expected) == 2
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("given", ["global generator", "entry of a dict"])
def test_a_recomputation_with_other_outputs_is_an_error(given: str) -> None:
    with pytest.raises(UserError, match=r"the recomputation of a _ReadsCondition in backward has other outputs than"):
        _conditioned(given, recomputes=True)


@pytest.mark.parametrize(("number", "is_compared"), [(3, False), (4, True), (5, False), (8, True)])
def test_outputs_of_later_calls_are_compared_more_rarely(number: int, is_compared: bool) -> None:
    model = _Conditioned("attribute", recomputes=True)
    for call in range(1, number + 1):
        model.block.given = "global generator" if call == number else "attribute"
        loss = model(torch.ones(1, 3).double(), torch.ones(3).double()).sum()
        with pytest.raises(UserError) if call == number and is_compared else nullcontext():
            loss.backward()


class _ScaledBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 3), nn.Parameter(torch.full((3,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.linear(x))


def test_a_replicated_block_with_a_parameter_of_its_own() -> None:
    x, gradients = torch.linspace(-1, 1, 12).view(4, 3), []
    for is_replicated in (False, True):
        torch.manual_seed(0)
        block = _ScaledBlock()
        with MeshConfig().build() as ctx:
            if is_replicated:
                recompute(block)
                distribute_parameters(block, ctx.mesh_for("flat"), {}, default=Replicate())
                for module in block.modules():
                    compute_locally(module)
            block(x).square().sum().backward()
            gradients.append([full_tensor(each.grad) for each in block.parameters() if each.grad is not None])
    assert len(gradients[0]) == 3
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.float8_e4m3fn, torch.complex64])
def test_values_are_close_up_to_sums_in_another_order(dtype: torch.dtype) -> None:
    values = (torch.linspace(-1, 1, 5000) * (60_000 if dtype == torch.float16 else 100)).to(dtype)
    assert _are_close(values, values.clone())
    assert not _are_close(values, (values.float() * 1.5 if dtype != torch.complex64 else values * 1.5).to(dtype))
    assert not _are_close(values, values[1:])
    assert _are_close(torch.tensor([torch.nan, torch.inf, 1.0]), torch.tensor([torch.nan, torch.inf, 1.0 + 1e-6]))
    assert not _are_close(torch.tensor([1, 2]), torch.tensor([1, 3]))


def test_outputs_on_meta_are_not_compared() -> None:
    block = nn.Linear(2, 2, device="meta")
    recompute(block)
    block(torch.ones(1, 2, device="meta", requires_grad=True)).sum().backward()
    assert block.weight.grad is not None
