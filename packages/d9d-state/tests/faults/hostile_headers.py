"""Hostile safetensors files, as an attacker would write them: small, but expensive to parse naively."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

_MEGABYTE = 1 << 20
_LONGEST = 32 * _MEGABYTE  # the maximum header length


@final
@dataclass(frozen=True, slots=True)
class HostileFile:
    """Header and size of a file, and the error that reading it must raise.

    Attributes:
        header: Returns the header, without the length field.
        num_data_bytes: Number of bytes after the header, written as a hole.
        message: Fragment of the expected error message.
    """

    header: Callable[[], bytes]
    num_data_bytes: int
    message: str

    def write(self, path: Path) -> int:
        """Write the file; return the length of its header."""
        header = self.header()
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + self.num_data_bytes)
        return len(header)


def _tensor(name: str, begin: int, end: int, *, shape: object = None, dtype: str = "U8") -> str:
    shape = [end - begin] if shape is None else shape
    return f'"{name}":' + json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]})


def _header(*entries: str) -> Callable[[], bytes]:
    return ("{" + ",".join(entries) + "}").encode


def _padded(part: bytes, *, head: bytes = b"", tail: bytes = b"", size: int = _LONGEST) -> Callable[[], bytes]:
    """Return `head`, as many copies of `part` as fit, and `tail`."""
    return lambda: head + part * ((size - len(head) - len(tail)) // len(part)) + tail


_SOUND = _tensor("a", 0, 1)
_OPEN = b'{"a":'

HOSTILE: dict[str, HostileFile] = {
    "100 MB of JSON": HostileFile(
        _padded(b" ", head=b"{", size=100 * _MEGABYTE), 0, "expected a header of 2 to 33554432"
    ),
    "32 MB of spaces": HostileFile(_padded(b" ", head=b"{"), 0, "after byte 1 it has"),
    "32 MB of spaces, and a tensor": HostileFile(
        _padded(b" ", head=b"{" + _SOUND.encode() + b"}", tail=b"x"), 1, "invalid JSON in header: trailing characters"
    ),
    "32 MB of brackets": HostileFile(_padded(b"["), 0, "it is not a JSON object"),
    "32 MB of objects in objects": HostileFile(_padded(_OPEN), 0, "after byte 1 it has"),
    "32 MB of empty lists": HostileFile(_padded(b"[],", head=_OPEN + b"[", tail=b"[]]}"), 0, "after byte 1 it has"),
    "32 MB of empty objects": HostileFile(_padded(b"{},", head=_OPEN + b"[", tail=b"{}]}"), 0, "after byte 1 it has"),
    "32 MB of one name": HostileFile(_padded(b"a", head=b'{"', tail=b'":1}'), 0, "after byte 1 it has"),
    "32 MB of a name without an end": HostileFile(_padded(b"a", head=b'{"'), 0, "after byte 1 it has"),
    "32 MB of escapes without an end": HostileFile(_padded(b"\\n", head=b'{"'), 0, "after byte 1 it has"),
    "32 MB of one digit": HostileFile(
        _padded(b"9", head=b'{"a":{"dtype":"U8","shape":[', tail=b'],"data_offsets":[0,1]}}'), 1, "after byte 1 it has"
    ),
    "32 MB of dims": HostileFile(
        _padded(b"1,", head=b'{"a":{"dtype":"U8","shape":[', tail=b'1],"data_offsets":[0,1]}}'),
        1,
        "after byte 1 it has",
    ),
    "32 MB of metadata without an end": HostileFile(
        _padded(b"\\n", head=b'{"__metadata__":{"a":"'), 0, "after byte 1 it has"
    ),
    "a name of 20,000 bytes": HostileFile(
        _header(_tensor("a" * 20_000, 0, 1)), 1, "it has a name of 20000 characters; expected at most 10000"
    ),
    "32 MB of metadata that is none": HostileFile(
        _padded(b"[],", head=b'{"__metadata__":[', tail=b"[]]}"), 0, "after byte 1 it has"
    ),
    "a long name that repeats": HostileFile(
        _header(_tensor("a" * 10_000, 0, 1), _tensor("a" * 10_000, 1, 2)),
        2,
        "invalid offset for tensor `a{200}",
    ),
    "a header longer than the file": HostileFile(_header(), -1, "not a safetensors file"),
    "nothing at all": HostileFile(lambda: b"", 0, "not a safetensors file"),
    "one tensor of 1 TB in a file without data": HostileFile(
        _header(_tensor("a", 0, 1 << 40)), 0, "incomplete metadata, file not fully covered"
    ),
    "a hole of 1 TB": HostileFile(
        _header(_tensor("a", 0, 1), _tensor("b", 1 << 40, (1 << 40) + 1)),
        (1 << 40) + 1,
        "invalid offset for tensor `b`",
    ),
    "a tail of 1 TB": HostileFile(_header(_SOUND), 1 << 40, "incomplete metadata, file not fully covered"),
    "an overlap": HostileFile(_header(_tensor("a", 0, 4), _tensor("b", 2, 6)), 6, "invalid offset for tensor `b`"),
    "twice the same bytes": HostileFile(
        _header(_tensor("a", 0, 4), _tensor("b", 0, 4)), 4, "invalid offset for tensor `[ab]`"
    ),
    "sizes that overflow 64 bits": HostileFile(
        _header(_tensor("a", 0, 0, shape=[1 << 32, 1 << 32])), 0, "overflow computing buffer size"
    ),
    "sizes that overflow before a zero": HostileFile(
        _header(_tensor("a", 0, 0, shape=[1 << 62, 1 << 62, 0])), 0, "overflow computing buffer size"
    ),
    "a size beyond 64 bits": HostileFile(_header(_tensor("a", 0, 0, shape=[1 << 64, 0])), 0, "expected usize"),
    "a size of 10,000 digits": HostileFile(
        lambda: b'{"a":{"dtype":"U8","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,1]}}', 1, "after byte 1 it has"
    ),
    "1000 dims": HostileFile(_header(_tensor("a", 0, 1, shape=[1] * 1000)), 1, "after byte 1 it has"),
    "NaN": HostileFile(_header(_tensor("a", 0, 1, shape=[float("nan")])), 1, "after byte 1 it has"),
    "Infinity": HostileFile(_header(_tensor("a", 0, 1, shape=[float("inf")])), 1, "after byte 1 it has"),
    "a fraction": HostileFile(_header(_tensor("a", 0, 1, shape=[1.0])), 1, "after byte 1 it has"),
    "an exponent": HostileFile(
        lambda: b'{"a":{"dtype":"U8","shape":[1e0],"data_offsets":[0,1]}}', 1, "after byte 1 it has"
    ),
    "a byte order mark": HostileFile(lambda: b"\xef\xbb\xbf" + _header(_SOUND)(), 1, "it is not a JSON object"),
    "UTF-16": HostileFile(lambda: _header(_SOUND)().decode().encode("utf-16-le"), 1, "after byte 1 it has"),
    "a second document": HostileFile(lambda: _header(_SOUND)() * 2, 1, "trailing characters"),
    "a NUL at the end": HostileFile(lambda: _header(_SOUND)() + b"\0", 1, "trailing characters"),
    "a comment": HostileFile(lambda: b"{/**/" + _SOUND.encode() + b"}", 1, "after byte 1 it has"),
}
"""By what is wrong with each."""
