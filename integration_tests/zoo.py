"""The zoo: modules as their authors build them, their inputs, and their losses; see `test_zoo.py`.

torch's own, parametrized and hand-written modules are listed here; those of other libraries are in `zoo_libraries.py`.
"""

import copy
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm
from torch.utils import _pytree as pytree

BATCH = 12
"""So that a rank has 12, 6 or 3 samples: no other dim of what modules give has these sizes."""
Batch: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Entry:
    """Module of the zoo.

    Attributes:
        build: Builds the module as its author does.
        inputs: Returns keyword arguments of forward for a whole batch; dim 0 is the sample.
        keep_dtype: True if parameters and inputs keep their dtypes; otherwise float64.
        has_tensor_plan: True for a `transformers` model that carries a plan for tensor parallelism.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], Batch]
    keep_dtype: bool = False
    has_tensor_plan: bool = False

    def module(self) -> nn.Module:
        """Build the module in the dtype of the comparison, without dropout, which depends on the layout."""
        model = without_random(self.build())
        return model if self.keep_dtype else model.double()

    def batch(self) -> Batch:
        """Return the whole batch."""
        torch.manual_seed(1)
        inputs = self.inputs()
        if self.keep_dtype:
            return inputs
        return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


def without_random(model: nn.Module) -> nn.Module:
    """Set every probability of dropping something to zero."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_rate = "drop" in name or "noise" in name or (name == "p" and "Drop" in type(module).__name__)
            if is_rate and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def loss_of(outputs: Any, batch_size: int) -> Tensor:
    """Reduce all outputs of a module to a scalar, a sum over samples."""
    total = torch.zeros((), dtype=torch.float64)
    if dataclasses.is_dataclass(outputs):
        outputs = vars(outputs)
    for leaf in pytree.tree_leaves(outputs):
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != batch_size or not leaf.numel():
            continue
        if not leaf.is_floating_point() and not leaf.is_complex():
            continue
        values = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).reshape(batch_size, -1).double()
        values = values.clamp(-1e4, 1e4)  # Masks of attention are minus infinity.
        factors = torch.cos(torch.arange(values.shape[1], dtype=torch.float64) + 1)
        total = total + ((factors * values + 0.5 * values.square()).mean(1)).sum()
    return total


def features(*shape: int, **more: Callable[[], Tensor]) -> Callable[[], Batch]:
    """Return a maker of batches with a normally distributed `input`."""
    return lambda: {"input": torch.randn(BATCH, *shape), **{name: make() for name, make in more.items()}}


def ids(limit: int, *shape: int) -> Callable[[], Tensor]:
    """Return a maker of random integers below a limit."""
    return lambda: torch.randint(0, limit, (BATCH, *shape))


def named(**makers: Callable[[], Tensor]) -> Callable[[], Batch]:
    """Return a maker of batches with several inputs."""
    return lambda: {name: make() for name, make in makers.items()}


def normal(*shape: int) -> Callable[[], Tensor]:
    """Return a maker of normally distributed numbers per sample."""
    return lambda: torch.randn(BATCH, *shape)


class Calls(nn.Module):
    """Calls a function of the inner module and the inputs."""

    def __init__(self, inner: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self._call = inner, call

    def forward(self, **inputs: Tensor) -> Any:
        return self._call(self.inner, **inputs)


class OwnParameters(nn.Module):
    """Parameters of all kinds owned by the module itself, without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.randn(1))
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        nn.init.trunc_normal_(self.token, std=0.02)
        self.register_buffer("positions", torch.arange(6).float()[:, None] / 6, persistent=False)
        self.register_buffer("table", torch.randn(6, 8))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return (input + self.token) * self.scale + self.shift + self.get_buffer("positions") * self.get_buffer("table")


class Complex(nn.Module):
    """Weights in the frequency domain, as in global filter networks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4, dtype=torch.complex64))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return torch.fft.irfft(torch.fft.rfft(input, dim=1) * self.weight, n=input.shape[1], dim=1)


