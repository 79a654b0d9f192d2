"""Random graphs: computation, inference, filling of regions, and inverse."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from d9d_dist import Region
from d9d_state import (
    StateMapper,
    TensorInfo,
    cast,
    concat,
    identity,
    parallel,
    rename,
    repeat,
    scope,
    sequential,
    split,
    stack,
    transform,
    transpose,
    unstack,
)
from d9d_state.mapper.convert import permute
from d9d_state.mapper.cut import narrow, pad, select
from d9d_state.mapper.fill import Destination
from d9d_state.mapper.reshape import reshape

_FLOATS = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
_DTYPES = (*_FLOATS, torch.int64, torch.uint8, torch.bool)
_WIDER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
    torch.bool: torch.uint8,
    torch.uint8: torch.int64,
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Tensors = dict[str, Tensor]


@dataclass
class _Case:
    """A mapper, its input tensors, and the expected outputs.

    Attributes:
        finite: True if there are no NaNs and infinities, so that floats may be cast.
        exact: True if every input value is moved to exactly one place of the outputs.
        parts: Parallel mappers of each layer; the last layer is included in `mapper`.
    """

    finite: bool
    tensors: Tensors
    expected: Tensors
    mapper: StateMapper = field(default_factory=parallel)
    exact: bool = True


@dataclass
class _Layer:
    draw: st.DrawFn
    case: _Case
    prefix: str
    names: list[str]
    lossy: bool
    outputs: Tensors = field(default_factory=dict)

    def grow(self) -> StateMapper:
        """Return a random operation on some of the remaining names."""
        name = self.names[0]
        tensor = self.case.expected[name]
        choices: list[Callable[[str, Tensor], StateMapper]] = [
            self._identity,
            self._rename,
            self._stack,
            self._reshape,
            self._function,
            self._scoped,
            self._repeated,
        ]
        if tensor.ndim > 0:
            choices += [self._concat, self._split, self._pad, self._unstack, self._permute, self._transpose, self._flip]
        if tensor.dtype in _WIDER and (self.case.finite or not tensor.dtype.is_floating_point):
            choices.append(self._cast)
        if self.lossy:
            choices += [self._cast_down] if tensor.dtype.is_floating_point else []
            choices += [self._narrow, self._mix] if tensor.ndim > 0 else []
            choices += [self._select] if tensor.ndim > 0 and tensor.shape[-1] > 0 else []
        mapper = self.draw(st.sampled_from(choices))(name, tensor)
        self.names = [each for each in self.names if each not in mapper.inputs]
        return mapper

    def _out(self, mapper: StateMapper, *tensors: Tensor) -> StateMapper:
        self.outputs.update(zip(mapper.outputs, tensors, strict=True))
        return mapper

    def _dim(self, num_dims: int) -> int:
        return self.draw(st.integers(-num_dims, num_dims - 1))

    def _alike(self, name: str) -> list[str]:
        first = self.case.expected[name]
        tensors = self.case.expected
        return [each for each in self.names if TensorInfo.of(tensors[each]) == TensorInfo.of(first)]

    def _identity(self, name: str, tensor: Tensor) -> StateMapper:
        return self._out(identity(name), tensor)

    def _rename(self, name: str, tensor: Tensor) -> StateMapper:
        return self._out(rename(name, self.prefix), tensor)

    def _scoped(self, name: str, tensor: Tensor) -> StateMapper:
        return self._out(scope(name[:1], f"{self.prefix}.", rename(name[1:], "x")), tensor)

    def _repeated(self, name: str, tensor: Tensor) -> StateMapper:
        names = self._alike(name)
        mapper = repeat(unstack("{name}", [f"{self.prefix}.{{name}}"]), name=names)
        whole = sequential(parallel(*(stack([each], each) for each in names)), mapper)
        assert tensor.shape == self.case.expected[names[-1]].shape
        return self._out(whole, *(self.case.expected[each] for each in names))

    def _stack(self, name: str, tensor: Tensor) -> StateMapper:
        names, dim = self._alike(name), self._dim(tensor.ndim + 1)
        tensors = [self.case.expected[each] for each in names]
        return self._out(stack(names, self.prefix, dim=dim), torch.stack(tensors, dim=dim))

    def _unstack(self, name: str, tensor: Tensor) -> StateMapper:
        dim = self._dim(tensor.ndim)
        if tensor.shape[dim] == 0:
            return self._identity(name, tensor)
        names = [f"{self.prefix}.{index}" for index in range(tensor.shape[dim])]
        return self._out(unstack(name, names, dim=dim), *tensor.unbind(dim))

    def _concat(self, name: str, tensor: Tensor) -> StateMapper:
        names, dim = self._alike(name), self._dim(tensor.ndim)
        tensors = [self.case.expected[each] for each in names]
        sizes = [each.shape[dim] for each in tensors]
        return self._out(concat(names, self.prefix, dim=dim, sizes=sizes), torch.cat(tensors, dim=dim))

    def _split(self, name: str, tensor: Tensor) -> StateMapper:
        dim = self._dim(tensor.ndim)
        cut = self.draw(st.integers(0, tensor.shape[dim]))
        sizes = [cut, tensor.shape[dim] - cut]
        mapper = split(name, [f"{self.prefix}.l", f"{self.prefix}.r"], sizes, dim=dim)
        return self._out(mapper, *tensor.split(sizes, dim=dim))

    def _transpose(self, name: str, tensor: Tensor) -> StateMapper:
        dim0, dim1 = self._dim(tensor.ndim), self._dim(tensor.ndim)
        return self._out(transpose(name, self.prefix, dim0=dim0, dim1=dim1), tensor.transpose(dim0, dim1))

    def _permute(self, name: str, tensor: Tensor) -> StateMapper:
        dims = self.draw(st.permutations(range(-tensor.ndim, 0)))
        return self._out(permute(name, self.prefix, dims=dims), tensor.permute(*dims))

    def _reshape(self, name: str, tensor: Tensor) -> StateMapper:
        shape = _other_shape(self.draw, tensor.shape)
        self.case.exact = False  # without common factors, full tensors are read
        mapper = reshape(name, self.prefix, shape, source_shape=tensor.shape)
        return self._out(mapper, tensor.reshape(shape))

    def _pad(self, name: str, tensor: Tensor) -> StateMapper:
        dim, extra = self._dim(tensor.ndim), self.draw(st.integers(0, 2))
        size = tensor.shape[dim]
        shape = list(tensor.shape)
        shape[dim] = extra
        self.case.exact = False
        mapper = pad(name, self.prefix, dim=dim, size=size, padded_size=size + extra, value=1)
        return self._out(mapper, torch.cat([tensor, torch.ones(shape, dtype=tensor.dtype)], dim=dim))

    def _cast(self, name: str, tensor: Tensor) -> StateMapper:
        wider = _WIDER[tensor.dtype]
        return self._out(cast(name, dtype=wider, back=tensor.dtype), tensor.to(wider))

    def _function(self, name: str, tensor: Tensor) -> StateMapper:
        mapper = transform([name], [name], _flip_a_bit, inverse=_flip_a_bit, elementwise=True)
        return self._out(mapper, *_flip_a_bit(tensor))

    def _flip(self, name: str, tensor: Tensor) -> StateMapper:
        self.case.exact = False
        return self._out(transform([name], [name], _flip_order, inverse=_flip_order), *_flip_order(tensor))

    def _cast_down(self, name: str, tensor: Tensor) -> StateMapper:
        dtype = self.draw(st.sampled_from(_FLOATS))
        return self._out(cast(name, dtype=dtype), tensor.to(dtype))

    def _narrow(self, name: str, tensor: Tensor) -> StateMapper:
        dim = self._dim(tensor.ndim)
        start = self.draw(st.integers(0, tensor.shape[dim]))
        length = self.draw(st.integers(0, tensor.shape[dim] - start))
        mapper = narrow(name, self.prefix, dim=dim, start=start, length=length)
        return self._out(mapper, tensor.narrow(dim, start, length))

    def _select(self, name: str, tensor: Tensor) -> StateMapper:
        index = self.draw(st.integers(-tensor.shape[-1], tensor.shape[-1] - 1))
        return self._out(select(name, self.prefix, dim=-1, index=index), tensor.select(-1, index))

    def _mix(self, name: str, tensor: Tensor) -> StateMapper:
        names = [each for each in self.names if self.case.expected[each].shape == tensor.shape]
        tensors = [self.case.expected[each] for each in names]
        return self._out(concat(names, self.prefix), torch.cat(tensors))


def _flip_a_bit(tensor: Tensor) -> Sequence[Tensor]:
    if tensor.dtype is torch.bool:
        return [tensor.logical_not()]
    return [tensor.view(_INTEGERS[tensor.itemsize]).bitwise_xor(1).view(tensor.dtype)]


def _flip_order(tensor: Tensor) -> Sequence[Tensor]:
    return [tensor.flip(0)]


def _other_shape(draw: st.DrawFn, shape: Sequence[int]) -> list[int]:
    left = prod(shape)
    if left == 0:
        return [*shape, 1]
    other = [1] * draw(st.integers(0, 1))
    while left > 1:
        size = draw(st.sampled_from([size for size in range(2, left + 1) if left % size == 0]))
        other.append(size)
        left //= size
    return other


def _tensor(draw: st.DrawFn, *, finite: bool) -> Tensor:
    shape = draw(st.lists(st.sampled_from([2, 3, 4, 1, 0]), min_size=0, max_size=3))
    dtype = draw(st.sampled_from(_DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator) > 0
    if finite:
        numbers = torch.randint(-9, 9, shape, generator=generator)
        return torch.where(numbers == 0, -0.0, numbers / 7).to(dtype) if dtype.is_floating_point else numbers.to(dtype)
    # Arbitrary bits: NaNs with payloads, negative zeros, infinities.
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def _grow(draw: st.DrawFn, *, lossy: bool) -> _Case:
    finite = draw(st.booleans())
    tensors = {f"s{index}": _tensor(draw, finite=finite) for index in range(draw(st.integers(1, 4)))}
    case = _Case(finite, tensors, tensors)
    layers: list[StateMapper] = []
    for depth in range(draw(st.integers(1, 4))):
        layer = _Layer(draw, case, "", draw(st.permutations(list(case.expected))), lossy)
        mappers: list[StateMapper] = []
        while layer.names:
            layer.prefix = f"d{depth}.{len(layer.names)}"
            mappers.append(layer.grow())
        layers.append(parallel(*mappers))
        case.expected = layer.outputs
    case.mapper = sequential(*layers)
    return case


_invertible = st.composite(lambda draw: _grow(draw, lossy=False))
_any = st.composite(lambda draw: _grow(draw, lossy=True))


@dataclass
class _Source:
    """In-memory source that counts how often each element is read."""

    held: Tensors
    counts: Tensors = field(default_factory=dict)
    reads: list[tuple[str, Region]] = field(default_factory=list)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo.of(tensor) for name, tensor in self.held.items()}

    def read_into(self, name: str, region: Region, target: Tensor) -> None:
        tensor = self.held[name]
        both_floating = target.dtype.is_floating_point and tensor.dtype.is_floating_point
        assert target.dtype == tensor.dtype or both_floating
        assert region.num_elements > 0
        assert region.is_within(tensor.shape)
        count = self.counts.setdefault(name, torch.zeros(tensor.shape, dtype=torch.int64))
        region.of(count).add_(1)
        self.reads.append((name, region))
        target.copy_(region.of(tensor))


def _run(mapper: StateMapper, tensors: Tensors) -> Tensors:
    outputs: Tensors = {}
    for group in mapper.groups:
        outputs.update(mapper.apply({name: tensors[name] for name in group.inputs}))
    return outputs


def _infos(tensors: Tensors) -> dict[str, TensorInfo]:
    return {name: TensorInfo.of(tensor) for name, tensor in tensors.items()}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_INTEGERS[tensor.itemsize]) if tensor.ndim else tensor.reshape(1).view(torch.uint8)


def _assert_same_bits(got: Tensors, expected: Tensors) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert torch.equal(_bits(got[name]), _bits(tensor)), name


@settings(max_examples=200)
@given(_invertible())
def test_random_graphs_compute_and_invert(case: _Case) -> None:
    mapper = case.mapper
    _assert_same_bits(_run(mapper, case.tensors), case.expected)
    _assert_same_bits(_run(mapper.inverse(), case.expected), case.tensors)
    again = mapper.inverse().inverse()
    assert again.explain() == mapper.explain()
    _assert_same_bits(_run(again, case.tensors), case.expected)


@settings(max_examples=200)
@given(_any())
def test_inference_matches_computation(case: _Case) -> None:
    mapper = case.mapper
    for group in mapper.groups:
        tensors = {name: case.tensors[name] for name in group.inputs}
        inferred = mapper.infer(_infos(tensors))
        assert inferred == _infos(mapper.apply(tensors))
        assert inferred == _infos(mapper.apply({name: tensor.to("meta") for name, tensor in tensors.items()}))


@settings(max_examples=100)
@given(_any(), st.integers(1, 4))
def test_parts_of_random_graphs_are_independent_and_complete(case: _Case, num_shards: int) -> None:
    mapper = case.mapper
    assert sorted(name for group in mapper.groups for name in group.inputs) == sorted(case.tensors)
    assert sorted(name for group in mapper.groups for name in group.outputs) == sorted(case.expected)
    shards = [mapper.shard(num_shards, index) for index in range(num_shards)]
    parts = [mapper.restrict(inputs=group.inputs) for group in mapper.groups]
    for whole in (shards, parts):
        assert {group for part in whole for group in part.groups} == set(mapper.groups)
        assert sum(len(part.groups) for part in whole) == len(mapper.groups)
        for part in whole:
            expected = {name: case.expected[name] for name in part.outputs}
            _assert_same_bits(_run(part, case.tensors), expected)


@st.composite
def _regions(draw: st.DrawFn, shape: Sequence[int]) -> Region:
    offsets, sizes = [], []
    for size in shape:
        offsets.append(draw(st.integers(0, max(size - 1, 0))))
        sizes.append(draw(st.integers(min(1, size), size - offsets[-1])))
    return Region(tuple(offsets), tuple(sizes))


def _memory(data: st.DataObject, region: Region, dtype: torch.dtype) -> Tensor:
    """Return memory with random dim order and, for floats, possibly another dtype."""
    order = data.draw(st.permutations(range(len(region.sizes))))
    changed = dtype.is_floating_point and data.draw(st.booleans())
    other = data.draw(st.sampled_from(_FLOATS)) if changed else dtype
    memory = torch.zeros([region.sizes[dim] for dim in order], dtype=other)
    return memory.permute([order.index(dim) for dim in range(len(order))])


@settings(max_examples=200)
@given(_any(), st.data())
def test_filled_regions_match_the_full_tensor(case: _Case, data: st.DataObject) -> None:
    for group in case.mapper.groups:
        names = data.draw(st.lists(st.sampled_from(group.outputs), unique=True, min_size=1))
        source = _Source({name: case.tensors[name] for name in group.inputs})
        regions = {name: data.draw(_regions(case.expected[name].shape)) for name in names}
        destinations = {
            name: Destination(region, _memory(data, region, case.expected[name].dtype))
            for name, region in regions.items()
        }
        case.mapper.fill(destinations, source)
        for name, destination in destinations.items():
            expected = destination.region.of(case.expected[name])
            got = destination.tensor
            if got.dtype == expected.dtype:
                assert torch.equal(_bits(got), _bits(expected)), name
            else:
                assert torch.allclose(got, expected.to(got.dtype), rtol=0, atol=0, equal_nan=True), name
        planned = case.mapper.reads(regions, source.tensors)
        if case.exact:
            num_read = sum(region.num_elements for _, region in source.reads)
            assert num_read == sum(region.num_elements for region in regions.values())
            assert all(int(count.max()) == 1 for count in source.counts.values())
            assert set(planned) == set(source.reads)
        assert {name for name, _ in planned} == {name for name, _ in source.reads}
