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
from d9d_state.safetensors_header import dtype_name, dtype_of, parse_header, read_header

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


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (
            {"a": _entry(0, 2), "b": _entry(1, 3)},
            3,
            "'b' starts at byte 1; expected 2, the end of the tensor before it",
        ),
        ({"a": _entry(0, 2), "b": _entry(3, 4)}, 4, "'b' starts at byte 3; expected 2"),
        ({"a": _entry(0, 2)}, 3, "its tensors take 2 bytes; the file has 3 data bytes"),
        ({"a": _entry(0, 2)}, 1, "'a' ends at data byte 2; the file has 1 data bytes"),
        ({"a": _entry(0, 5), "b": _entry(3, 3)}, 5, "'b' starts at byte 3; expected 5"),
        (
            {"a": _entry(0, 2, shape=[1 << 40, 1 << 40])},
            2,
            r"'a' has the shape \[.*\], whose size overflows int64",
        ),
        ({"a": _entry(0, 0, shape=[1 << 40, 0, 1 << 40])}, 0, "whose size overflows int64"),
        (
            {"a": _entry(0, 2, shape=[3])},
            2,
            r"'a' has data_offsets \[0, 2\], which do not match the size of \[3\] uint8",
        ),
        ({"a": _entry(0, 2, dtype="Q8")}, 2, "got the dtype 'Q8'; expected one of F64"),
        ({"a": _entry(0, 1, dtype="F4", shape=[1])}, 1, r"shape \[1\]; expected an even last dim for dtype F4"),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1, 2]}}, 2, r"data_offsets \[0, 1, 2\], which do not"),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": "U8"}}, 2, "'a' must have dtype, shape and data_offsets"),
        ({"a": {"dtype": "U8", "shape": [2]}}, 2, r"after byte 1 it has .*; expected a tensor like \"name\""),
        ({"a": _entry(0, 2, shape=[-2])}, 2, "after byte 1 it has"),
        ({"a": _entry(0, 2), "__metadata__": {"format": 1}}, 2, "__metadata__ must be a JSON object of strings"),
        ({"a": _entry(0, 2), "__metadata__": []}, 2, "after byte .* it has"),
        ([], 0, "it is not a JSON object"),
    ],
)
def test_malformed_headers_are_refused(tmp_path: Path, header: Any, data: int, message: str) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "file.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    with pytest.raises(UserError, match=f"has a malformed header: .*{message}"):
        read_header(path)


_A = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{%s,%s}" % (_A, _A), "it repeats the name 'a'"),
        (b'{%s,"\\u0061":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}' % _A, "it repeats the name 'a'"),
        (b'{"__metadata__":{"x":"1","x":"2"},%s}' % _A, "__metadata__ repeats the name 'x'"),
        (b'{"__metadata__":{},"__metadata__":{},%s}' % _A, "after byte 19 it has"),
        (b"{%s}" % _A.replace(b"a", b"__metadata__", 1), "__metadata__ must be a JSON object of strings"),
        (b"{%s}" % _A.replace(b"a", b"\\u005f_metadata__", 1), "__metadata__ must be a JSON object of strings"),
        (b"{%s} x" % _A, "after its end at byte 53 it has b' x'"),
        (b"{%s" % _A, "after byte 1 it has"),
        (b"{%s,}" % _A, "after byte 53 it has"),
        (_A.replace(b"a", b"\\ud800", 1).join([b"{", b"}"]), "a name contains an unpaired surrogate"),
        (_A.replace(b"a", b"\xff", 1).join([b"{", b"}"]), "codec can't decode"),
        (_A.replace(b"a", b"\\u00", 1).join([b"{", b"}"]), "Invalid .*uXXXX escape"),
        (_A.replace(b"[1]", b"[01]").join([b"{", b"}"]), "after byte 1 it has"),
        (_A.replace(b"[1]", b"[1,]").join([b"{", b"}"]), "after byte 1 it has"),
        (_A.replace(b"[1]", b"[1" + b",1" * 64 + b"]").join([b"{", b"}"]), "after byte 1 it has"),
        (_A.replace(b"[1]", b"[" + b"1" * 20 + b"]").join([b"{", b"}"]), "after byte 1 it has"),
        (_A.replace(b'"shape"', b'"dtype"').join([b"{", b"}"]), "'a' must have dtype, shape and data_offsets"),
    ],
)
def test_hand_made_malformed_headers_are_refused(text: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_header(text, num_data_bytes=1)


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


def _peer_reads(header: bytes, num_data_bytes: int) -> dict[str, tuple[str, list[int]]]:
    data = struct.pack("<Q", len(header)) + header + bytes(num_data_bytes)
    return {name: (each["dtype"], each["shape"]) for name, each in safetensors.deserialize(data)}


@given(_headers())
def test_valid_headers_parse_like_safetensors(sound: tuple[bytes, int]) -> None:
    header, size = sound
    ours = parse_header(header, num_data_bytes=size)
    theirs = _peer_reads(header, size)
    assert {name: (dtype_name(each.info.dtype), list(each.info.shape)) for name, each in ours.items()} == theirs


@given(_headers(), st.data())
def test_accepted_mutated_headers_parse_like_safetensors(sound: tuple[bytes, int], data: st.DataObject) -> None:
    header, size = sound
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(header)))
        removed = data.draw(st.integers(0, 2))
        header = (
            header[:at]
            + data.draw(st.sampled_from([b"", b"0", b"1", b",", b'"', b"}", b"-", b"\\", b"\xff"]))
            + (header[at + removed :])
        )
    try:
        ours = parse_header(header, num_data_bytes=size)
    except ValueError:
        return
    theirs = _peer_reads(header, size)
    assert {name: (dtype_name(each.info.dtype), list(each.info.shape)) for name, each in ours.items()} == theirs


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
