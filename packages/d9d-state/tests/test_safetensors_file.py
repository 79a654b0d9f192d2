import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from d9d_state import TensorInfo, safetensors_file
from d9d_state._digests import PartRecord
from d9d_state.safetensors_file import FileLayout, StreamedFile, write_safetensors
from d9d_state.safetensors_header import read_header

_DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
]


def _tensors() -> dict[str, torch.Tensor]:
    # Random bits: a conversion through another dtype would change them.
    tensors = {
        str(dtype): torch.randint(0, 256, (3, 5 * dtype.itemsize), dtype=torch.uint8).view(dtype)
        if dtype != torch.bool
        else torch.randint(0, 2, (3, 5)).to(dtype)
        for dtype in _DTYPES
    }
    return {
        **tensors,
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "strided": torch.arange(12).view(3, 4).t(),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "conjugate": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
    }


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)


def test_safetensors_reads_written_files(tmp_path: Path) -> None:
    path, tensors = tmp_path / "file.safetensors", _tensors()
    record = write_safetensors(path, tensors)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(_bits(loaded[name]), _bits(tensor)), name
    data = path.read_bytes()
    for part in (record.header, *record.tensors.values()):
        assert PartRecord.of(data[: part.size]) == part
        data = data[part.size :]
    assert data == b""
    assert record.tensors.keys() == tensors.keys()


def test_files_without_tensors_are_written_and_read(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "file.safetensors", {})
    assert read_header(tmp_path / "file.safetensors") == load_file(tmp_path / "file.safetensors") == {}


def test_unsupported_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"safetensors files do not support torch\.complex128; use complex64, or pass torch\.view"
    ):
        write_safetensors(tmp_path / "file.safetensors", {"a": torch.ones(1, dtype=torch.complex128)})


def test_header_contains_the_layout(tmp_path: Path) -> None:
    infos = {
        "byte": TensorInfo((3,), torch.uint8),
        "double": TensorInfo((2, 2), torch.float64),
        "empty": TensorInfo((0, 4), torch.float32),
        "half": TensorInfo((), torch.bfloat16),
    }
    layout = FileLayout.of(infos, metadata={"format": "pt"})
    path = tmp_path / "file.safetensors"
    path.write_bytes(layout.header + bytes(layout.num_bytes - len(layout.header)))
    stored = read_header(path)
    assert {name: place.info for name, place in stored.items()} == infos
    assert {name: place.start for name, place in stored.items()} == layout.starts
    assert all(layout.starts[name] % info.dtype.itemsize == 0 for name, info in infos.items())
    assert list(layout.starts) == ["double", "empty", "half", "byte"]


def test_layout_of_unsupported_dtype_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"safetensors files do not support torch\.complex128; use complex64, or pass torch\.view"
    ):
        FileLayout.of({"a": TensorInfo((1,), torch.complex128)})


def test_header_above_size_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "MAX_HEADER_BYTES", 100)
    with pytest.raises(ValueError, match=r"got 9 tensors for one file, .* expected at most 100\. Write several"):
        FileLayout.of({str(index): TensorInfo((1,), torch.uint8) for index in range(9)})


_STREAMED = {
    "transposed": torch.randn(5, 7).t(),
    "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
    "half": torch.randn(3).bfloat16(),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 2),
    "flags": torch.rand(5) > 0.5,
}


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_tensors_are_written_in_any_order_with_short_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    original = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: original(file, data[:at_once], offset))
    infos = {name: TensorInfo.of(tensor) for name, tensor in _STREAMED.items()}
    file = StreamedFile(tmp_path / "a.safetensors", infos, metadata={"format": "pt"})
    for name in random.sample(sorted(_STREAMED), len(_STREAMED)):
        file.write(name, _STREAMED[name])
    file.close()
    loaded = load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == _STREAMED.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in _STREAMED.items())


def test_incomplete_file_cannot_be_closed(tmp_path: Path) -> None:
    file = StreamedFile(tmp_path / "a.safetensors", {"a": TensorInfo((1,), torch.float32)}, metadata={})
    with pytest.raises(AssertionError, match="not written: a"):
        file.close()
    file.abandon()


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_text("precious")
    with pytest.raises(FileExistsError):
        StreamedFile(tmp_path / "a.safetensors", {}, metadata={})
    assert (tmp_path / "a.safetensors").read_text() == "precious"
