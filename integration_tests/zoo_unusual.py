"""Modules of unusual kinds in the zoo: what their forward writes, transforms, returns, or hides."""

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zoo import Calls, Entry, features, ids, named, normal


def _calls(build: Callable[[], nn.Module], call: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Calls(build(), call)


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


class Adversarial(nn.Module):
    """Generator and discriminator, whose scores of real and generated samples are both outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
        norm = nn.utils.parametrizations.spectral_norm
        self.discriminator = nn.Sequential(norm(nn.Linear(6, 8)), nn.LeakyReLU(0.2), norm(nn.Linear(8, 1)))

    def forward(self, noise: Tensor, real: Tensor) -> dict[str, Tensor]:
        made = self.generator(noise)
        return {"made": self.discriminator(made), "real": self.discriminator(real), "detached": made.detach()}


class Transposed(nn.Module):
    """Autoencoder whose decoder is the transposed weight of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.bias = nn.Linear(8, 3), nn.Parameter(torch.zeros(8))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return F.linear(torch.tanh(self.encoder(input)), self.encoder.weight.t(), self.bias)


class Containers(nn.Module):
    """Parameter containers in module containers."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name = nn.ModuleDict({"a": nn.ParameterList([torch.randn(8), torch.randn(8)]), "b": nn.ParameterDict()})
        self.by_name["b"]["gain"] = torch.ones(8)  # ty: ignore[invalid-assignment]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        first, second = self.by_name["a"]  # ty: ignore[not-iterable]
        return torch.sin(input * first + second) * self.by_name["b"]["gain"]  # ty: ignore[not-subscriptable]


class Counting(nn.Module):
    """A counter in a buffer and a schedule that depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        steps, seen = self.get_buffer("steps"), self.get_buffer("seen")
        steps += 1
        seen[int(steps) % 3] = True
        return self.layer(input) * (0.9 ** steps.item()) + seen.sum()


class Momentum(nn.Module):
    """A teacher that is a moving average of the student, updated in forward, as in MoCo and BYOL."""

    def __init__(self) -> None:
        super().__init__()
        self.student = _mlp()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return self.student(input), self.teacher(input)


class MomentumBuffers(nn.Module):
    """A teacher as a moving average in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(8, 4)
        for name, parameter in self.student.named_parameters():
            self.register_buffer(f"slow_{name}", parameter.detach().clone())

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
        slow = {name: self.get_buffer(f"slow_{name}") for name, _ in self.student.named_parameters()}
        with torch.no_grad():
            for name, parameter in self.student.named_parameters():
                slow[name].mul_(0.9).add_(parameter, alpha=0.1)
        copies = {name: each.clone() for name, each in slow.items()}
        return self.student(input), functional_call(self.student, copies, (input,))


class Normalized(nn.Module):
    """Prototypes that forward normalizes in place, as in SwAV."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.prototypes = nn.Linear(8, 8), nn.Linear(8, 5, bias=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        with torch.no_grad():
            self.prototypes.weight.copy_(F.normalize(self.prototypes.weight, dim=1))
        return self.prototypes(self.layer(input))


class NormalizedData(Normalized):
    """The same, written through `.data`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        self.prototypes.weight.data = F.normalize(self.prototypes.weight.data, dim=1)
        return self.prototypes(self.layer(input))


class DataDependent(nn.Module):
    """Scale and shift that the first batch initializes, as ActNorm in Glow."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        ready = self.get_buffer("ready")
        if not ready:
            with torch.no_grad():
                self.shift.copy_(-input.mean(0))
                self.scale.copy_(1 / input.std(0))
            ready.fill_(True)
        return (input + self.shift) * self.scale


class Codebook(nn.Module):
    """Vector quantization with a codebook that is a moving average of the batch, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("codes", torch.randn(6, 4))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        hidden, codes = self.layer(input), self.get_buffer("codes")
        chosen = torch.cdist(hidden, codes).argmin(1)
        with torch.no_grad():
            for code in chosen.unique():
                codes[code].mul_(0.9).add_(hidden[chosen == code].mean(0), alpha=0.1)
        return hidden + (codes[chosen] - hidden).detach()


class GradientHooks(nn.Module):
    """Hooks of parameters: one scales the gradient, one masks rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layer.weight.register_hook(lambda gradient: gradient * 0.5)
        self.layer.bias.register_post_accumulate_grad_hook(_halve)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return self.layer(input)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class Delegating(nn.Module):
    """Wrapper that forwards unknown attributes to the wrapped module."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(8, 8)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return F.linear(input, self.weight, self.bias)


class Odd(nn.Module):
    """Parameters of size zero, of integers, not contiguous, in channels-last; a buffer that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 8))
        self.order = nn.Parameter(torch.randperm(8), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(8, 6).t())
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.register_buffer("absent", None)
        self.register_parameter("missing", None)

    def forward(self, input: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
        rows = torch.cat([self.nothing, torch.ones(1, 8, dtype=input.dtype, device=input.device)])
        return F.linear(input[:, self.order] * rows.sum(0), self.transposed), self.conv(image)


class Ensemble(nn.Module):
    """Several networks in one call of `vmap`, from stacked parameters."""

    def __init__(self) -> None:
        super().__init__()
        members = [_mlp() for _ in range(3)]
        stacked, _ = stack_module_state(members)
        self.stacked = nn.ParameterDict({name.replace(".", "-"): value.detach() for name, value in stacked.items()})
        self._member = [copy.deepcopy(members[0]).to("meta")]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        def call(parameters: dict[str, Tensor]) -> Tensor:
            return functional_call(self._member[0], parameters, (input,))

        return vmap(call)({name.replace("-", "."): value for name, value in self.stacked.items()}).transpose(0, 1)


def _per_sample(module: nn.Module, input: Tensor) -> Tensor:  # noqa: A002
    return vmap(lambda row: functional_call(module, dict(module.named_parameters()), (row,)))(input)


def _score(module: nn.Module, input: Tensor) -> Tensor:  # noqa: A002
    def energy(row: Tensor) -> Tensor:
        return module(row).square().sum()

    return vmap(grad(energy))(input)


def _inner_step(module: nn.Module, input: Tensor) -> Tensor:  # noqa: A002
    """One step of gradient descent per sample, as in MAML."""
    parameters = dict(module.named_parameters())

    def adapted(row: Tensor) -> Tensor:
        gradients = grad(lambda values: functional_call(module, values, (row,)).square().sum())(parameters)
        return functional_call(module, {name: x - 0.1 * gradients[name] for name, x in parameters.items()}, (row,))

    return vmap(adapted)(input)


def _autograd_step(module: nn.Module, input: Tensor) -> Tensor:  # noqa: A002
    parameters = dict(module.named_parameters())
    outputs = []
    for row in input:
        gradients = torch.autograd.grad(module(row).square().sum(), list(parameters.values()), create_graph=True)
        changed = {name: x - 0.1 * g for (name, x), g in zip(parameters.items(), gradients, strict=True)}
        outputs.append(functional_call(module, changed, (row,)))
    return torch.stack(outputs)


def _copied(module: nn.Module, input: Tensor) -> Tensor:  # noqa: A002
    with torch.no_grad():
        frozen = copy.deepcopy(module)
    return module(input) - frozen(input).detach() + frozen[0].weight.detach().sum()  # ty: ignore[not-subscriptable]


def _nested(module: nn.Module, input: Tensor) -> Tensor:  # noqa: A002
    lengths = [1 + int(row[0, 0] > 0) for row in input]
    rows = torch.nested.nested_tensor(
        [row[:length] for row, length in zip(input, lengths, strict=True)], layout=torch.jagged
    )
    output = module[0](rows)  # ty: ignore[not-subscriptable]
    return torch.stack([row.sum(0) for row in output.unbind()])


def _recomputed(use_reentrant: bool) -> Callable[..., Tensor]:
    def call(module: nn.Module, input: Tensor) -> Tensor:  # noqa: A002
        first, *rest = module.children()
        return checkpoint(nn.Sequential(*rest), first(input), use_reentrant=use_reentrant)

    return call


def _own_forward() -> nn.Module:
    model = nn.Linear(8, 4)
    inner = model.forward

    def forward(input: Tensor) -> Tensor:  # noqa: A002
        return inner(input) * 2 + inner(input).sin()

    model.forward = forward
    return model


def _hidden() -> nn.Module:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self._reference = [nn.Linear(8, 8).double().requires_grad_(False)]
            self._table = torch.randn(8, dtype=torch.float64)

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return self.layer(input) - self._reference[0](input) * self._table

    return Hidden()


def _scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.Linear(8, 8), torch.jit.script(_mlp()))


