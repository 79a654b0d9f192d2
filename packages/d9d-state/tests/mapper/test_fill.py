from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_dist import Region
from d9d_state import (
    StateMapper,
    TensorInfo,
    cast,
    concat,
    identity,
    keep,
    parallel,
    rename,
    sequential,
    split,
    stack,
    transform,
    transpose,
    unstack,
)
from d9d_state.mapper import fill
from d9d_state.mapper.convert import permute
from d9d_state.mapper.cut import narrow, pad, select
from d9d_state.mapper.fill import Destination, _empty
from d9d_state.mapper.operation import Piece, infer_on_meta
from d9d_state.mapper.reshape import reshape
from d9d_state.mapper.state_mapper import leaf


@dataclass
class _Source:
    held: Mapping[str, Tensor]
    reads: list[tuple[str, Region]] = field(default_factory=list)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo.of(tensor) for name, tensor in self.held.items()}

    def read_into(self, name: str, region: Region, target: Tensor) -> None:
        assert region.is_within(self.held[name].shape)
        self.reads.append((name, region))
        target.copy_(region.of(self.held[name]))


class _Allocations(TorchDispatchMode):
    """Records every operator whose result does not share memory with a given tensor."""

    def __init__(self, allowed: Tensor) -> None:
        super().__init__()
        self._allowed = allowed.untyped_storage().data_ptr()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() != self._allowed:
                self.found.append(str(func))
        return result


@dataclass
class _Silent:
    """Source that writes without torch operators."""

    tensors: Mapping[str, TensorInfo]
    num_elements: int = 0

    def read_into(self, name: str, region: Region, target: Tensor) -> None:
        assert tuple(target.shape) == region.sizes
        self.num_elements += region.num_elements


def _whole(tensor: Tensor) -> Destination:
    return Destination(Region.whole(tensor.shape), tensor)


def _regions(shape: Sequence[int]) -> list[Region]:
    """Iterate over all non-empty regions of a shape."""
    ranges = [[(start, stop - start) for start in range(size) for stop in range(start + 1, size + 1)] for size in shape]
    return [Region(tuple(start for start, _ in box), tuple(size for _, size in box)) for box in product(*ranges)]


@pytest.mark.parametrize(
    ("mapper", "shapes"),
    [
        (stack(["a", "b", "c"], "s", dim=-2), [(2, 3)] * 3),
        (unstack("a", ["s", "t", "u"], dim=1), [(2, 3, 2)]),
        (concat(["a", "b", "c"], "s", dim=1), [(3, 2), (3, 1), (3, 3)]),
        (split("a", ["s", "t", "u"], [2, 0, 3], dim=-1), [(3, 5)]),
        (transpose("a", dim0=-1, dim1=0), [(2, 3, 4)]),
        (permute("a", dims=[1, 2, 0]), [(2, 3, 4)]),
        (narrow("a", dim=1, start=2, length=2), [(3, 5)]),
        (select("a", dim=1, index=-2), [(3, 4, 2)]),
        (pad("a", dim=1, size=3, padded_size=5, value=7), [(2, 3)]),
        (pad("a", dim=0, size=3, padded_size=5).inverse(), [(5, 2)]),
        (cast("a", dtype=torch.int32), [(2, 3)]),
        (transform(["a", "b"], ["c"], lambda a, b: [a - b], elementwise=True), [(2, 3)] * 2),
    ],
)
def test_every_region_of_an_output_is_filled(mapper: StateMapper, shapes: list[tuple[int, ...]]) -> None:
    tensors = {
        name: torch.randint(1000, shape, dtype=torch.int64) for name, shape in zip(mapper.inputs, shapes, strict=True)
    }
    expected = mapper.apply(tensors)
    for name in mapper.outputs:
        for region in _regions(expected[name].shape):
            source = _Source(tensors)
            target = torch.full(region.sizes, -1, dtype=expected[name].dtype)
            mapper.fill({name: Destination(region, target)}, source)
            assert torch.equal(target, region.of(expected[name])), (name, region)
            num_read = sum(part.num_elements for _, part in source.reads)
            wanted = region.num_elements * (len(tensors) if name == "c" else 1)
            assert num_read == wanted or (num_read < wanted and "pad" in mapper.explain()), (name, region)


def test_experts_are_read_into_a_shard_of_their_stack() -> None:
    experts = {f"e{index}": torch.randn(4, 6) for index in range(8)}
    mapper = sequential(stack(list(experts), "s"), transpose("s", "w", dim0=1, dim1=2))
    source = _Source(experts)
    shard = Destination(Region((2, 0, 1), (2, 6, 2)), torch.empty(2, 6, 2))
    mapper.fill({"w": shard}, source)
    assert torch.equal(shard.tensor, torch.stack(list(experts.values())).transpose(1, 2)[2:4, :, 1:3])
    assert source.reads == [("e2", Region((1, 0), (2, 6))), ("e3", Region((1, 0), (2, 6)))]


