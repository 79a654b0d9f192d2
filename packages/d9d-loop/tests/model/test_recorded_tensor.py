from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from d9d_dist import UserError
from d9d_loop.model.recorded_tensor import RecordedTensor, recorded_mapper
from d9d_state import TensorInfo

_MOVES: dict[str, Callable[[Tensor, Tensor], list[Tensor]]] = {
    "stack": lambda a, b: [torch.stack([a, b], dim=1)],
    "concat": lambda a, b: [torch.cat([a, b[:2]], dim=0)],
    "chunk": lambda a, b: [*torch.chunk(a, 2, dim=1), b],
    "one chunk": lambda a, b: [*torch.chunk(a, 1), b],
    "split": lambda a, b: [*a.split([1, 3], dim=0), b],
    "unbind": lambda a, b: [*a.unbind(1), b],
    "transpose": lambda a, b: [a.transpose(-1, 0).contiguous(), b.t()],
    "permute": lambda a, b: [a.permute(1, 0), b],
    "reshape": lambda a, b: [a.reshape(2, 2, 6), b.unsqueeze(1).squeeze(1)],
    "slice": lambda a, b: [a[-3:], b[..., 1:4]],
    "select": lambda a, b: [a[2], b],
    "interleave": lambda a, b: [a.reshape(2, 2, 6).transpose(0, 1).reshape(4, 6), b],
    "copies": lambda a, b: [a.clone().detach()[...], torch.nn.functional.pad(b, (0, 0)).to(torch.float16)],
}


@pytest.mark.parametrize("name", _MOVES)
def test_the_mapper_equals_the_recorded_code(name: str) -> None:
    a, b = torch.randn(4, 6), torch.randn(4, 6)
    infos = {"a": TensorInfo.of(a), "b": TensorInfo.of(b)}
    recorded = [RecordedTensor.named(key, info) for key, info in infos.items()]
    expected = _MOVES[name](a, b)
    results = {str(index): value for index, value in enumerate(_MOVES[name](*recorded))}
    assert all(isinstance(value, RecordedTensor) for value in results.values())
    mapper = recorded_mapper(infos, results)
    values = {"a": a, "b": b}
    got: dict[str, Tensor] = {}
    for group in mapper.groups:
        got.update(mapper.apply({key: values[key] for key in group.inputs}))
    assert got.keys() == results.keys()
    for index, value in enumerate(expected):
        assert results[str(index)].shape == value.shape
        assert torch.equal(got[str(index)].to(value.dtype), value)


def test_lossless_moves_have_an_inverse() -> None:
    recorded = {key: RecordedTensor.named(key, TensorInfo((4, 6), torch.float32)) for key in "abc"}
    joined = torch.cat([torch.stack([recorded["a"], recorded["b"]]), recorded["c"][None]], dim=0)
    inverse = recorded_mapper("abc", {"joined": joined}).inverse()
    values = torch.randn(3, 4, 6)
    for key, value in inverse.apply({"joined": values}).items():
        assert torch.equal(value, values["abc".index(key)])


def test_unused_tensors_are_dropped() -> None:
    recorded = RecordedTensor.named("a", TensorInfo((4, 6), torch.float32))
    first, _ = recorded.chunk(2)
    mapper = recorded_mapper(["a", "b"], {"first": first})
    assert (set(mapper.inputs), set(mapper.outputs)) == ({"a", "b"}, {"first"})


def test_computed_values_are_refused_only_if_outputs_depend_on_them() -> None:
    recorded = RecordedTensor.named("a", TensorInfo((4, 6), torch.float32))
    computed = recorded * 2
    computed.normal_()  # does not change stored tensors
    assert recorded_mapper(["a"], {"b": recorded}).outputs == {"b"}
    with pytest.raises(UserError, match=r"converted by aten.mul.Tensor \(b\); expected operations that only move"):
        recorded_mapper(["a"], {"b": computed.t()})


@pytest.mark.parametrize(
    ("view", "operation"),
    [(lambda a: a.expand(2, 4, 6), r"aten.expand.default"), (lambda a: a[:, ::2], r"a slice of step 2")],
)
def test_unsupported_views_are_refused_if_outputs_depend_on_them(
    view: Callable[[Tensor], Tensor], operation: str
) -> None:
    recorded = RecordedTensor.named("a", TensorInfo((4, 6), torch.float32))
    with pytest.raises(UserError, match=rf"converted by {operation} \(b\)"):
        recorded_mapper(["a"], {"b": view(recorded)})
    with pytest.raises(UserError, match=r"converted by aten.zero_.default"):
        view(recorded).zero_()


def test_writes_to_stored_values_are_refused() -> None:
    recorded = RecordedTensor.named("a", TensorInfo((4, 6), torch.float32))
    with pytest.raises(UserError, match=r"converted by aten.zero_.default \(a\)"):
        recorded.zero_()


def test_a_value_used_twice_is_refused() -> None:
    recorded = RecordedTensor.named("a", TensorInfo((4, 6), torch.float32))
    with pytest.raises(UserError, match=r"cannot be written as a state mapper: .* more than once"):
        recorded_mapper(["a"], {"b": recorded, "c": recorded})