def _traced() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.Linear(8, 8), torch.jit.trace(_mlp(), torch.randn(2, 8)))


def _quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frozen = torch.ao.quantization.quantize_dynamic(_mlp(), {nn.Linear}, dtype=torch.qint8)  # ty: ignore[deprecated]
    return nn.Sequential(frozen, nn.Linear(4, 3))


def _observed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), torch.ao.quantization.FakeQuantize(), nn.Linear(8, 4))


class Point(NamedTuple):
    first: Tensor
    rest: list[Any]


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: dict[str, Tensor]


def _as_dataclass(module: nn.Module, input: Tensor) -> Output:  # noqa: A002
    hidden = module(input)
    return Output(hidden * 2, {"hidden": hidden})


def _as_named_tuple(module: nn.Module, input: Tensor) -> Point:  # noqa: A002
    hidden = module(input)
    return Point(hidden, [hidden, {"more": (hidden.sum(1), None, "text", 3)}])


def _returns_parameter(module: nn.Module, input: Tensor) -> Any:  # noqa: A002
    weight = module[0].weight  # ty: ignore[not-subscriptable]
    return module(input), weight.expand(len(input), *weight.shape), weight


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


def _reversed(module: nn.Module, input: Tensor) -> Any:  # noqa: A002
    hidden = module[0](input)  # ty: ignore[not-subscriptable]
    return module[2](hidden), module[2](Reversal.apply(hidden))  # ty: ignore[not-subscriptable]


