"""Modules as research code has them: odd state, odd weights, odd control flow, references outside of the registries."""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from zoo import Batch, Entry, features, ids, named, normal

_Call = Callable[[Any, Tensor], Any]


class _With(nn.Module):
    """Module of named parts, whose forward is a function of the module and the inputs."""

    def __init__(self, call: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._call = call

    def forward(self, **inputs: Tensor) -> Any:
        return self._call(self, **inputs)


def _tanh_mlp(inputs: int = 8, outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


class LearnedState(nn.Module):
    """GRU with a learned initial state and a learned decay of missing inputs, as GRU-D."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 5)
        self.start = nn.Parameter(torch.randn(5))
        self.decay = nn.Parameter(torch.rand(5))

    def forward(self, input: Tensor, gaps: Tensor) -> Tensor:  # noqa: A002
        state = self.start.expand(len(input), 5)
        for step in range(input.shape[1]):
            state = self.cell(input[:, step], state * torch.exp(-F.relu(self.decay) * gaps[:, step, None].abs()))
        return state


class HardRouting(nn.Module):
    """Mixture of experts with one expert per sample; some experts get no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 5)
        self.experts = nn.ModuleList(_tanh_mlp() for _ in range(5))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        weight, choice = self.router(input).softmax(-1).max(-1)
        output = input.new_zeros(len(input), 4)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero()[:, 0]
            if len(rows):
                output = output.index_add(0, rows, expert(input[rows]) * weight[rows, None])
        return output


class Coupling(nn.Module):
    """Affine coupling of a normalizing flow, run forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _tanh_mlp(4, 8)
        self.register_buffer("order", torch.randperm(8))

    def forward(self, input: Tensor) -> dict[str, Tensor]:  # noqa: A002
        order = self.get_buffer("order")
        first, second = input[:, order].chunk(2, 1)
        scale, shift = self.net(first).chunk(2, 1)
        code = torch.cat([first, second * scale.exp() + shift], 1)
        return {"code": code, "log_det": scale.sum(1), "again": self.inverse(code)}

    def inverse(self, code: Tensor) -> Tensor:
        first, second = code.chunk(2, 1)
        scale, shift = self.net(first).chunk(2, 1)
        return torch.cat([first, (second - shift) * (-scale).exp()], 1)[:, self.get_buffer("order").argsort()]


class HyperNetwork(nn.Module):
    """A network whose output is the weight of another, whose own parameters are the offset."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.hyper = nn.Linear(8, 4), nn.Linear(3, 36)

    def forward(self, input: Tensor, task: Tensor) -> Tensor:  # noqa: A002
        rows = []
        for row, code in zip(input, task, strict=True):
            change = self.hyper(code)
            weights = {"weight": self.main.weight + change[:32].view(4, 8), "bias": self.main.bias + change[32:]}
            rows.append(functional_call(self.main, weights, (row,)))
        return torch.stack(rows)


class StandardizedConv(nn.Conv2d):
    """Convolution that standardizes its weight in forward."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(input, weight / (weight.std((1, 2, 3), keepdim=True) + 1e-5), self.bias)


class Spectral(nn.Module):
    """Fourier neural operator in two dims, with a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 3, 3, dtype=torch.complex64) / 3)
        self.skip = nn.Conv2d(3, 4, 1)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        modes = torch.fft.rfft2(input)
        low = torch.einsum("bixy,ioxy->boxy", modes[:, :, :3, :3], self.weight)
        padded = F.pad(low, (0, modes.shape[-1] - 3, 0, modes.shape[-2] - 3))
        return torch.fft.irfft2(padded, s=input.shape[-2:]) + self.skip(input)


