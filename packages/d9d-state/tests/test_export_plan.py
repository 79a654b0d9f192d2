import pytest
import torch

from d9d_dist import MeshConfig
from d9d_dist.testing import run_ranks
from d9d_state import TensorInfo
from d9d_state._export_plan import Part, exchange_parts, plan_files


def _infos(**sizes: int) -> dict[str, TensorInfo]:
    return {name: TensorInfo((size,), torch.uint8) for name, size in sizes.items()}


def test_files_are_limited_in_size_and_assigned_round_robin() -> None:
    parts = [Part([0, 1], _infos(a=6, b=4, c=1, d=30, e=1)), Part([2], {}), Part([3], _infos(f=1))]
    files = plan_files(parts, max_bytes=10)
    assert [(file.rank, list(file.tensors)) for file in files] == [
        (0, ["a", "b"]),
        (1, ["c"]),
        (0, ["d"]),
        (1, ["e"]),
        (3, ["f"]),
    ]
    assert files[4].name == "model-00005-of-00005.safetensors"


@pytest.mark.parametrize("parts", [[], [Part([0], {})], [Part([0], _infos(a=1))]])
def test_a_single_file_has_no_number_in_its_name(parts: list[Part]) -> None:
    (file,) = plan_files(parts, max_bytes=10)
    assert (file.name, file.rank) == ("model.safetensors", 0)


def _exchange() -> tuple[Part, ...]:
    with MeshConfig(data_parallel_shard=4).build() as ctx:
        part = ctx.rank // 2
        produced = {"shared": TensorInfo((2,), torch.float32), f"own.{part}": TensorInfo((1, part), torch.bfloat16)}
        return exchange_parts(part, produced, ctx, consumed=[f"in.{part}"], unconsumed=["x"] * part)


def test_tensor_of_two_parts_is_written_by_the_first() -> None:
    for parts in run_ranks(_exchange, world_size=4):
        assert parts == (
            Part(
                [0, 1],
                {"shared": TensorInfo((2,), torch.float32), "own.0": TensorInfo((1, 0), torch.bfloat16)},
                ["in.0"],
                [],
            ),
            Part([2, 3], {"own.1": TensorInfo((1, 1), torch.bfloat16)}, ["in.1"], ["x"]),
        )
