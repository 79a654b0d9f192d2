"""Hostile headers are refused, with little more memory than the header itself."""

import struct
import tracemalloc
from pathlib import Path

import pytest
from hostile_headers import HOSTILE

from d9d_dist import UserError
from d9d_state import ModelFolder
from d9d_state.safetensors_header import read_header


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.slow(
    "32 MB of a name without an end", "32 MB of dims", "32 MB of empty objects", "32 MB of one name", "32 MB of spaces"
)
def test_hostile_header_is_refused_with_little_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    length = HOSTILE[name].write(path)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=HOSTILE[name].message) as caught:
            read_header(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 1000
    assert peak < 2 * length + (1 << 20)


def test_wrong_header_lengths_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}'
    for length in [*range(len(header) + 10), 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1]:
        path.write_bytes(struct.pack("<Q", length) + header + bytes(8))
        if length == len(header):
            assert ModelFolder.open(tmp_path).tensors.keys() == {"a"}
        else:
            with pytest.raises(UserError, match=r"is not a safetensors file|has a malformed header"):
                ModelFolder.open(tmp_path)