def test_layout_operations_need_no_temporary() -> None:
    mapper = sequential(
        parallel(*(reshape(f"e{index}", f"e{index}", [4, 6]) for index in range(3)), identity("b"), identity("h")),
        parallel(stack(["e0", "e1", "e2"], "s"), pad("b", size=2, padded_size=3), cast("h", dtype=torch.float32)),
        parallel(permute("s", dims=[2, 0, 1]), identity("b", "h")),
        parallel(unstack("s", [f"s{index}" for index in range(6)]), narrow("b", start=1, length=2), identity("h")),
        parallel(concat(["s0", "s1", "b", "h"], "w"), identity(*(f"s{index}" for index in range(2, 6)))),
        parallel(split("w", ["w", "rest"], [5, 5]), identity(*(f"s{index}" for index in range(2, 6)))),
        parallel(select("rest", index=4), transpose("w"), identity(*(f"s{index}" for index in range(2, 6)))),
    )
    tensors = {f"e{index}": torch.randn(24) for index in range(3)}
    tensors |= {"b": torch.randn(2, 4), "h": torch.randn(2, 4, dtype=torch.bfloat16)}
    expected = mapper.apply(tensors)
    memory = torch.zeros(4, 10)
    destinations = {
        "w": Destination(Region((0, 1), (4, 4)), memory[:, 1:5]),
        "rest": Destination(Region((0,), (4,)), memory[:, 5]),
    }
    mapper.fill(destinations, _Source(tensors))
    assert torch.equal(memory[:, 1:5], expected["w"][:, 1:])
    assert torch.equal(memory[:, 5], expected["rest"])
    silent = _Silent({name: TensorInfo.of(tensor) for name, tensor in tensors.items()})
    with _Allocations(memory) as allocations:
        mapper.fill(destinations, silent)
    # A constant is rounded to its dtype in a scalar tensor.
    assert [name for name in allocations.found if "lift_fresh" not in name] == []
    assert silent.num_elements == 4 * 4 + 4


def test_cast_rounds_independent_of_destination_dtype() -> None:
    values = torch.tensor([1 + 2**-10, 3.0])
    for wanted in (torch.float32, torch.float64, torch.bfloat16):
        mapper = cast("a", dtype=torch.bfloat16)
        destination = _whole(torch.empty(2, dtype=wanted))
        mapper.fill({"a": destination}, _Source({"a": values}))
        assert destination.tensor.tolist() == [1.0, 3.0]


def test_cast_needs_temporary_only_if_it_rounds_to_another_dtype() -> None:
    def num_allocations(given: torch.dtype, through: torch.dtype, wanted: torch.dtype) -> int:
        memory = torch.empty(2, dtype=wanted)
        with _Allocations(memory) as allocations:
            cast("a", dtype=through).fill({"a": _whole(memory)}, _Silent({"a": TensorInfo((2,), given)}))
        return len(allocations.found)

    assert num_allocations(torch.float32, torch.bfloat16, torch.bfloat16) == 0
    assert num_allocations(torch.bfloat16, torch.float32, torch.float16) == 0
    assert num_allocations(torch.float32, torch.bfloat16, torch.float32) == 2  # for the read and rounded values
    assert num_allocations(torch.bfloat16, torch.float16, torch.float32) == 2
    assert num_allocations(torch.int64, torch.float32, torch.float32) == 2


def test_integers_are_cast_to_floats() -> None:
    mapper = concat(["a", "b"], "c")
    tensors = {"a": torch.tensor([2**24 + 1]), "b": torch.tensor([0.5])}
    destination = _whole(torch.empty(2, dtype=torch.float64))
    mapper.fill({"c": destination}, _Source(tensors))
    assert destination.tensor.tolist() == mapper.apply(tensors)["c"].tolist() == [2**24, 0.5]


def test_a_constant_is_rounded_to_the_dtype_of_its_tensor() -> None:
    mapper = pad("a", size=1, padded_size=2, value=1 + 2**-10)
    destination = _whole(torch.empty(2, dtype=torch.float32))
    mapper.fill({"a": destination}, _Source({"a": torch.zeros(1, dtype=torch.bfloat16)}))
    assert destination.tensor.tolist() == [0.0, 1.0]


