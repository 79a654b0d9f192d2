"""Parser for the JSON of a safetensors header, one tensor at a time.

A general JSON parser may allocate ten times the size of a hostile header before the result can be checked. This parser
accepts only the JSON structure of a safetensors header, and stops at the first byte that does not match.
"""

import json
import re
from collections.abc import Iterator

from d9d_state.json_value import shortened

_SPACE = rb"[ \t\n\r]{0,1000}+"
_PLAIN, _ESCAPE = rb'[^"\\\x00-\x1f]', rb'\\["\\/bfnrtu]'
# The length of names is bounded, because names are kept in memory and shown in messages.
_NAME = rb'"(%(p)b{0,10000}+(?:%(e)b%(p)b{0,10000}+){0,10000}+)"' % {b"p": _PLAIN, b"e": _ESCAPE}
_VALUE = rb'"(%(p)b*+(?:%(e)b%(p)b*+){0,1000000}+)"' % {b"p": _PLAIN, b"e": _ESCAPE}
_SIZE = rb"(?:0|[1-9][0-9]{0,18})"
_SIZES = rb"\[%(s)b((?:%(n)b(?:%(s)b,%(s)b%(n)b){0,63}+)?+)%(s)b\]" % {b"s": _SPACE, b"n": _SIZE}
_FIELD = rb'"(dtype|shape|data_offsets)"%(s)b:%(s)b(?:"([A-Z0-9_]{1,20})"|%(z)b)' % {b"s": _SPACE, b"z": _SIZES}
_TENSOR = re.compile(
    rb"%(s)b%(t)b%(s)b:%(s)b\{%(s)b%(f)b%(s)b,%(s)b%(f)b%(s)b,%(s)b%(f)b%(s)b\}%(s)b([,}])"
    % {b"s": _SPACE, b"t": _NAME, b"f": _FIELD}
)
_METADATA = re.compile(rb'%(s)b"__metadata__"%(s)b:%(s)b\{%(s)b(?:\}%(s)b([,}]))?+' % {b"s": _SPACE})
_TEXT = re.compile(rb"%(s)b%(t)b%(s)b:%(s)b%(v)b%(s)b(?:,|\}%(s)b([,}]))" % {b"s": _SPACE, b"t": _NAME, b"v": _VALUE})
_EMPTY = re.compile(rb"\{[ \t\n\r]{0,1000}+\}[ \t\n\r]*+")
_REST = re.compile(rb"[ \t\n\r]*+")


def header_entries(header: bytes) -> Iterator[tuple[str, bytes, bytes, bytes]]:
    """Iterate over the tensors of a header.

    Args:
        header: JSON text, without the 8-byte length.

    Yields:
        Name, and the texts of dtype, shape and data_offsets. `integers` parses shape and data_offsets.

    Raises:
        ValueError: At the first byte that is invalid in a header, after the entries before it were yielded.
    """
    if _EMPTY.fullmatch(header) is not None:
        return
    if not header.startswith(b"{"):
        raise ValueError("it is not a JSON object.")
    position, more, has_metadata = 1, True, False
    while more:
        match = _TENSOR.match(header, position)
        if match is not None:
            yield _tensor(match)
        elif _METADATA.match(header, position) is not None and not has_metadata:
            match, has_metadata = _after_metadata(header, position), True
        else:
            raise ValueError(
                f"after byte {position} it has {header[position : position + 80]!r}; "
                'expected a tensor like "name": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}.'
            )
        position, more = match.end(), match[match.lastindex or 0] == b","
    if _REST.fullmatch(header, position) is None:
        raise ValueError(f"after its end at byte {position} it has {header[position : position + 80]!r}.")


def _after_metadata(header: bytes, position: int) -> re.Match[bytes]:
    """Skip `__metadata__`, a JSON object of strings; return the match whose last group is the delimiter after it."""
    match = _METADATA.match(header, position)
    names: set[str] = set()
    while match is not None and match.lastindex != match.re.groups:
        match = _TEXT.match(header, match.end())
        if match is not None:
            name = _text(match[1])
            if name in names:
                raise ValueError(f"__metadata__ repeats the name {shortened(name)}.")
            names.add(name)
            _text(match[2])
    if match is None:
        raise ValueError("__metadata__ must be a JSON object of strings.")
    return match


def _tensor(match: re.Match[bytes]) -> tuple[str, bytes, bytes, bytes]:
    raw, key1, text1, sizes1, key2, text2, sizes2, key3, text3, sizes3, _end = match.groups()
    fields = {key1: (text1, sizes1), key2: (text2, sizes2), key3: (text3, sizes3)}
    dtype = fields.get(b"dtype", (None, None))[0]
    shape = fields.get(b"shape", (None, None))[1]
    offsets = fields.get(b"data_offsets", (None, None))[1]
    name = _text(raw)
    if name == "__metadata__":
        raise ValueError("__metadata__ must be a JSON object of strings.")
    if dtype is None or shape is None or offsets is None:
        raise ValueError(f"{shortened(name)} must have dtype, shape and data_offsets.")
    return name, dtype, shape, offsets


def integers(text: bytes) -> tuple[int, ...]:
    """Parse comma-separated integers, the text of a JSON list without its brackets."""
    return tuple(map(int, text.split(b","))) if text else ()


def _text(text: bytes) -> str:
    """Decode a JSON string without its quotes.

    Raises:
        ValueError: If the string is not valid UTF-8 or contains an unpaired surrogate escape.
    """
    value = text.decode()
    if "\\" in value:
        value = json.loads(f'"{value}"')
        if not isinstance(value, str) or any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError("a name contains an unpaired surrogate.")
    return value