class ViewedAsComplex(nn.Module):
    """Real parameters used as complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 5, 2))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return torch.view_as_real(input.to(torch.complex128) @ torch.view_as_complex(self.weight))


class Queue(nn.Module):
    """Contrastive loss against a queue of earlier samples in a buffer, as in MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _tanh_mlp()
        self.register_buffer("queue", F.normalize(torch.randn(24, 4), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        queue, place = self.get_buffer("queue"), self.get_buffer("place")
        code = F.normalize(self.encoder(input), dim=1)
        scores = (code @ queue.clone().t()).logsumexp(1)
        with torch.no_grad():
            # Sorted, because the comparison has another order of the samples.
            queue[(int(place) + torch.arange(len(input))) % len(queue)] = code[code[:, 0].argsort()]
            place.add_(len(input))
        return scores


class Quantizer(nn.Module):
    """Vector quantization with a learned codebook and a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codes = nn.Linear(8, 4), nn.Embedding(7, 4)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
        code = self.encoder(input)
        nearest = self.codes(torch.cdist(code, self.codes.weight).argmin(1))
        return code + (nearest - code).detach(), (nearest - code.detach()).square().sum(1)


class StochasticDepth(nn.Module):
    """Residual blocks that are dropped at random, with rates that grow with depth."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        for depth, block in enumerate(self.blocks):
            vars(block)["drop_path"] = 0.1 * depth

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        for block in self.blocks:
            rate = cast(Any, block).drop_path
            keep = torch.rand(len(input), 1, dtype=input.dtype) >= rate if rate else 1
            input = input + torch.tanh(block(input)) * keep / (1 - rate)  # noqa: A001
        return input


class MessagePassing(nn.Module):
    """Graph network: messages along edges are summed by `index_add`, and reduced by `scatter_reduce`."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(12, 6), nn.GRUCell(6, 6)
        self.register_buffer("edges", torch.randint(0, 5, (2, 9)), persistent=False)

    def forward(self, nodes: Tensor) -> Tensor:
        source, target = self.get_buffer("edges")
        count = len(nodes)
        shift = 5 * torch.arange(count)[:, None]
        source, target = (source + shift).flatten(), (target + shift).flatten()
        state = nodes.flatten(0, 1)
        for _ in range(2):
            sent = torch.tanh(self.message(torch.cat([state[source], state[target]], 1)))
            state = self.update(torch.zeros_like(state).index_add(0, target, sent), state)
        most = torch.full((count, 6), -9.0, dtype=state.dtype)
        owner = torch.arange(count).repeat_interleave(5)[:, None].expand(-1, 6)
        return most.scatter_reduce(0, owner, state, "amax")


class Deformable(nn.Module):
    """Convolution that samples at learned offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets, self.conv = nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(3, 4, 3)
        nn.init.zeros_(self.offsets.weight)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        unit = torch.eye(2, 3, dtype=input.dtype).expand(len(input), 2, 3)
        grid = F.affine_grid(unit, [*input.shape], align_corners=False)
        moved = grid + 0.1 * self.offsets(input).permute(0, 2, 3, 1)
        return self.conv(F.grid_sample(input, moved, align_corners=False))


class _Positive:
    """Mixin with slots and a weight that is a property."""

    __slots__ = ()

    @property
    def weight(self) -> Tensor:
        return F.softplus(cast(Any, self).raw_weight)


class Monotone(_Positive, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.raw_weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return F.linear(input, self.weight)


class LazyBuffer(nn.Module):
    """Caches a mask and a table in the first forward: one in a buffer, one in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.table: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if self.table is None:
            self.table = torch.linspace(0, 1, 8, dtype=input.dtype)
            self.register_buffer("mask", torch.tril(torch.ones(8, 8, dtype=input.dtype)), persistent=False)
        return self.layer(input * self.table) @ self.get_buffer("mask")


class PlainAverage(nn.Module):
    """Moving average of the weights in a plain dict of tensors, used in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self._average = {name: value.detach().clone().double() for name, value in self.layer.named_parameters()}

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
        with torch.no_grad():
            for name, value in self.layer.named_parameters():
                self._average[name].lerp_(value, 0.1)
        now = {name: value.clone() for name, value in self._average.items()}
        return self.layer(input), functional_call(self.layer, now, (input,))


class Halting(nn.Module):
    """Adaptive computation: the number of iterations depends on the batch, the result of a sample does not."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.halt = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        active, output, state = torch.ones(len(input), dtype=torch.bool), torch.zeros_like(input), input
        for _ in range(6):
            state = torch.tanh(self.step(state))
            chance = torch.sigmoid(self.halt(state))
            output = output + active[:, None] * chance * state
            active = active & (chance[:, 0] < 0.55)
            if not active.any():
                break
        return output


class Equilibrium(nn.Module):
    """Fixed point whose gradient is another fixed point, computed in a hook in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        with torch.no_grad():
            self.inner.weight.mul_(0.3)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        shift, state = self.outer(input), torch.zeros_like(input)
        with torch.no_grad():
            for _ in range(60):
                state = torch.tanh(self.inner(state) + shift)
        state = torch.tanh(self.inner(state) + shift)
        if state.requires_grad:
            start = state.detach().requires_grad_()
            again = torch.tanh(self.inner(start) + shift)

            def solve(gradient: Tensor) -> Tensor:
                found = gradient
                for _ in range(60):
                    found = torch.autograd.grad(again, start, found, retain_graph=True)[0] + gradient
                return found

            state.register_hook(solve)
        return state


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] / (1 + 4 * x.abs()).square()


class Spiking(nn.Module):
    """Leaky neurons that spike, with a surrogate gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 10), nn.Linear(10, 4)
        self.leak = nn.Parameter(torch.tensor(0.8))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        potential, total = input.new_zeros(len(input), 10), input.new_zeros(len(input), 4)
        for step in range(input.shape[1]):
            potential = self.leak * potential + self.first(input[:, step])
            spikes = cast(Tensor, _Spike.apply(potential - 0.5))
            potential, total = potential - spikes * 0.5, total + self.second(spikes)
        return total


class Reservoir(nn.Module):
    """Echo state network: random recurrent weights in a buffer, scaled by their spectral radius in the build."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(9, 9)
        self.register_buffer("weight", 0.9 * weight / torch.linalg.eigvals(weight).abs().max())
        self.inputs, self.readout = nn.Linear(4, 9).requires_grad_(False), nn.Linear(9, 2)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        state = input.new_zeros(len(input), 9)
        for step in range(input.shape[1]):
            state = torch.tanh(self.inputs(input[:, step]) + state @ self.get_buffer("weight").t())
        return self.readout(state)


class Adapters(nn.Module):
    """Low-rank updates of frozen layers, added by forward hooks that own no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = _tanh_mlp().requires_grad_(False)
        self.adapters = nn.ModuleDict()
        for name, layer in self.base.named_children():
            if isinstance(layer, nn.Linear):
                down, up = nn.Linear(layer.in_features, 2, bias=False), nn.Linear(2, layer.out_features, bias=False)
                nn.init.zeros_(up.weight)
                self.adapters[name] = nn.Sequential(down, up)
                layer.register_forward_hook(functools.partial(self._add, name))

    def _add(self, name: str, _layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + self.adapters[name](args[0])

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return self.base(input)


class Locked(nn.Module):
    """A lock, a thread-local store, a weak reference to a layer, a reference to the parent, and a lambda."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lock, self.store = nn.Linear(8, 8), threading.Lock(), threading.local()
        self.partner = weakref.ref(self.layer)
        self.parents = [self]
        self.activation = lambda x: torch.tanh(self.layer(x))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        with self.lock:
            self.store.calls = getattr(self.store, "calls", 0) + 1
        partner = self.partner()
        assert partner is not None
        return self.parents[0].activation(partner(input))


class Renamed(nn.Module):
    """Saves its parameter under another name in the state dict, and lists its parameters by its own method."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self._register_load_state_dict_pre_hook(self._from_old)

    def _from_old(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in ("weight", "bias"):
            if f"{prefix}old.{name}" in state:
                state[f"{prefix}layer.{name}"] = state.pop(f"{prefix}old.{name}")

    def weights(self) -> list[Tensor]:
        return list(self.layer.parameters())

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        weight, bias = self.weights()
        return F.linear(input, weight, bias)


class SparseGraph(nn.Module):
    """Graph convolution with a sparse adjacency matrix in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.register_buffer("edges", (torch.rand(6, 6) < 0.4).float().to_sparse())

    def forward(self, nodes: Tensor) -> Tensor:
        flat = nodes.transpose(0, 1).flatten(1)
        mixed = torch.sparse.mm(self.get_buffer("edges").to(flat.dtype), flat)
        return self.layer(mixed.unflatten(1, (len(nodes), 5)).transpose(0, 1))


class Captured(nn.Module):
    """A function that captured the weight when the module was built."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        weight = self.layer.weight
        self.project = lambda x: x @ weight.t()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return self.project(input) + self.layer.bias


class Aliased(nn.Module):
    """A plain attribute that shares the memory of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.table = self.embed.weight.detach()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return self.embed(input) - self.table.mean(0)


def _film(module: Any, input: Tensor, style: Tensor) -> Tensor:  # noqa: A002
    scale, shift = module.condition(style)[:, :, None].chunk(2, 1)
    return torch.relu(module.conv(input) * (1 + scale) + shift)


def _by_key(module: Any, input: Tensor, kind: Tensor) -> Tensor:  # noqa: A002
    return torch.stack([row * module.scales[str(10 * int(key))] for row, key in zip(input, kind, strict=True)])


def _batch_of_graphs() -> Batch:
    return {"nodes": torch.randn(12, 5, 6)}


RESEARCH: dict[str, Entry] = {
    "learned initial state": Entry(LearnedState, named(input=normal(4, 6), gaps=normal(4))),
    "hard routing": Entry(HardRouting, features(8)),
    "invertible coupling": Entry(Coupling, features(8)),
    "hypernetwork": Entry(HyperNetwork, named(input=normal(8), task=normal(3))),
    "standardized convolution": Entry(lambda: nn.Sequential(StandardizedConv(3, 4, 3), nn.ReLU()), features(3, 6, 6)),
    "complex spectral layer": Entry(Spectral, features(3, 8, 8), keep_dtype=True),
    "parameter viewed as complex": Entry(ViewedAsComplex, features(8)),
    "feature-wise modulation": Entry(
        lambda: _With(_film, conv=nn.Conv1d(3, 4, 3), condition=nn.Linear(5, 8)),
        named(input=normal(3, 7), style=normal(5)),
    ),
    "queue of negatives": Entry(Queue, features(8)),
    "learned codebook": Entry(Quantizer, features(8)),
    "stochastic depth": Entry(StochasticDepth, features(8)),
    "message passing": Entry(MessagePassing, _batch_of_graphs),
    "sparse graph": Entry(SparseGraph, named(nodes=normal(6, 5))),
    "learned offsets": Entry(Deformable, features(3, 6, 6)),
    "keys like integers": Entry(
        lambda: _With(_by_key, scales=nn.ParameterDict({str(10 * key): torch.randn(8) for key in range(3)})),
        named(input=normal(8), kind=ids(3)),
    ),
    "weight is a property": Entry(Monotone, features(8)),
    "buffer made in forward": Entry(LazyBuffer, features(8)),
    "average in a plain dict": Entry(PlainAverage, features(8)),
    "adaptive computation": Entry(Halting, features(8)),
    "fixed point with a hook": Entry(Equilibrium, features(8)),
    "spiking neurons": Entry(Spiking, features(5, 8)),
    "reservoir": Entry(Reservoir, features(5, 4)),
    "adapters by hooks": Entry(Adapters, features(8)),
    "lock and weak reference": Entry(Locked, features(8)),
    "renamed in the state dict": Entry(Renamed, features(8)),
    "weight captured by a function": Entry(Captured, features(8), keep_dtype=True),
    "attribute shares memory": Entry(Aliased, named(input=ids(9, 3)), keep_dtype=True),
}