class Lists(nn.Module):
    """Parameters in a list and in a dict, and layers in both."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(8, 8) / 3) for _ in range(3)])
        self.by_name = nn.ParameterDict({"bias": nn.Parameter(torch.randn(8)), "gain": nn.Parameter(torch.ones(8))})
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 2), "b": nn.Linear(8, 3)})

    def forward(self, input: Tensor) -> dict[str, Tensor]:  # noqa: A002
        for weight in self.weights:
            input = torch.tanh(input @ weight)  # noqa: A001
        input = input * self.by_name["gain"] + self.by_name["bias"]  # noqa: A001
        for layer in self.layers:
            input = layer(input)  # noqa: A001
        return {name: head(input) for name, head in self.heads.items()}


class Tied(nn.Module):
    """Language model with tied embedding and head; nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input: Tensor) -> tuple[Tensor, dict[str, list[Tensor]]]:  # noqa: A002
        hidden = self.norm(self.embed(input))
        return self.head(hidden), {"hidden": [hidden]}


class Twice(nn.Module):
    """A layer called twice, one of its parameters also used directly, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return self.layer(torch.tanh(self.layer(input))) @ self.layer.weight.t()


class Sometimes(nn.Module):
    """A branch for only some samples: on some ranks it may get none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, input: Tensor, kind: Tensor) -> Tensor:  # noqa: A002
        output = self.first(input)
        return torch.where(kind[:, None] == 0, output, output + self.second(input))


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.square() @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * x * (gradients[0] @ weight.t()), x.square().t() @ gradients[0]


class WithOwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return cast(Tensor, OwnFunction.apply(input, self.weight))


