"""Random graphs: a mapper computes what the same operations compute by hand, and its inverse restores every bit."""

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from d9d_state import (
    StateMapper,
    cast,
    concat,
    identity,
    parallel,
    rename,
    sequential,
    split,
    stack,
    transpose,
    unstack,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
_WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64, torch.bool: torch.uint8, torch.int64: None}

Tensors = dict[str, Tensor]
Step = tuple[StateMapper, Tensors]


@st.composite
def chains(draw: st.DrawFn) -> tuple[StateMapper, Tensors, Tensors]:
    """A mapper, tensors for it, and what it must make of them."""
    tensors = {f"s{index}": _tensor(draw) for index in range(draw(st.integers(1, 5)))}
    expected = tensors
    layers: list[StateMapper] = []
    for depth in range(draw(st.integers(1, 4))):
        mappers: list[StateMapper] = []
        names = draw(st.permutations(list(expected)))
        produced: Tensors = {}
        while names:
            mapper, outputs = _operation(draw, names, expected, prefix=f"d{depth}.{len(names)}")
            names = [name for name in names if name not in mapper.inputs]
            mappers.append(mapper)
            produced.update(outputs)
        layers.append(parallel(*mappers))
        expected = produced
    return sequential(*layers), tensors, expected


def _tensor(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return torch.randint(-9, 9, tuple(shape), generator=generator).to(draw(st.sampled_from(_DTYPES)))


def _operation(draw: st.DrawFn, names: list[str], tensors: Tensors, *, prefix: str) -> Step:
    first = tensors[names[0]]
    alike = [name for name in names if tensors[name].shape == first.shape and tensors[name].dtype == first.dtype]
    choices: list[Callable[[], Step]] = [
        lambda: (identity(names[0]), {names[0]: first}),
        lambda: (rename(names[0], prefix), {prefix: first}),
        lambda: (stack(alike, prefix), {prefix: torch.stack([tensors[name] for name in alike])}),
    ]
    if first.ndim > 0:
        sizes = [first.shape[0]] * len(alike)
        choices.append(
            lambda: (concat(alike, prefix, sizes=sizes), {prefix: torch.cat([tensors[name] for name in alike])})
        )
        cut = draw(st.integers(0, first.shape[0]))
        ends = [f"{prefix}.l", f"{prefix}.r"]
        choices.append(
            lambda: (
                split(names[0], ends, [cut, first.shape[0] - cut]),
                {ends[0]: first[:cut], ends[1]: first[cut:]},
            )
        )
    if first.ndim > 0 and first.shape[-1] > 0:
        parts = [f"{prefix}.{index}" for index in range(first.shape[-1])]
        choices.append(
            lambda: (
                unstack(names[0], parts, dim=-1),
                {part: first[..., index] for index, part in enumerate(parts)},
            )
        )
    if first.ndim > 1:
        choices.append(lambda: (transpose(names[0], prefix), {prefix: first.transpose(0, 1)}))
    wider = _WIDER.get(first.dtype)
    if wider is not None:
        choices.append(lambda: (cast(names[0], dtype=wider, back=first.dtype), {names[0]: first.to(wider)}))
    return draw(st.sampled_from(choices))()


def _run(mapper: StateMapper, tensors: Tensors) -> Tensors:
    outputs: Tensors = {}
    for group in mapper.groups:
        outputs.update(mapper.apply({name: tensors[name] for name in group.inputs}))
    return outputs


def _assert_same_bits(got: Tensors, expected: Tensors) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


@settings(max_examples=150, deadline=None)
@given(chains())
def test_random_graphs_compute_what_they_say_and_invert(chain: tuple[StateMapper, Tensors, Tensors]) -> None:
    mapper, tensors, expected = chain
    _assert_same_bits(_run(mapper, tensors), expected)
    _assert_same_bits(_run(mapper.inverse(), expected), tensors)
    assert mapper.inverse().inverse().explain() == mapper.explain()


@settings(max_examples=100, deadline=None)
@given(chains())
def test_groups_of_random_graphs_are_independent_and_complete(chain: tuple[StateMapper, Tensors, Tensors]) -> None:
    mapper, tensors, expected = chain
    assert sorted(name for group in mapper.groups for name in group.inputs) == sorted(tensors)
    assert sorted(name for group in mapper.groups for name in group.outputs) == sorted(expected)
    for group in mapper.groups:
        alone = mapper.restrict(inputs=group.inputs)
        assert alone.groups == (group,)
        _assert_same_bits(_run(alone, tensors), {name: expected[name] for name in group.outputs})