def _standardized(module: nn.Module, input: Tensor) -> Tensor:  # noqa: A002
    conv = module[0]  # ty: ignore[not-subscriptable]
    weight = conv.weight - conv.weight.mean((1, 2, 3), keepdim=True)
    return F.conv2d(input, weight / weight.std((1, 2, 3), keepdim=True), conv.bias)


def _only_keywords(module: nn.Module, *, input: Tensor, scale: Tensor, absent: Tensor | None = None) -> Tensor:  # noqa: A002
    assert absent is None
    return module(input) * scale[:, None]


UNUSUAL: dict[str, Entry] = {
    "generator and discriminator": Entry(Adversarial, named(noise=normal(8), real=normal(6))),
    "transposed tie": Entry(Transposed, features(8)),
    "containers in containers": Entry(Containers, features(8)),
    "counter": Entry(Counting, features(8)),
    "momentum encoder": Entry(Momentum, features(8)),
    "momentum encoder in buffers": Entry(MomentumBuffers, features(8)),
    "normalized in forward": Entry(Normalized, features(8)),
    "normalized in forward by data": Entry(NormalizedData, features(8)),
    "initialized by the first batch": Entry(DataDependent, features(8)),
    "codebook of moving averages": Entry(Codebook, features(8)),
    "hooks of parameters": Entry(GradientHooks, features(8)),
    "delegating attributes": Entry(Delegating, features(8)),
    "odd parameters": Entry(Odd, named(input=normal(8), image=normal(3, 5, 5))),
    "ensemble by vmap": Entry(Ensemble, features(8)),
    "functional call per sample": Entry(_calls(_mlp, _per_sample), features(8)),
    "gradient per sample": Entry(_calls(_mlp, _score), features(8)),
    "inner step by torch.func": Entry(_calls(_mlp, _inner_step), features(8)),
    "inner step by autograd": Entry(_calls(_mlp, _autograd_step), features(8)),
    "copied in forward": Entry(_calls(_mlp, _copied), features(8)),
    "nested tensors": Entry(_calls(_mlp, _nested), features(4, 8)),
    "recomputed": Entry(_calls(_mlp, _recomputed(False)), features(8)),
    "recomputed, reentrant": Entry(_calls(_mlp, _recomputed(True)), features(8)),
    "forward replaced": Entry(_own_forward, features(8)),
    "hidden tensors": Entry(_hidden, features(8)),
    "scripted": Entry(_scripted, features(8)),
    "traced": Entry(_traced, features(8)),
    "dynamically quantized": Entry(_quantized, features(8), keep_dtype=True),
    "observed for quantization": Entry(_observed, features(8), keep_dtype=True),
    "sparse embedding": Entry(lambda: nn.Embedding(10, 8, sparse=True), named(input=ids(10, 5))),
    "complex convolution": Entry(
        _calls(
            lambda: nn.Conv1d(4, 6, 3, dtype=torch.complex64),
            lambda module, input: module(input + 0j).abs(),  # noqa: A006
        ),
        features(4, 7),
        keep_dtype=True,
    ),
    "dataclass": Entry(_calls(_mlp, _as_dataclass), features(8)),
    "named tuple": Entry(_calls(_mlp, _as_named_tuple), features(8)),
    "parameter returned": Entry(_calls(_mlp, _returns_parameter), features(8)),
    "gradient reversal": Entry(
        _calls(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), _reversed), features(8)
    ),
    "weight standardization": Entry(
        _calls(lambda: nn.Sequential(nn.Conv2d(3, 4, 3)), _standardized), features(3, 5, 5)
    ),
    "only keywords": Entry(_calls(_mlp, _only_keywords), named(input=normal(8), scale=normal())),
    "half precision": Entry(lambda: _mlp().half(), lambda: {"input": torch.randn(12, 8).half()}, keep_dtype=True),
}