class InputGradient(nn.Module):
    """A second derivative: the gradient of an energy, as in interatomic potentials."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        with torch.enable_grad():
            place = input.detach().requires_grad_()
            return torch.autograd.grad(self.energy(place).sum(), place, create_graph=True)[0]


class Relative(nn.Module):
    """Initialized by Python's and NumPy's random numbers, in loops and by `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layer.weight.data = torch.from_numpy(np.random.default_rng(3).normal(size=(8, 8))).float()
        self.gain = nn.Parameter(torch.tensor(np.random.uniform(size=8), dtype=torch.float32))
        self.shift = nn.Parameter(torch.zeros(8))
        with torch.no_grad():
            for index in range(8):
                self.shift[index] = random.random()  # noqa: S311  (no secret)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return self.layer(input) * self.gain + self.shift


class MixedDtypes(nn.Module):
    """float32, bfloat16, float64 and integers in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(8, 8).bfloat16()
        self.middle = nn.Linear(8, 8)
        self.wide = nn.Linear(8, 8).double()
        self.register_buffer("order", torch.randperm(8))
        self.register_buffer("mask", torch.rand(8) < 0.5)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        hidden = self.narrow(input.bfloat16()).float()[:, self.get_buffer("order")]
        return self.wide((self.middle(hidden) * self.get_buffer("mask")).double())


def _loaded() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        nn.init.uniform_(parameter)
    model.load_state_dict(other.state_dict())
    return model


def _assigned() -> nn.Module:
    model = nn.Linear(8, 4)
    model.load_state_dict({"weight": torch.full((4, 8), 0.25), "bias": torch.arange(4.0)}, assign=True)
    return model


def _frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False).eval()
    cast(nn.BatchNorm1d, model[1]).running_mean = torch.randn(8)
    return model


def _applied() -> nn.Module:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            module.bias.data.fill_(0.01)

    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).apply(init)


def _copies() -> nn.Module:
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    return nn.Sequential(*(copy.deepcopy(block) for _ in range(3)))


def _lazy(make: Callable[[], list[nn.Module]], shape: Sequence[int]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = nn.Sequential(*make())
        model(torch.randn(2, *shape))
        return model

    return build


def _hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.register_full_backward_hook(lambda module, inputs, outputs: None)
    return model


def _masked() -> nn.Module:
    layer = nn.Linear(8, 8)
    prune.random_unstructured(layer, "weight", amount=0.5)
    return layer


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).t()


def _parametrized(parametrization: Callable[[], nn.Module], layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = layer()
        parametrize.register_parametrization(module, "weight", parametrization())
        return module

    return build


def _attend(module: nn.Module, input: Tensor, **masks: Tensor) -> Any:  # noqa: A002
    return module(input, input, input, **masks)


def _first(module: nn.Module, input: Tensor) -> Any:  # noqa: A002
    return module(input)[0]


def _batch_first_state(module: nn.Module, input: Tensor) -> Any:  # noqa: A002
    output, state = module(input.transpose(0, 1))
    states = state if isinstance(state, tuple) else (state,)
    return output.transpose(0, 1), [each.transpose(0, 1) for each in states]


def _calls(build: Callable[[], nn.Module], call: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Calls(build(), call)


def _log_probabilities(module: nn.Module, input: Tensor, target: Tensor) -> Any:  # noqa: A002
    return module(input, target).output


def _rows(module: nn.Module, input: Tensor) -> Any:  # noqa: A002
    return module(input.flatten(), torch.arange(0, input.numel(), input.shape[1], device=input.device))


TORCH: dict[str, Entry] = {
    "linear": Entry(lambda: nn.Linear(8, 5), features(8)),
    "linear without bias": Entry(lambda: nn.Linear(8, 5, bias=False), features(3, 8)),
    "linear of one output": Entry(lambda: nn.Linear(8, 1), features(8)),
    "identity around a linear": Entry(lambda: nn.Sequential(nn.Identity(), nn.Linear(8, 8)), features(8)),
    "bilinear": Entry(lambda: nn.Bilinear(6, 5, 3), named(input1=normal(6), input2=normal(5))),
    "conv1d": Entry(lambda: nn.Conv1d(4, 6, 3, padding=1), features(4, 9)),
    "conv2d": Entry(lambda: nn.Conv2d(4, 6, 3, groups=2), features(4, 6, 6)),
    "conv2d depthwise": Entry(lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), features(4, 6, 6)),
    "conv2d reflecting": Entry(lambda: nn.Conv2d(3, 5, 3, padding=1, padding_mode="reflect"), features(3, 6, 6)),
    "conv3d": Entry(lambda: nn.Conv3d(2, 3, 2, dilation=2), features(2, 4, 4, 4)),
    "conv transpose 1d": Entry(lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), features(4, 5)),
    "conv transpose 2d": Entry(lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), features(4, 4, 4)),
    "conv transpose 3d": Entry(lambda: nn.ConvTranspose3d(2, 3, 2), features(2, 3, 3, 3)),
    "rnn": Entry(lambda: nn.RNN(8, 5, num_layers=2, batch_first=True), features(3, 8)),
    "rnn relu, both directions": Entry(
        lambda: nn.RNN(8, 5, nonlinearity="relu", bidirectional=True, batch_first=True), features(3, 8)
    ),
    "lstm": Entry(lambda: nn.LSTM(8, 5, num_layers=2, batch_first=True), features(3, 8)),
    "lstm with projections": Entry(lambda: nn.LSTM(8, 6, proj_size=3, batch_first=True), features(3, 8)),
    "lstm, time first": Entry(_calls(lambda: nn.LSTM(8, 5, bidirectional=True), _batch_first_state), features(3, 8)),
    "gru": Entry(lambda: nn.GRU(8, 5, bidirectional=True, batch_first=True), features(3, 8)),
    "gru, time first": Entry(_calls(lambda: nn.GRU(8, 5, num_layers=2), _batch_first_state), features(3, 8)),
    "rnn cell": Entry(lambda: nn.RNNCell(8, 5), features(8)),
    "lstm cell": Entry(lambda: nn.LSTMCell(8, 5), features(8)),
    "gru cell": Entry(lambda: nn.GRUCell(8, 5), features(8)),
    "attention": Entry(_calls(lambda: nn.MultiheadAttention(8, 2, batch_first=True), _attend), features(5, 8)),
    "attention with other sizes": Entry(
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4, add_bias_kv=True, add_zero_attn=True, batch_first=True),
        named(query=normal(5, 8), key=normal(3, 6), value=normal(3, 4)),
    ),
    "transformer encoder layer": Entry(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), named(src=normal(5, 8))
    ),
    "transformer encoder layer, norm first": Entry(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True, norm_first=True),
        named(src=normal(5, 8)),
    ),
    "transformer encoder": Entry(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, norm=nn.LayerNorm(8), enable_nested_tensor=False
        ),
        named(src=normal(5, 8)),
    ),
    "transformer decoder": Entry(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 2),
        named(tgt=normal(4, 8), memory=normal(5, 8)),
    ),
    "transformer": Entry(
        lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), named(src=normal(5, 8), tgt=normal(4, 8))
    ),
    "embedding": Entry(lambda: nn.Embedding(10, 8), named(input=ids(10, 5))),
    "embedding with padding": Entry(lambda: nn.Embedding(10, 8, padding_idx=0), named(input=ids(10, 5))),
    "embedding with padding at the end": Entry(lambda: nn.Embedding(11, 8, padding_idx=-1), named(input=ids(11, 5))),
    "embedding by frequency": Entry(lambda: nn.Embedding(10, 8, scale_grad_by_freq=True), named(input=ids(10, 5))),
    "embedding with a largest norm": Entry(lambda: nn.Embedding(10, 8, max_norm=1.0), named(input=ids(10, 5))),
    "embedding, loaded": Entry(
        lambda: nn.Embedding.from_pretrained(torch.randn(10, 8), freeze=False), named(input=ids(10, 5))
    ),
    "embedding, loaded and frozen": Entry(
        lambda: nn.Sequential(nn.Embedding.from_pretrained(torch.randn(10, 8)), nn.Linear(8, 4)),
        named(input=ids(10, 5)),
    ),
    "embedding bag": Entry(lambda: nn.EmbeddingBag(10, 8), named(input=ids(10, 5))),
    "embedding bag of sums": Entry(lambda: nn.EmbeddingBag(10, 8, mode="sum", padding_idx=1), named(input=ids(10, 5))),
    "embedding bag with a largest norm": Entry(lambda: nn.EmbeddingBag(10, 8, max_norm=1.0), named(input=ids(10, 5))),
    "embedding bag by frequency": Entry(
        lambda: nn.EmbeddingBag(10, 8, mode="sum", scale_grad_by_freq=True), named(input=ids(10, 5))
    ),
    "embedding bag with offsets": Entry(
        _calls(lambda: nn.EmbeddingBag(10, 8, mode="max"), _rows), named(input=ids(10, 5))
    ),
    "prelu": Entry(lambda: nn.Sequential(nn.Linear(8, 8), nn.PReLU()), features(8)),
    "prelu alone": Entry(lambda: nn.PReLU(4), features(4, 3)),
    "rrelu and others": Entry(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Hardswish(), nn.GLU(), nn.Softplus()), features(8)
    ),
    "layer norm": Entry(lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), features(3, 8)),
    "layer norm of two dims": Entry(lambda: nn.LayerNorm([3, 8]), features(3, 8)),
    "rms norm": Entry(lambda: nn.RMSNorm(8), named(x=normal(3, 8))),
    "group norm": Entry(lambda: nn.GroupNorm(2, 8), features(8, 3)),
    "local response norm": Entry(lambda: nn.Sequential(nn.Conv2d(3, 8, 2), nn.LocalResponseNorm(3)), features(3, 4, 4)),
    "instance norm": Entry(lambda: nn.InstanceNorm2d(4, affine=True), features(4, 3, 3)),
    "instance norm with running statistics": Entry(
        lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True), features(4, 5)
    ),
    "batch norm 1d": Entry(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), features(8)),
    "batch norm 2d": Entry(lambda: nn.BatchNorm2d(4), features(4, 3, 3)),
    "batch norm 3d": Entry(lambda: nn.BatchNorm3d(2), features(2, 3, 3, 3)),
    "batch norm, cumulative": Entry(lambda: nn.BatchNorm1d(8, momentum=None), features(8)),
    "batch norm without statistics": Entry(lambda: nn.BatchNorm1d(8, track_running_stats=False), features(8)),
    "batch norm without parameters": Entry(
        lambda: nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8, affine=False), nn.Tanh()), features(8)
    ),
    "frozen layers": Entry(_frozen, features(8)),
    "weight norm": Entry(lambda: parametrizations.weight_norm(nn.Linear(8, 6)), features(8)),
    "weight norm of a convolution": Entry(
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Conv1d(4, 6, 3)), nn.Tanh()), features(4, 6)
    ),
    "weight norm, old": Entry(lambda: nn.Sequential(old_weight_norm(nn.Linear(8, 6)), nn.Tanh()), features(8)),
    "weight norm, old, alone": Entry(lambda: old_weight_norm(nn.Linear(8, 6)), features(8)),
    "spectral norm": Entry(lambda: parametrizations.spectral_norm(nn.Linear(8, 6)), features(8)),
    "spectral norm of a convolution": Entry(
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)), nn.Tanh()), features(3, 5, 5)
    ),
    "spectral norm, old": Entry(lambda: nn.Sequential(old_spectral_norm(nn.Linear(8, 6)), nn.Tanh()), features(8)),
    "spectral norm, old, alone": Entry(lambda: old_spectral_norm(nn.Linear(8, 6)), features(8)),
    "orthogonal": Entry(lambda: parametrizations.orthogonal(nn.Linear(8, 8)), features(8)),
    "orthogonal by Cayley": Entry(
        lambda: parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="cayley"), features(8)
    ),
    "symmetric": Entry(_parametrized(Symmetric, lambda: nn.Linear(8, 8)), features(8)),
    "pruned": Entry(_masked, features(8)),
    "lazy linear, run once": Entry(
        _lazy(lambda: [nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(3)], shape=(8,)), features(8)
    ),
    "lazy convolution, run once": Entry(
        _lazy(lambda: [nn.LazyConv2d(5, 3), nn.LazyBatchNorm2d(), nn.ReLU()], shape=(3, 6, 6)), features(3, 6, 6)
    ),
    "own parameters": Entry(OwnParameters, features(6, 8)),
    "lists and dicts": Entry(Lists, features(8)),
    "tied weights": Entry(Tied, named(input=ids(16, 5))),
    "copies": Entry(_copies, features(8)),
    "one layer thrice": Entry(lambda: nn.Sequential(*[nn.Linear(8, 8)] * 3), features(8)),
    "twice and unused": Entry(Twice, features(8)),
    "a branch of some samples": Entry(Sometimes, named(input=normal(8), kind=ids(2))),
    "own autograd function": Entry(WithOwnFunction, features(8)),
    "gradient of gradients": Entry(InputGradient, features(8)),
    "loaded": Entry(_loaded, features(8)),
    "loaded by assignment": Entry(_assigned, features(8)),
    "applied initialization": Entry(_applied, features(8)),
    "Python's and NumPy's random numbers": Entry(Relative, features(8)),
    "hooks": Entry(_hooked, features(8)),
    "complex": Entry(Complex, features(8, 4), keep_dtype=True),
    "mixed dtypes": Entry(MixedDtypes, features(8), keep_dtype=True),
    "bfloat16": Entry(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU()).bfloat16(),
        lambda: {"input": torch.randn(BATCH, 8).bfloat16()},
        keep_dtype=True,
    ),
    "adaptive softmax": Entry(
        lambda: Calls(nn.AdaptiveLogSoftmaxWithLoss(8, 12, cutoffs=[4, 8]), _log_probabilities),
        named(input=normal(8), target=ids(12)),
    ),
    "pooling, folding, shuffling": Entry(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.PixelShuffle(2), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2)),
        features(3, 6, 6),
    ),
    "upsampling": Entry(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2, mode="bilinear")), features(3, 5, 5)
    ),
    "flatten and unflatten": Entry(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 12), nn.Unflatten(1, (3, 4))), features(3, 4)
    ),
}


def entry(name: str) -> Entry:
    """Return the entry of a name: one of `TORCH`, `UNUSUAL`, `RESEARCH` or `STATEFUL`, or `library:name`."""
    from zoo_research import RESEARCH  # noqa: PLC0415  (it imports this module)
    from zoo_stateful import STATEFUL  # noqa: PLC0415  (it imports this module)
    from zoo_unusual import UNUSUAL  # noqa: PLC0415  (it imports this module)

    if ":" not in name:
        return {**TORCH, **UNUSUAL, **RESEARCH, **STATEFUL}[name]
    from zoo_libraries import library_entry  # noqa: PLC0415  (their imports take seconds)

    return library_entry(name)


def values_of(model: nn.Module) -> Mapping[str, Tensor]:
    """Return copies of parameters and buffers by name."""
    return {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
