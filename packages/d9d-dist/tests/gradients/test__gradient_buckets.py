from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from d9d_dist import MeshConfig
from d9d_dist.gradients._gradient_buckets import Slot, plan_buckets
from d9d_dist.gradients._local_parameters import PartialParameter


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with MeshConfig().build() as ctx:
        yield ctx.mesh_for("flat")


def _slot(mesh: DeviceMesh, num_elements: int, dtype: torch.dtype = torch.float32) -> Slot:
    parameter = DTensor.from_local(torch.zeros(num_elements, dtype=dtype), mesh, (Replicate(),), run_check=False)
    return Slot(PartialParameter(parameter, (Partial(),), None), None)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=30),
    bucket_bytes=st.integers(1, 200),
)
def test_buckets_hold_every_gradient_once(mesh: DeviceMesh, sizes: list[tuple[int, bool]], bucket_bytes: int) -> None:
    slots = [_slot(mesh, size, torch.float64 if double else torch.float32) for size, double in sizes]
    buckets = plan_buckets(slots, bucket_bytes=bucket_bytes)
    position = {id(slot): index for index, slot in enumerate(slots)}
    assert sorted(position[id(slot)] for bucket in buckets for slot in bucket) == list(range(len(slots)))
    for bucket in buckets:
        assert len({slot.wire_dtype for slot in bucket}) == 1
        assert len(bucket) == 1 or sum(slot.num_bytes for slot in bucket) <= bucket_bytes
        assert [position[id(slot)] for slot in bucket] == sorted((position[id(slot)] for slot in bucket), reverse=True)
    lasts = [position[id(bucket[-1])] for bucket in buckets]
    assert lasts == sorted(lasts, reverse=True), "in the order in which backward completes them"


def test_buckets_are_filled_in_reverse_order_up_to_the_byte_limit(mesh: DeviceMesh) -> None:
    slots = [_slot(mesh, size) for size in (1, 2, 50, 3, 4, 5)]
    buckets = plan_buckets(slots, bucket_bytes=40)
    assert [[slot.shape.numel() for slot in bucket] for bucket in buckets] == [[5, 4], [50], [3, 2, 1]]


def test_reduced_gradients_are_added_to_the_gradients_set_aside(mesh: DeviceMesh) -> None:
    slot = _slot(mesh, 2)
    for value in (1.0, 2.0):
        slot.parameter.grad = DTensor.from_local(torch.full((2,), value), mesh, (Replicate(),), run_check=False)
        slot.set_aside()
        assert slot.parameter.grad is None
    slot.give(torch.full((2,), 4.0))
    assert isinstance(slot.parameter.grad, DTensor)
    assert torch.equal(slot.parameter.grad.to_local(), torch.full((2,), 7.0))
