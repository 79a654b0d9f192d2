"""Modules that change between steps, keep state outside of buffers, or call torch's less common features in forward."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from zoo import Entry, features, ids, named, normal


class _Stateful(nn.Module):
    """Module of named parts and plain attributes, whose forward is a function; `calls` counts calls of forward."""

    def __init__(self, call: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.call, self.calls = call, 0

    def forward(self, **inputs: Tensor) -> Any:
        self.calls += 1
        return self.call(self, **inputs)


def _of(call: Callable[..., Any], parts: Callable[[], dict[str, Any]]) -> Callable[[], nn.Module]:
    return lambda: _Stateful(call, **parts())


def _two() -> dict[str, Any]:
    return {"first": nn.Linear(8, 8), "second": nn.Linear(8, 4)}


def _blocks() -> dict[str, Any]:
    return {"blocks": nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), "step": torch.zeros((), dtype=torch.int64)}


def _late_teacher(self: Any, input: Tensor) -> Any:  # noqa: A002
    """Moving average of a student, by `.data`, after a first step without it."""
    if self.calls > 1:
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.1)
    return self.student(input), self.teacher(input)


def _teacher_and_student() -> dict[str, Any]:
    student = nn.Linear(8, 4)
    return {"student": student, "teacher": copy.deepcopy(student).requires_grad_(False)}


def _late_norm(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    if self.calls == 3:
        with torch.no_grad():
            self.second.weight.copy_(F.normalize(self.second.weight, dim=1))
    return self.second(self.first(input))


def _averaged(self: Any, input: Tensor) -> Any:  # noqa: A002
    self.average.update_parameters(self.student)
    return self.student(input), self.average(input)


def _averaged_parts() -> dict[str, Any]:
    student = nn.Linear(8, 4)
    return {"student": student, "average": AveragedModel(student).requires_grad_(False)}


def _target_network(self: Any, input: Tensor) -> Any:  # noqa: A002
    self.teacher.load_state_dict(self.student.state_dict())
    return self.student(input), self.teacher(input)


def _own_state_dict(self: Any, input: Tensor) -> Any:  # noqa: A002
    return self.second(self.first(input)), functional_call(self.first, self.first.state_dict(), (input,))


def _growing(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    self.step += 1
    for block in self.blocks[: int(self.step)]:
        input = torch.tanh(block(input))  # noqa: A001
    return input


def _growing_by_attribute(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    for block in self.blocks[: self.calls]:
        input = torch.tanh(block(input))  # noqa: A001
    return input * 0.9**self.calls


def _alternating(self: Any, input: Tensor) -> Any:  # noqa: A002
    """Outputs of other names and other layers in each second call."""
    return {"a": self.second(input)} if self.calls % 2 else {"b": [self.first(input)], "c": None}


def _frozen_later(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    if self.calls == 2:
        self.first.requires_grad_(False)
    return self.second(torch.tanh(self.first(input)))


def _made_in_forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    if self.calls == 1:
        self.gain = nn.Parameter(torch.ones(8, dtype=input.dtype))
    return self.second(self.first(input) * self.gain)


def _heads(self: Any, input: Tensor, kind: Tensor) -> Tensor:  # noqa: A002
    output = input.new_zeros(len(input), 4)
    for key in kind.unique().tolist():
        rows = (kind == key).nonzero()[:, 0]
        output = output.index_add(0, rows, self.heads[f"task {key}"](self.first(input[rows])))
    return output


def _ties() -> dict[str, Any]:
    linear, norm, conv, look_up = nn.Linear(8, 8), nn.LayerNorm(8), nn.Conv1d(8, 8, 1), nn.Embedding(8, 8)
    linear.bias = norm.bias
    conv.bias = norm.weight
    look_up.weight = linear.weight
    return {"linear": linear, "norm": norm, "conv": conv, "look_up": look_up}


def _tied(self: Any, input: Tensor, kind: Tensor) -> Tensor:  # noqa: A002
    hidden = self.linear(self.norm(input)) + self.look_up(kind)
    return self.conv(hidden[:, :, None])[:, :, 0]


def _history(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    """A buffer that grows by a row in each step: the norm of the weights."""
    now = self.second.weight.detach().norm(dim=1)[None]
    self.history = torch.cat([self.history, now])
    return self.second(self.first(input)) * self.history.mean(0)


def _positions(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    """Positions in a buffer that is made again for longer inputs."""
    if len(self.positions) < input.shape[1]:
        self.positions = torch.sin(torch.arange(input.shape[1], dtype=input.dtype)[:, None] / torch.arange(1, 9))
    return self.second(self.first(input) + self.positions[: input.shape[1]])


def _queue(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    """A queue of codes in a plain attribute."""
    code = self.second(self.first(input))
    earlier = self.codes
    self.codes = torch.cat([code.detach(), earlier])[:24]
    return (code @ earlier.t()).logsumexp(1)


class _Queue(_Stateful):
    def __init__(self) -> None:
        super().__init__(_queue, **_two())
        self.codes = torch.ones(24, 4, dtype=torch.float64)


class _Mean(_Stateful):
    def __init__(self) -> None:
        super().__init__(_running_mean, **_two())
        self.mean = 0.0


def _running_mean(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    """A moving average of the inputs in a number."""
    self.mean = 0.9 * self.mean + 0.1 * input.mean().item()
    return self.second(self.first(input) - self.mean)


def _last_scores(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    """Scores that are kept for inspection only."""
    self.scores = self.first(input).softmax(-1)
    self.largest = float(self.scores.max())
    return self.second(self.scores)


def _complex(self: Any, input: Tensor) -> Any:  # noqa: A002
    hidden = torch.complex(input, input.roll(1, 1)) @ self.weight.conj() + self.bias
    return torch.view_as_real(hidden), hidden.abs(), torch.linalg.solve(self.mix, hidden[..., None])[..., 0]


def _complex_parts() -> dict[str, Any]:
    mix = torch.eye(4) + 0.1 * torch.randn(4, 4)
    return {
        "weight": nn.Parameter(torch.randn(8, 4, dtype=torch.complex64)),
        "bias": nn.Parameter(torch.randn(4, dtype=torch.complex64)),
        "mix": nn.Parameter(mix.to(torch.complex64)),
    }


def _recomputed_norm(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    """A batch norm whose statistics are updated again when backward recomputes it."""
    return self.second(checkpoint(self.block, input, use_reentrant=False))


def _recomputed_chain(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    return checkpoint_sequential(self.chain, 2, input, use_reentrant=False)


class _Rounded(torch.autograd.Function):
    """Product with a bfloat16 copy of the input, whose backward computes in float64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x.bfloat16(), weight)
        return x.bfloat16().to(weight.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight, (gradients[0] * x).sum(0)


def _mixed(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    return cast(Tensor, _Rounded.apply(input, self.weight))


def _packed(self: Any, input: Tensor, length: Tensor) -> Tensor:  # noqa: A002
    packed = nn.utils.rnn.pack_padded_sequence(input, 1 + length, batch_first=True, enforce_sorted=False)
    _, (state, _) = self.rnn(packed)
    return state.transpose(0, 1)


class _Generator(_Stateful):
    """Keeps a generator, which draws the same features in each layout."""

    def __init__(self) -> None:
        super().__init__(_sampled, **_two())
        self.generator = torch.Generator().manual_seed(3)


def _sampled(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    return self.second(self.first(input * (torch.rand(8, generator=self.generator) < 0.7)))


def _cached(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    with parametrize.cached():
        return self.norm(torch.tanh(self.norm(input)))


def _parametrized_tie() -> dict[str, Any]:
    first, second = (parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(2))
    cast(Any, second).parametrizations.weight = cast(Any, first).parametrizations.weight
    return {"first": first, "second": second}


def _chain(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    return self.second(torch.tanh(self.first(input)))


def _directional(self: Any, input: Tensor) -> Any:  # noqa: A002
    """A derivative along a direction, in forward mode."""
    return jvp(lambda x: self.second(torch.tanh(self.first(x))), (input,), (torch.ones_like(input),))


def _sparse_rows(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    """Rows of a parameter with sparse gradients, without an embedding layer."""
    return F.embedding(input, self.table, sparse=True)


def _penalty(self: Any, input: Tensor) -> Any:  # noqa: A002
    size = sum(parameter.square().sum() for parameter in self.parameters())
    count = sum(parameter.numel() for parameter in self.parameters())
    return self.second(self.first(input)), (cast(Tensor, size) / count).expand(len(input))


def _threads(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda layer: layer(input), (self.first, self.other))
    return self.second(one * other)


def _scaled_gradients(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    hidden = self.first(input)
    hidden.register_hook(lambda gradient: 0.5 * gradient)
    return self.second(hidden)


def _inner_optimizer(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    """A few steps of an optimizer on a copy of a layer, inside forward."""
    with torch.enable_grad():
        inner = copy.deepcopy(self.first)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            inner(torch.eye(8, dtype=input.dtype)).square().sum().backward()
            optimizer.step()
    return self.second(self.first(input)) + inner(input).detach().sum(1, keepdim=True)


def _replaced(self: Any, input: Tensor) -> Tensor:  # noqa: A002
    """A layer that forward replaces by its copy."""
    self.first = copy.deepcopy(self.first)
    return self.second(self.first(input))


STATEFUL: dict[str, Entry] = {
    "teacher from the second step": Entry(_of(_late_teacher, _teacher_and_student), features(8)),
    "normalized in the third step": Entry(_of(_late_norm, _two), features(8)),
    "averaged model": Entry(_of(_averaged, _averaged_parts), features(8)),
    "target network": Entry(_of(_target_network, _teacher_and_student), features(8)),
    "own state dict": Entry(_of(_own_state_dict, _two), features(8)),
    "growing depth": Entry(_of(_growing, _blocks), features(8)),
    "growing depth by an attribute": Entry(_of(_growing_by_attribute, _blocks), features(8)),
    "alternating outputs": Entry(_of(_alternating, _two), features(8)),
    "frozen in the second step": Entry(_of(_frozen_later, _two), features(8)),
    "parameter made in forward": Entry(_of(_made_in_forward, _two), features(8)),
    "heads by task": Entry(
        _of(
            _heads,
            lambda: {
                "first": nn.Linear(8, 8),
                "heads": nn.ModuleDict({f"task {k}": nn.Linear(8, 4) for k in range(3)}),
            },
        ),
        named(input=normal(8), kind=ids(3)),
    ),
    "tied over classes": Entry(_of(_tied, _ties), named(input=normal(8), kind=ids(8))),
    "growing buffer": Entry(_of(_history, lambda: {**_two(), "history": torch.ones(1, 4)}), features(8)),
    "buffer made again": Entry(_of(_positions, lambda: {**_two(), "positions": torch.ones(2, 8)}), features(5, 8)),
    "queue in an attribute": Entry(_Queue, features(8)),
    "moving average in a number": Entry(_Mean, features(8)),
    "last scores": Entry(_of(_last_scores, _two), features(8)),
    "complex products": Entry(_of(_complex, _complex_parts), features(8), keep_dtype=True),
    "recomputed batch norm": Entry(
        _of(
            _recomputed_norm,
            lambda: {"block": nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()), "second": nn.Linear(8, 4)},
        ),
        features(8),
    ),
    "recomputed chain": Entry(
        _of(_recomputed_chain, lambda: {"chain": nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))}), features(8)
    ),
    "own function of mixed dtypes": Entry(_of(_mixed, lambda: {"weight": nn.Parameter(torch.randn(8))}), features(8)),
    "packed sequences": Entry(
        _of(_packed, lambda: {"rnn": nn.LSTM(6, 5, batch_first=True)}), named(input=normal(4, 6), length=ids(4))
    ),
    "generator in an attribute": Entry(_Generator, features(8)),
    "cached parametrization": Entry(
        _of(_cached, lambda: {"norm": parametrizations.weight_norm(nn.Linear(8, 8))}), features(8)
    ),
    "tied parametrizations": Entry(_of(_chain, _parametrized_tie), features(8)),
    "forward-mode derivative": Entry(_of(_directional, _two), features(8)),
    "sparse rows": Entry(_of(_sparse_rows, lambda: {"table": nn.Parameter(torch.randn(9, 4))}), named(input=ids(9, 3))),
    "penalty of all parameters": Entry(_of(_penalty, _two), features(8)),
    "threads": Entry(_of(_threads, lambda: {**_two(), "other": nn.Linear(8, 8)}), features(8)),
    "scaled gradients": Entry(_of(_scaled_gradients, _two), features(8)),
    "optimizer in forward": Entry(_of(_inner_optimizer, _two), features(8)),
    "layer replaced in forward": Entry(_of(_replaced, _two), features(8)),
}