def test_elementwise_function_runs_on_required_regions() -> None:
    shapes: list[tuple[int, ...]] = []

    def add_and_subtract(a: Tensor, b: Tensor) -> Sequence[Tensor]:
        if not a.is_meta:
            shapes.append(tuple(a.shape))
        return [a + b, a - b]

    mapper = transform(["a", "b"], ["sum", "difference"], add_and_subtract, elementwise=True)
    tensors = {"a": torch.randn(4, 4), "b": torch.randn(4, 4)}
    source = _Source(tensors)
    region = Region((1, 2), (2, 1))
    destinations = {name: Destination(region, torch.empty(2, 1)) for name in ("sum", "difference")}
    mapper.fill(destinations, source)
    assert torch.equal(destinations["sum"].tensor, (tensors["a"] + tensors["b"])[1:3, 2:3])
    assert torch.equal(destinations["difference"].tensor, (tensors["a"] - tensors["b"])[1:3, 2:3])
    assert source.reads == [("a", region), ("b", region)]
    assert shapes == [(2, 1)]


def test_other_functions_run_once_on_full_tensors() -> None:
    shapes: list[tuple[int, ...]] = []

    def flip(a: Tensor) -> Sequence[Tensor]:
        if not a.is_meta:
            shapes.append(tuple(a.shape))
        return [a.flip(0)]

    mapper = sequential(transform(["a"], ["b"], flip), split("b", ["c", "d"], [1, 3]))
    source = _Source({"a": torch.arange(4)})
    c, d = torch.empty(1, dtype=torch.int64), torch.empty(2, dtype=torch.int64)
    mapper.fill({"c": _whole(c), "d": Destination(Region((1,), (2,)), d)}, source)
    assert [*c.tolist(), *d.tolist()] == [3, 1, 0]
    assert source.reads == [("a", Region((0,), (4,)))]
    assert shapes == [(4,)]


def test_reshape_without_view_uses_contiguous_temporary() -> None:
    mapper = sequential(parallel(reshape("a", "b", [2, 3]), identity("c")), concat(["b", "c"], "d", dim=1))
    source = _Source({"a": torch.arange(6), "c": torch.zeros(2, 1, dtype=torch.int64)})
    d = torch.empty(2, 4, dtype=torch.int64)
    mapper.fill({"d": _whole(d)}, source)
    assert d.tolist() == [[0, 1, 2, 0], [3, 4, 5, 0]]
    assert source.reads == [("a", Region((0,), (6,))), ("c", Region((0, 0), (2, 1)))]


def test_reshape_without_common_factors_reads_the_whole_tensor() -> None:
    mapper = reshape("a", "b", [3, 8])
    source = _Source({"a": torch.arange(24).view(4, 6)})
    b = torch.empty(1, 2, dtype=torch.int64)
    mapper.fill({"b": Destination(Region((1, 1), (1, 2)), b)}, source)
    assert b.tolist() == [[9, 10]]
    assert source.reads == [("a", Region((0, 0), (4, 6)))]


