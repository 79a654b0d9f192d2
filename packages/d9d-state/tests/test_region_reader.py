import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from d9d_dist import Region
from d9d_state import ModelFolder, StateError, region_reader
from d9d_state.region_reader import RegionReader

_STORED: dict[str, Tensor] = {
    "matrix": torch.randn(50, 70),
    "wide": torch.randn(7, 3000, dtype=torch.float64),
    "cube": torch.randint(-100, 100, (5, 40, 300), dtype=torch.int16),
    "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
    "vector": torch.arange(5000, dtype=torch.int32),
    "empty": torch.empty(0, 3),
    "flags": torch.rand(9, 9) > 0.5,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = tmp_path_factory.mktemp("model")
    save_file(_STORED, path / "model.safetensors")
    return ModelFolder.open(path)


@st.composite
def _regions(draw: st.DrawFn) -> tuple[str, Region]:
    name = draw(st.sampled_from(sorted(_STORED)))
    offsets, sizes = [], []
    for size in _STORED[name].shape:
        start = draw(st.integers(0, size))
        offsets.append(start)
        sizes.append(draw(st.sampled_from(sorted({0, min(1, size - start), (size - start) // 2, size - start}))))
    return name, Region(tuple(offsets), tuple(sizes))


def _expected(name: str, region: Region) -> Tensor:
    tensor = _STORED[name]
    for dim, (offset, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


@settings(max_examples=300)
@given(
    case=_regions(), layout=st.sampled_from(["plain", "strided", "other dtype"]), block=st.sampled_from([64, 1 << 22])
)
def test_regions_are_read_into_any_memory(
    folder: ModelFolder, case: tuple[str, Region], layout: str, block: int
) -> None:
    name, region = case
    expected = _expected(name, region)
    target = torch.zeros_like(expected, memory_format=torch.contiguous_format)
    if layout == "strided" and expected.ndim > 0:
        target = torch.zeros(*reversed(expected.shape), dtype=expected.dtype).permute(*reversed(range(expected.ndim)))
    if layout == "other dtype" and expected.dtype.is_floating_point:
        target, expected = target.to(torch.float32), expected.to(torch.float32)
    with pytest.MonkeyPatch.context() as patch, RegionReader(folder) as reader:
        patch.setattr(region_reader, "_BLOCK", block)
        reader.read_into(name, region, target)
    assert torch.equal(target, expected)


def test_threads_share_a_large_region(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_reader, "_BLOCK", 1000)
    target = torch.zeros(50, 70)
    with ThreadPoolExecutor(3) as pool, RegionReader(folder, pool=pool) as reader:
        reader.read_into("matrix", Region((0, 0), (50, 70)), target)
    assert torch.equal(target, _STORED["matrix"])


@pytest.mark.parametrize(
    ("name", "region", "num_bytes"),
    [
        ("wide", Region((0, 0), (2, 3000)), 2 * 3000 * 8),  # rows: one run
        ("wide", Region((0, 750), (7, 750)), 7 * 750 * 8),  # columns with large gaps: one run per row
        ("matrix", Region((0, 0), (50, 10)), 50 * 70 * 4),  # columns with gaps below a page: everything is read
        ("vector", Region((10,), (5,)), 5 * 4),
        ("matrix", Region((3, 4), (1, 5)), 5 * 4),  # a single run is not enlarged
        ("cube", Region((1, 2, 3), (0, 4, 5)), 0),
    ],
)
def test_only_required_bytes_are_read(folder: ModelFolder, name: str, region: Region, num_bytes: int) -> None:
    with RegionReader(folder) as reader:
        reader.read_into(name, region, torch.zeros(region.sizes, dtype=_STORED[name].dtype))
    assert reader.num_bytes_read == num_bytes


@pytest.mark.parametrize(
    ("is_open", "message"),
    [(False, "has changed since its header was read"), (True, "ends before the end of a; the file has changed since")],
)
def test_truncated_file_raises(tmp_path: Path, is_open: bool, message: str) -> None:
    save_file({"a": torch.ones(100)}, tmp_path / "model.safetensors")
    folder = ModelFolder.open(tmp_path)
    with RegionReader(folder) as reader:
        if is_open:
            reader.read_into("a", Region((0,), (1,)), torch.zeros(1))
        os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size - 4)
        with pytest.raises(StateError, match=rf"model\.safetensors {message}"):
            reader.read_into("a", Region((0,), (100,)), torch.zeros(100))


def test_read_error_raises(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with (
        RegionReader(folder) as reader,
        pytest.raises(StateError, match=r"matrix cannot be read from .*model\.safetensors: Input/output error"),
    ):
        reader.read_into("matrix", Region((0, 0), (50, 70)), torch.zeros(50, 70))
    assert not reader._files or reader.num_bytes_read == 0


def test_files_are_closed(folder: ModelFolder) -> None:
    with RegionReader(folder) as reader:
        reader.read_into("vector", Region((0,), (1,)), torch.zeros(1, dtype=torch.int32))
        (file,) = reader._files.values()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.read_into(memoryview(bytearray(1)), 0)
