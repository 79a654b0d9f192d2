import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
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
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
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
    four_bits = torch.arange(24, dtype=torch.uint8).view(4, 6).view(torch.float4_e2m1fn_x2)
    return {**tensors, "scalar": torch.tensor(1.5), "empty": torch.empty(0, 3), "four bits": four_bits}


def test_headers_written_by_safetensors_are_parsed(tmp_path: Path) -> None:
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
        assert list(content) == tensor.view(torch.uint8).reshape(-1).tolist() if tensor.ndim else True, name


def test_dtype_names_round_trip() -> None:
    assert [dtype_of(dtype_name(dtype)) for dtype in _DTYPES] == _DTYPES
    with pytest.raises(ValueError, match="got the dtype 'F31'; expected one of F64, F32"):
        dtype_of("F31")


def _entry(begin: int, end: int, *, dtype: str = "U8", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


_A = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


def _write(path: Path, header: bytes, num_data_bytes: int) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(num_data_bytes))
    return path


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": _entry(0, 2), "b": _entry(1, 3)}, 3, "invalid offset for tensor `b`"),
        ({"a": _entry(0, 2), "b": _entry(3, 4)}, 4, "invalid offset for tensor `b`"),
        ({"a": _entry(0, 2)}, 3, "file not fully covered"),
        ({"a": _entry(0, 2)}, 1, "file not fully covered"),
        ({"a": _entry(0, 5), "b": _entry(3, 3)}, 5, "invalid offset for tensor `b`"),
        ({"a": _entry(0, 2, shape=[1 << 40, 1 << 40])}, 2, "overflow computing buffer size"),
        ({"a": _entry(0, 0, shape=[1 << 40, 0, 1 << 40])}, 0, "whose size overflows int64"),
        ({"a": _entry(0, 2, shape=[3])}, 2, "invalid shape, data type, or offset for tensor"),
        ({"a": _entry(0, 2, dtype="Q8")}, 2, "unknown variant `Q8`"),
        ({"a": _entry(0, 1, dtype="F4", shape=[1])}, 1, "does not end up at a byte boundary"),
        ({"a": _entry(0, 1, dtype="F4", shape=[2, 1])}, 1, r"shape \[2, 1\]; expected an even last dim for dtype F4"),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1, 2]}}, 2, "expected 2 elements in sequence"),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": "U8"}}, 2, "expected a tuple of size 2"),
        ({"a": {"dtype": "U8", "shape": [2]}}, 2, r"after byte 1 it has .*; expected a tensor like \"name\""),
        ({"a": _entry(0, 2, shape=[-2])}, 2, "after byte 1 it has"),
        ({"a": _entry(0, 2), "__metadata__": {"format": 1}}, 2, "after byte .* it has"),
        ({"a": _entry(0, 2), "__metadata__": []}, 2, "after byte .* it has"),
        ([], 0, "it is not a JSON object"),
        (b"{%s,%s}" % (_A, _A), 1, "its names are not unique: it has 2 tensors with 1 names"),
        (b'{%s,"\\u0061":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}' % _A, 1, "invalid offset for tensor `a`"),
        (b'{"__metadata__":{},"__metadata__":{},%s}' % _A, 1, "duplicate field `__metadata__`"),
        (b"{%s}" % _A.replace(b"a", b"__metadata__", 1), 1, "invalid type"),
        (b"{%s}" % _A.replace(b"a", b"\\u005f_metadata__", 1), 1, "invalid type"),
        (b"{%s} x" % _A, 1, "trailing characters"),
        (b"{%s" % _A, 1, "after byte 1 it has"),
        (b"{%s,}" % _A, 1, "after byte 53 it has"),
        (b"{%s}" % _A.replace(b"a", b"\\ud800", 1), 1, "unexpected end of hex escape"),
        (b"{%s}" % _A.replace(b"a", b"\xff", 1), 1, "invalid UTF-8 in header"),
        (b"{%s}" % _A.replace(b"a", b"\\u00", 1), 1, "invalid escape"),
        (b"{%s}" % _A.replace(b"[1]", b"[01]"), 1, "invalid number"),
        (b"{%s}" % _A.replace(b"[1]", b"[1,]"), 1, "after byte 1 it has"),
        (b"{%s}" % _A.replace(b"[1]", b"[1" + b",1" * 64 + b"]"), 1, "after byte 1 it has"),
        (b"{%s}" % _A.replace(b"[1]", b"[" + b"1" * 20 + b"]"), 1, "overflow computing buffer size"),
        (b"{%s}" % _A.replace(b'"shape"', b'"dtype"'), 1, "duplicate field `dtype`|invalid type"),
    ],
)
def test_malformed_headers_are_refused(tmp_path: Path, header: Any, data: int, message: str) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = _write(tmp_path / "file.safetensors", text, data)
    with pytest.raises(UserError, match=f"has a malformed header: .*({message})"):
        read_header(path)


