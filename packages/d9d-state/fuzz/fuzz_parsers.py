"""Coverage-guided fuzzing of all parsers of untrusted files; run manually or nightly, not by pytest.

    uv run --with atheris packages/d9d-state/fuzz/fuzz_parsers.py PARSER [LIBFUZZER OPTIONS] [CORPUS FOLDER]

PARSER is one of those below. Useful options: `-max_total_time=600`, `-max_len=4096`, `-rss_limit_mb=2048`. A parser may
refuse what it gets with the exceptions that it documents. Anything else that it raises is a finding, and so is a text
that it reads in another way than a peer.
"""

# ruff: noqa: S101 - an assertion that fails is a finding

import hashlib
import json
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris  # ty: ignore[import-not-found]  (no dependency of ours)

with atheris.instrument_imports(include=["d9d_state", "json"]):
    import safetensors

    from d9d_dist import UserError
    from d9d_state import ModelFolder, StateError, rng_state, set_rng_state
    from d9d_state.checkpoint.manifest import MANIFEST_NAME, Manifest
    from d9d_state.json_value import JsonValue, dump_json, parse_json
    from d9d_state.safetensors_header import dtype_name, read_header

_FOLDER = Path(tempfile.mkdtemp(prefix="d9d-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))  # noqa: S108


def fuzz_json(data: bytes) -> None:
    """Check that a parsed value round-trips through its canonical text."""
    try:
        value = parse_json(data)
        text = dump_json(value)
    except ValueError:
        return
    assert parse_json(text) == value


def fuzz_header(data: bytes) -> None:
    """Compare the header with what the safetensors library reads. The first two bytes give the data size."""
    size, header = int.from_bytes(data[:2]), data[2:]
    path = _FOLDER / "header.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
    try:
        ours = read_header(path)
    except UserError:
        return
    theirs = safetensors.deserialize(path.read_bytes())
    expected = {name: (each["dtype"], each["shape"]) for name, each in theirs if each["dtype"] != "F4"}
    four_bits = {name for name, each in theirs if each["dtype"] == "F4"}
    read = {name: each for name, each in ours.items() if name not in four_bits}
    assert ours.keys() == expected.keys() | four_bits
    assert {name: (dtype_name(each.info.dtype), list(each.info.shape)) for name, each in read.items()} == expected


def fuzz_index(data: bytes) -> None:
    """Parse an index beside one file with two tensors."""
    entry = b'"%s":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'
    header = b"{%s,%s}" % (entry % (b"a", 0, 1), entry % (b"b", 1, 2))
    (_FOLDER / "x").write_bytes(struct.pack("<Q", len(header)) + header + b"12")
    (_FOLDER / "model.safetensors.index.json").write_bytes(data)
    try:
        folder = ModelFolder.open(_FOLDER)
    except UserError:
        return
    assert folder.tensors.keys() <= {"a", "b"}
    assert set(folder.files.values()) <= {_FOLDER / "x"}


def fuzz_manifest(data: bytes) -> None:
    """Parse a manifest body with a valid digest added."""
    (_FOLDER / MANIFEST_NAME).write_bytes(_with_digest(data))
    try:
        manifest = Manifest.read(_FOLDER)
    except StateError:
        return
    assert Manifest.read(_FOLDER) == manifest


def fuzz_rng(data: bytes) -> None:
    """Check that a random state is set completely or refused."""
    try:
        value: JsonValue = parse_json(data)
    except ValueError:
        return
    before = rng_state()
    try:
        set_rng_state(value)
    except UserError:
        assert rng_state() == before, "a state that was refused is set in part"


def _with_digest(data: bytes) -> bytes:
    try:
        body = json.loads(data)
        assert isinstance(body, dict)
        body.pop("sha256", None)
        digest = hashlib.sha256(dump_json(body)).hexdigest()
        return dump_json({**body, "sha256": digest}) + b"\n"
    except (ValueError, AssertionError, RecursionError):
        return data


_PARSERS: dict[str, Callable[[bytes], None]] = {
    "json": fuzz_json,
    "header": fuzz_header,
    "index": fuzz_index,
    "manifest": fuzz_manifest,
    "rng": fuzz_rng,
}


def main() -> None:
    """Fuzz one parser until the time limit or the first finding."""
    if len(sys.argv) < 2 or sys.argv[1] not in _PARSERS:
        raise SystemExit(f"got {sys.argv[1:]}; expected one of {', '.join(_PARSERS)}.")
    parser = _PARSERS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, parser)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
