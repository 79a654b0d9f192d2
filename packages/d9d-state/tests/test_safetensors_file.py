from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from d9d_state._digests import PartRecord
from d9d_state.safetensors_file import write_safetensors
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
    record = write_safetensors(path, tensors, metadata={"format": "pt"})
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
    with pytest.raises(ValueError, match=r"safetensors files do not support torch\.complex128; cast the tensor"):
        write_safetensors(tmp_path / "file.safetensors", {"a": torch.ones(1, dtype=torch.complex128)})
