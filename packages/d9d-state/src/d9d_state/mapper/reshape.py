"""Reshape of tensors and of regions.

Both shapes are split into common factors ([4, 6] and [8, 3] into [4, 2, 3]); boxes over the factors map to both shapes.
So a region of one shape corresponds to one or several boxes of the other shape, if the shapes have common factors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import TypeAlias, final

from torch import Tensor

from d9d_dist import Region
from d9d_state.mapper._dims import infos_of
from d9d_state.mapper.operation import Piece
from d9d_state.mapper.state_mapper import StateMapper, leaf
from d9d_state.tensor_info import TensorInfo

_Range: TypeAlias = tuple[int, int]  # offset and size


@final
@dataclass(frozen=True, slots=True)
class _Reshape:
    shape: tuple[int, ...]
    source_shape: tuple[int, ...] | None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        (info,) = self.infer(*infos_of(tensors))
        (tensor,) = tensors
        return (tensor.reshape(info.shape),)

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        (info,) = inputs
        if self.source_shape is not None and info.shape != self.source_shape:
            raise ValueError(f"got shape {list(info.shape)}; expected {list(self.source_shape)}.")
        return (TensorInfo(_completed(self.shape, info.shape), info.dtype),)

    def pieces(self, output: int, region: Region, target: Tensor, inputs: Sequence[TensorInfo]) -> list[Piece] | None:
        source = inputs[0].shape
        shape = _completed(self.shape, source)
        try:
            if region.is_whole(shape):
                return [Piece(0, Region.whole(source), target.view(source))]
            factors = _common_factors(source, shape)
            return None if factors is None else list(_pieces(region, target, factors, shape, source))
        except RuntimeError:  # the target's strides do not allow a view of this shape
            return None

    def inverse(self) -> "_Reshape":
        if self.source_shape is None:
            raise ValueError(f"{self.describe()} has no inverse; build it as reshape(..., source_shape=[...]).")
        return _Reshape(self.source_shape, self.shape)

    def describe(self) -> str:
        return f"reshape({list(self.shape)})"


def reshape(src: str, dst: str, shape: Sequence[int], *, source_shape: Sequence[int] | None = None) -> StateMapper:
    """Reshape a tensor in row-major order. One size of `shape` may be -1 and is inferred.

    The inverse needs `source_shape`, the shape of `src`; if given, it is checked.

    Raises:
        ValueError: If the shapes have different numbers of elements, or `shape` has a negative size other than one -1.
    """
    try:
        if any(size < -1 for size in shape) or list(shape).count(-1) > 1:
            raise ValueError(f"got shape {list(shape)}; expected sizes of 0 or more, and at most one -1.")
        if source_shape is not None:
            shape = _completed(tuple(shape), tuple(source_shape))
    except ValueError as error:
        raise ValueError(f"reshape of {src}: {error}") from error
    return leaf(_Reshape(tuple(shape), None if source_shape is None else tuple(source_shape)), [src], [dst])


def _completed(shape: tuple[int, ...], source: tuple[int, ...]) -> tuple[int, ...]:
    """Infer a size of -1 from the source's shape; raise `ValueError` if the numbers of elements differ."""
    known = prod(size for size in shape if size != -1)
    if -1 in shape and known > 0 and prod(source) % known == 0:
        return tuple(prod(source) // known if size == -1 else size for size in shape)
    if -1 in shape or known != prod(source):
        raise ValueError(
            f"shape {list(source)} has {prod(source)} elements; expected as many as shape {list(shape)} has."
        )
    return shape


def _common_factors(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the coarsest shape from which both shapes result by merging adjacent dims; `None` if there is none."""
    strides = {prod(shape[dim:]) for shape in (one, other) for dim in range(len(shape) + 1)}
    steps = list(pairwise(sorted(strides, reverse=True)))
    if any(above % below for above, below in steps):
        return None
    return tuple(above // below for above, below in steps)


def _pieces(
    region: Region, target: Tensor, factors: tuple[int, ...], shape: tuple[int, ...], source: tuple[int, ...]
) -> Iterator[Piece]:
    """Split a region of `shape` into pieces that are boxes of `source`."""
    spans, source_spans = _spans(shape, factors), _spans(source, factors)
    boxes = [
        list(_boxes(offset, offset + size, factors[span]))
        for offset, size, span in zip(region.offsets, region.sizes, spans, strict=True)
    ]
    for box_of_dims in product(*boxes):
        box = [part for dim_box in box_of_dims for part in dim_box]
        view = target
        for dim, (dim_box, span) in enumerate(zip(box_of_dims, spans, strict=True)):
            start = _flat(dim_box, factors[span])
            view = view.narrow(dim, start - region.offsets[dim], prod(size for _, size in dim_box))
        view = view.view([size for _, size in box])
        for part in product(*(_rows(box[span], factors[span]) for span in source_spans)):
            yield _piece(part, box, view, factors, source_spans)


def _piece(
    part: tuple[list[_Range], ...],
    box: list[_Range],
    view: Tensor,
    factors: tuple[int, ...],
    source_spans: list[slice],
) -> Piece:
    """Build the piece for a part of a box; `part` has one list of ranges per dim of the source."""
    ranges = [each for dim_part in part for each in dim_part]
    for dim, ((offset, size), (first, _)) in enumerate(zip(ranges, box, strict=True)):
        view = view.narrow(dim, offset - first, size)
    offsets = tuple(_flat(dim_part, factors[span]) for dim_part, span in zip(part, source_spans, strict=True))
    sizes = tuple(prod(size for _, size in dim_part) for dim_part in part)
    return Piece(0, Region(offsets, sizes), view.view(sizes))


def _spans(shape: tuple[int, ...], factors: tuple[int, ...]) -> list[slice]:
    """Return for each dim the slice of factors whose product is its size; an empty slice for a dim of size 1."""
    spans = []
    stop = 0
    for size in shape:
        start, got = stop, 1
        while got < size:
            got *= factors[stop]
            stop += 1
        spans.append(slice(start, stop))
    return spans


def _boxes(start: int, stop: int, factors: tuple[int, ...]) -> Iterator[list[_Range]]:
    """Split a range of a dim into boxes over its factors: a partial row, whole rows, a partial row."""
    if not factors:
        yield []
        return
    inner = prod(factors[1:])
    first, last = -(-start // inner), stop // inner  # first and last whole row
    if first > last:
        row = last
        yield from ([(row, 1), *rest] for rest in _boxes(start - row * inner, stop - row * inner, factors[1:]))
        return
    if start < first * inner:
        row = first - 1
        yield from ([(row, 1), *rest] for rest in _boxes(start - row * inner, inner, factors[1:]))
    if first < last:
        yield [(first, last - first), *((0, factor) for factor in factors[1:])]
    if last * inner < stop:
        yield from ([(last, 1), *rest] for rest in _boxes(0, stop - last * inner, factors[1:]))


def _rows(box: list[_Range], factors: tuple[int, ...]) -> Iterator[list[_Range]]:
    """Split a box over a dim's factors into contiguous ranges of this dim."""
    inner = len(factors)
    while inner and box[inner - 1][1] == factors[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    for indices in product(*(range(offset, offset + size) for offset, size in box[:outer])):
        yield [*((index, 1) for index in indices), *box[outer:]]


def _flat(ranges: list[_Range], factors: tuple[int, ...]) -> int:
    """Return the index of a box's first element in the dim that the factors form."""
    index = 0
    for (offset, _), factor in zip(ranges, factors, strict=True):
        index = index * factor + offset
    return index
