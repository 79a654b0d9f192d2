from pathlib import Path

import pytest
import torch

from d9d_state import TensorInfo, safetensors_layout
from d9d_state.safetensors_header import read_header
from d9d_state.safetensors_layout import FileLayout


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


def test_unsupported_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"safetensors files do not support torch\.complex128; cast the tensor"):
        FileLayout.of({"a": TensorInfo((1,), torch.complex128)})


def test_header_above_size_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_layout, "MAX_HEADER_BYTES", 100)
    with pytest.raises(ValueError, match=r"got 9 tensors for one file, .* expected at most 100\. Write several"):
        FileLayout.of({str(index): TensorInfo((1,), torch.uint8) for index in range(9)})
