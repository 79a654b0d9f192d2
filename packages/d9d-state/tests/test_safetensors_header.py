import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from d9d_dist import UserError
from d9d_state import TensorInfo
from d9d_state.safetensors_header import dtype_name, dtype_of, read_header

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
    tensors = {str(dtype): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in _DTYPES}
    return {**tensors, "scalar": torch.tensor(1.5), "empty": torch.empty(0, 3)}


def test_headers_of_the_peer_are_read_here(tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in _tensors().items() if name != "conjugate"}
    save_file(tensors, tmp_path / "file.safetensors", metadata={"format": "pt"})
    stored = read_header(tmp_path / "file.safetensors")
    data = (tmp_path / "file.safetensors").read_bytes()
    assert {name: place.info for name, place in stored.items()} == {
        name: TensorInfo.of(tensor) for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        start = stored[name].start
        content = data[start : start + stored[name].info.num_bytes]
        assert list(content) == tensor.reshape(-1).view(torch.uint8).tolist(), name


def test_dtype_names_round_trip() -> None:
    assert [dtype_of(dtype_name(dtype)) for dtype in _DTYPES] == _DTYPES
    with pytest.raises(ValueError, match="got the dtype 'F31'; expected one of F64, F32"):
        dtype_of("F31")


def _entry(begin: int, end: int, *, dtype: str = "U8", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": _entry(0, 2), "b": _entry(1, 3)}, 3, "b starts at byte 1; expected 2, where the one before it ends"),
        ({"a": _entry(0, 2), "b": _entry(3, 4)}, 4, "b starts at byte 3; expected 2"),
        ({"a": _entry(0, 2)}, 3, "its tensors take 2 bytes, but the file has 3"),
        ({"a": _entry(0, 2)}, 1, "its tensors take 2 bytes, but the file has 1"),
        ({"a": _entry(0, 2, shape=[-2])}, 2, r"got the shape \[-2\]; expected a list of sizes"),
        ({"a": _entry(0, 2, shape=[2.0])}, 2, r"got the shape \[2\.0\]"),
        ({"a": _entry(0, 2, shape=[True, 2])}, 2, r"got the shape \[True, 2\]"),
        ({"a": _entry(0, 2, shape=[1 << 62])}, 2, "expected a list of sizes"),
        ({"a": _entry(0, 2, shape=[1 << 40, 1 << 40])}, 2, r"a has data_offsets \[0, 2\], which do not fit"),
        ({"a": _entry(0, 2, shape="2")}, 2, "got the shape '2'"),
        ({"a": _entry(0, 2, dtype="Q8")}, 2, "got the dtype 'Q8'"),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1, 2]}}, 2, "data_offsets"),
        ({"a": {"dtype": "U8", "shape": [2]}}, 2, "a must have dtype, shape and data_offsets"),
        ({"a": 3}, 2, "a must have dtype, shape and data_offsets"),
        ([], 0, "it is no JSON object"),
    ],
)
def test_unsound_headers_are_refused(tmp_path: Path, header: Any, data: int, message: str) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "file.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    with pytest.raises(UserError, match=f"has a broken header: .*{message}"):
        read_header(path)


def test_a_repeated_name_is_refused(tmp_path: Path) -> None:
    text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    path = tmp_path / "file.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"0")
    with pytest.raises(UserError, match="JSON repeats the key 'a'"):
        read_header(path)


@pytest.mark.parametrize(
    "content", [b"", b"1234567", struct.pack("<Q", 3), struct.pack("<Q", 1 << 63), struct.pack("<Q", 1) + b"{"]
)
def test_what_is_no_file_of_the_format_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"is no safetensors file: \d+ bytes with a header of \d+"):
        read_header(path)


def test_a_huge_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100 << 20))
        file.truncate(101 << 20)
    with pytest.raises(UserError, match="expected a header of 2 to 33554432 bytes"):
        read_header(path)