_SPACES = st.text(" \t\n\r", max_size=2).map(str.encode)
_NAMES = st.text(max_size=5) | st.just("__metadata")


@st.composite
def _headers(draw: st.DrawFn) -> tuple[bytes, int]:
    """Return a valid header with random spaces and key orders, and the number of data bytes."""
    parts: list[bytes] = []
    end = 0
    dtypes = {"F32": 4, "BF16": 2, "I64": 8, "BOOL": 1, "F8_E5M2": 1}
    for name in draw(st.lists(_NAMES, unique=True, max_size=4)):
        dtype = draw(st.sampled_from(list(dtypes)))
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        begin, end = end, end + math.prod(shape) * dtypes[dtype]
        fields = draw(st.permutations([("dtype", dtype), ("shape", shape), ("data_offsets", [begin, end])]))
        key = json.dumps(name, ensure_ascii=draw(st.booleans())).encode()
        parts.append(draw(_SPACES) + key + draw(_SPACES) + b":" + _spaced(draw, json.dumps(dict(fields)).encode()))
    if draw(st.booleans()):
        metadata = json.dumps({"__metadata__": draw(st.dictionaries(_NAMES, _NAMES, max_size=2))}).encode()
        parts.insert(draw(st.integers(0, len(parts))), metadata[1:-1])
    return b"{" + draw(_SPACES) + b",".join(parts) + draw(_SPACES) + b"}" + draw(_SPACES), end


def _spaced(draw: st.DrawFn, text: bytes) -> bytes:
    space = draw(_SPACES)
    return text.replace(b"[", space + b"[" + space).replace(b",", space + b",").replace(b"}", space + b"}" + space)


@given(_headers())
def test_valid_headers_are_accepted(tmp_path_factory: pytest.TempPathFactory, sound: tuple[bytes, int]) -> None:
    header, size = sound
    path = _write(tmp_path_factory.getbasetemp() / "valid.safetensors", header, size)
    expected = {name: (each["dtype"], each["shape"]) for name, each in safetensors.deserialize(path.read_bytes())}
    stored = read_header(path)
    assert {name: (dtype_name(each.info.dtype), list(each.info.shape)) for name, each in stored.items()} == expected
    for name, place in stored.items():
        begin, end = json.loads(header)[name]["data_offsets"]
        assert (place.start, place.info.num_bytes) == (8 + len(header) + begin, end - begin), name


@given(_headers(), st.data())
def test_mutated_headers_are_read_as_the_library_does_or_refused(
    tmp_path_factory: pytest.TempPathFactory, sound: tuple[bytes, int], data: st.DataObject
) -> None:
    header, size = sound
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(header)))
        removed = data.draw(st.integers(0, 2))
        header = (
            header[:at]
            + data.draw(st.sampled_from([b"", b"0", b"1", b",", b'"', b"}", b"-", b"\\", b"\xff"]))
            + (header[at + removed :])
        )
    path = _write(tmp_path_factory.getbasetemp() / "mutated.safetensors", header, size)
    try:
        stored = read_header(path)
    except UserError:
        return
    expected = {name: (each["dtype"], each["shape"]) for name, each in safetensors.deserialize(path.read_bytes())}
    assert {name: (dtype_name(each.info.dtype), list(each.info.shape)) for name, each in stored.items()} == expected


@pytest.mark.parametrize(
    "content", [b"", b"1234567", struct.pack("<Q", 3), struct.pack("<Q", 1 << 63), struct.pack("<Q", 1) + b"{"]
)
def test_files_of_other_formats_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"is not a safetensors file: got \d+ bytes with a header of \d+"):
        read_header(path)


def test_a_huge_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100 << 20))
        file.truncate(101 << 20)
    with pytest.raises(UserError, match="expected a header of 2 to 33554432 bytes"):
        read_header(path)