def test_reshape_into_contiguous_memory_needs_no_copy_of_its_region(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(
        fill, "_empty", lambda region, *kind: sizes.append(region.num_elements) or _empty(region, *kind)
    )
    destination = Destination(Region((1, 1), (1, 2)), torch.empty(1, 2, dtype=torch.int64))
    reshape("a", "b", [3, 8]).fill({"b": destination}, _Source({"a": torch.arange(24).view(4, 6)}))
    assert sizes == [24]  # only the input


class _Mirror:
    """Custom layout that swaps the halves of a vector."""

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        (tensor,) = tensors
        return (tensor.roll(len(tensor) // 2),)

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        return infer_on_meta(self, *inputs)

    def pieces(self, output: int, region: Region, target: Tensor, inputs: Sequence[TensorInfo]) -> list[Piece] | None:
        assert output == 0
        half = inputs[0].shape[0] // 2
        if not region.is_whole(inputs[0].shape):
            return None
        return [
            Piece(0, Region((half,), (half,)), target.narrow(0, 0, half)),
            Piece(0, Region((0,), (half,)), target.narrow(0, half, half)),
        ]

    def inverse(self) -> "_Mirror":
        return self

    def describe(self) -> str:
        return "mirror"


@pytest.mark.parametrize("strided", [False, True])
def test_layout_may_return_none_for_some_regions(strided: bool) -> None:
    mapper = leaf(_Mirror(), ["a"], ["b"])
    source = _Source({"a": torch.arange(4)})
    memory = torch.empty(8, dtype=torch.int64)
    whole, part = (memory[::2], memory[1:5:2]) if strided else (memory[:4], memory[4:6])
    mapper.fill({"b": _whole(whole)}, source)
    assert whole.tolist() == [2, 3, 0, 1]
    mapper.fill({"b": Destination(Region((1,), (2,)), part)}, source)
    assert part.tolist() == [3, 0]
    assert [region.sizes for _, region in source.reads] == [(2,), (2,), (4,)]


def test_kept_outputs_and_empty_regions_read_nothing() -> None:
    kept = torch.ones(2)
    keep("a").fill({"a": _whole(kept)}, _Source({}))
    assert kept.tolist() == [1, 1]
    source = _Source({"a": torch.ones(2)})
    identity("a").fill({"a": Destination(Region((2,), (0,)), torch.empty(0))}, source)
    assert source.reads == []


def test_parameters_are_filled_in_place() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    identity("a").fill({"a": _whole(parameter)}, _Source({"a": torch.ones(2)}))
    assert parameter.tolist() == [1, 1]
    assert parameter.grad_fn is None


def test_reads_are_planned_without_reading() -> None:
    mapper = parallel(
        concat(["q", "k", "v"], "qkv"),
        rename("o", "out"),
        keep("new"),
        transform(["g"], ["g"], lambda g: [g.exp()], elementwise=True),
    )
    held = {name: TensorInfo((4, 2), torch.bfloat16) for name in ("q", "k", "v", "o", "g")}
    regions = {
        "out": Region((1, 0), (1, 2)),
        "qkv": Region((3, 0), (5, 1)),
        "new": Region((0,), (1,)),
        "g": Region((2, 1), (2, 1)),
    }
    assert mapper.reads(regions, held) == (
        ("o", Region((1, 0), (1, 2))),
        ("q", Region((3, 0), (1, 1))),
        ("k", Region((0, 0), (4, 1))),
        ("g", Region((2, 1), (2, 1))),
    )
    assert mapper.reads({"out": Region((0, 0), (0, 2))}, {}) == ()


def test_destinations_of_several_groups_are_refused() -> None:
    mapper = parallel(split("a", ["b", "c"], [1, 1]), identity("d"))
    one = Destination(Region((0,), (1,)), torch.empty(1))
    with pytest.raises(ValueError, match="d is not in the group of b, c; expected outputs of one group"):
        mapper.fill({"b": one, "d": one}, _Source({}))
    with pytest.raises(ValueError, match="x is not an output of this mapper"):
        mapper.fill({"x": one}, _Source({}))
    with pytest.raises(ValueError, match="got no tensors; expected outputs of one group"):
        mapper.fill({}, _Source({}))


@pytest.mark.parametrize(
    ("region", "tensor", "message"),
    [
        (
            Region((0,), (3,)),
            torch.empty(3),
            r"b: got the region at \[0\] of sizes \[3\]; expected a region within shape \[2\]",
        ),
        (Region((0,), (2,)), torch.empty(1), r"b: got a tensor of shape \[1\]; expected \[2\]"),
        (Region((0,), (2,)), torch.empty(2).long(), r"b: got a tensor of torch\.int64; expected torch\.float32"),
    ],
)
def test_mismatched_destinations_are_refused(region: Region, tensor: Tensor, message: str) -> None:
    source = _Source({"a": torch.ones(2)})
    with pytest.raises(ValueError, match=message):
        rename("a", "b").fill({"b": Destination(region, tensor)}, source)
    assert source.reads == []


def test_missing_source_tensors_are_refused() -> None:
    destination = _whole(torch.empty(2))
    with pytest.raises(ValueError, match="the source does not contain b, c; expected all inputs of the group"):
        stack(["a", "b", "c"], "d").fill({"d": destination}, _Source({"a": torch.ones(1)}))


def test_error_names_function_that_fails_on_a_region() -> None:
    def fails(a: Tensor) -> Sequence[Tensor]:
        if a.is_meta:
            return [a]
        raise RuntimeError("out of luck")

    for elementwise in (False, True):
        mapper = transform(["a"], ["b"], fails, elementwise=elementwise)
        with pytest.raises(ValueError, match=r"transform\(.*fails.*\) on a failed: out of luck"):
            mapper.fill({"b": _whole(torch.empty(2))}, _Source({"a": torch.ones(2)}))


class _BadlyLocal:
    """Local operation whose result has a different shape than the requested region."""

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    def infer(self, *inputs: TensorInfo) -> tuple[TensorInfo, ...]:
        return inputs

    def needs(self, output: int, region: Region, inputs: Sequence[TensorInfo]) -> tuple[Region, ...]:
        assert (output, region) == (0, Region((0,), (1,)))
        return (Region.whole(inputs[0].shape),)

    def inverse(self) -> "_BadlyLocal":
        return self

    def describe(self) -> str:
        return "badly"


def test_local_operation_with_wrong_shape_is_refused() -> None:
    mapper = leaf(_BadlyLocal(), ["a"], ["b"])
    with pytest.raises(ValueError, match=r"badly on a failed: it returned shape \[2\] for a region; expected \[1\]"):
        mapper.fill({"b": Destination(Region((0,), (1,)), torch.empty(1))}, _Source({"a": torch.ones(2)}))
