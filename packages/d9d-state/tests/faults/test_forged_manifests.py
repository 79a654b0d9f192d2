"""Forged manifests with a valid digest: everything in them that can be checked is checked."""

import copy
import hashlib
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import begin, tensors

from d9d_dist import UserError
from d9d_state import CheckpointStore, StateError
from d9d_state.json_value import dump_json, parse_json

_HOSTILE = [
    -1,
    0,
    1,
    1 << 62,
    1 << 80,
    1.5,
    True,
    None,
    "",
    ".",
    "../step-00000001/state.json",
    "/etc/hostname",
    "a\0b",
    "state.json",
    "x" * 10_000,
    [],
    {},
    [1] * 1000,
    [[[]]],
    {"a": {}},
]
_HARMLESS = ("run_id", "mesh", "metric")  # these values cannot be checked


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Iterate over the paths of all parts of a JSON value."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*path, key)
        yield from _places(value[key], (*path, key))


def _forged(body: dict[str, Any], choice: random.Random) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Return the manifest with one part replaced, removed, renamed or duplicated, and the changed part."""
    forged = copy.deepcopy(body)
    path = choice.choice(list(_places(forged)))
    around: Any = forged
    for key in path[:-1]:
        around = around[key]
    match choice.randrange(4):
        case 0:
            del around[path[-1]]
        case 1 if isinstance(around, dict):
            around[choice.choice(["x", "../x", "state.json"])] = around.pop(path[-1])
        case 2 if isinstance(around, list):
            around.append(copy.deepcopy(around[path[-1]]))
        case _:
            around[path[-1]] = copy.deepcopy(choice.choice(_HOSTILE))
    return forged, path


def _text(body: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(dump_json(body)).hexdigest()
    return dump_json({**body, "sha256": digest}) + b"\n"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("d9d.state")
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(logging.NOTSET)


def test_forged_manifest_is_refused_or_consistent(tmp_path: Path, exhaustive: bool) -> None:
    begin(tmp_path, 1)
    path = tmp_path / "step-00000001" / "manifest.json"
    body = parse_json(path.read_bytes())
    assert isinstance(body, dict)
    body = {key: value for key, value in body.items() if key != "sha256"}
    assert _text(body) == path.read_bytes()
    seed = random.randrange(1 << 32)  # noqa: S311 - no secret
    choice = random.Random(seed)  # noqa: S311
    store, believed = CheckpointStore(tmp_path), 0
    for number in range(20_000 if exhaustive else 500):
        forged, place = _forged(body, choice)
        path.write_bytes(_text(forged))
        try:
            info = store.newest()
        except UserError:  # another version
            assert place[0] in ("version", "digests"), f"{place}: number {number} of seed {seed}"
            continue
        if info is None:
            continue
        loaded = {name: torch.full_like(tensor, -7) for name, tensor in tensors(1).items()}
        try:
            store.load(info, loaded)
        except StateError:
            continue
        believed += 1
        assert all(torch.equal(tensor, loaded[name]) for name, tensor in tensors(1).items()), f"{place} of seed {seed}"
        assert place[0] in _HARMLESS or forged == body, f"{place}: number {number} of seed {seed}"
    assert believed > 0
