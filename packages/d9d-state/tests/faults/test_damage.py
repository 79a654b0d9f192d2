"""Any change of a checkpoint's bytes is detected before a tensor is changed."""

import logging
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import torch
from forked_ranks import run_forked
from torch import Tensor

from d9d_dist import DistributedContext
from d9d_state import CheckpointStore, StateError

_UNSET = -7.0
_STEP = 5


def _save(folder: Path, step: int, ctx: DistributedContext, *, run_id: str, more: float = 0.0) -> None:
    value = step + more
    own = {f"model.of_rank_{ctx.rank}": torch.arange(6.0) + value, "model.shared": torch.full((2, 2), value)}
    store = CheckpointStore(folder, run_id=run_id)
    store.save(step, own, state={"step": step}, rank_state={"rank": ctx.rank, "step": step}, ctx=ctx)


@pytest.fixture(scope="module")
def folders() -> Generator[Path]:
    """Checkpoint of two ranks to damage, in `own`, and similar checkpoints beside it."""
    memory = Path("/dev/shm")  # noqa: S108 - tmpfs, if available
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        root = Path(name)

        def work(ctx: DistributedContext) -> None:
            _save(root / "own", _STEP, ctx, run_id="a")
            _save(root / "other-step", _STEP + 1, ctx, run_id="a")
            _save(root / "other-run", _STEP, ctx, run_id="b", more=100)

        assert run_forked(work, root / "ranks", world_size=2, faults={}) == [0, 0]
        yield root


@pytest.fixture(autouse=True)
def _quiet() -> Generator[None]:
    logger = logging.getLogger("d9d.state")
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(logging.NOTSET)


def _targets() -> dict[str, Tensor]:
    names = {"model.of_rank_0": (6,), "model.of_rank_1": (6,), "model.shared": (2, 2)}
    return {name: torch.full(shape, _UNSET) for name, shape in names.items()}


def _is_noticed(store: CheckpointStore, targets: dict[str, Tensor]) -> bool:
    """Return True if loading is refused and `targets` stay unchanged."""
    info = store.newest()
    if info is not None:
        try:
            store.load(info, targets)
        except StateError:
            pass
        else:
            return False
    return all(bool((target == _UNSET).all()) for target in targets.values())


def _step_folder(root: Path) -> Path:
    (folder,) = root.glob("step-????????")
    return folder


def _random_damage(data: bytes, choice: random.Random) -> bytes:
    """Return random bytes different from the given ones."""
    at, size = choice.randrange(len(data)), choice.choice([1, 4, 64])
    match choice.randrange(8):
        case 0:
            return data[:at]
        case 1:
            return data + choice.randbytes(size)
        case 2:
            return data[:at] + choice.randbytes(size) + data[at:]
        case 3:
            return data[:at] + data[at + size :]
        case 4:
            return data[:at] + bytes(size) + data[at + size :] + b"\0" * (data[at : at + size] == bytes(size))
        case _:
            return _flipped(data, at, choice.randrange(8))


def _flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


def _bits_that_count(folder: Path, choice: random.Random) -> Iterator[tuple[Path, int, int]]:
    """Iterate over bit flips in each byte of the manifest and of each header."""
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        end = 8 + struct.unpack("<Q", data[:8])[0] if path.suffix == ".safetensors" else len(data)
        yield from ((path, at, choice.randrange(8)) for at in range(end))


def test_undamaged_checkpoint_verifies(folders: Path) -> None:
    targets = _targets()
    assert not _is_noticed(CheckpointStore(folders / "own"), targets)
    assert torch.equal(targets["model.of_rank_1"], torch.arange(6.0) + _STEP)


def test_a_flipped_bit_anywhere_in_manifest_states_and_headers(folders: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(folders / "own", folders / tmp_path.name))
    store, targets = CheckpointStore(own), _targets()
    for path, at, bit in _bits_that_count(_step_folder(own), random.Random(0)):  # noqa: S311 - no secret
        data = path.read_bytes()
        path.write_bytes(_flipped(data, at, bit))
        assert _is_noticed(store, targets), f"{path.name}: bit {bit} of byte {at}"
        path.write_bytes(data)
    assert not _is_noticed(store, targets)


@pytest.mark.slow
def test_random_damage_of_any_file_is_detected(folders: Path, tmp_path: Path, exhaustive: bool) -> None:
    own = Path(shutil.copytree(folders / "own", folders / tmp_path.name))
    store, targets = CheckpointStore(own), _targets()
    contents = {path: path.read_bytes() for path in sorted(_step_folder(own).iterdir())}
    seed = random.randrange(1 << 32)  # noqa: S311 - no secret
    choice = random.Random(seed)  # noqa: S311
    for number in range(100_000 if exhaustive else 2000):
        path = choice.choice(list(contents))
        damaged = _random_damage(contents[path], choice)
        if damaged == contents[path]:
            continue
        path.write_bytes(damaged)
        assert _is_noticed(store, targets), f"{path.name}: number {number} of seed {seed}"
        path.write_bytes(contents[path])
    assert not _is_noticed(store, targets)


def _replace_file(name: str, other: str) -> Callable[[Path, Path], None]:
    def substitute(own: Path, folders: Path) -> None:
        shutil.copy(_step_folder(folders / other) / name, _step_folder(own) / name)

    return substitute


def _manifest_of_another_step(own: Path, folders: Path) -> None:
    _replace_file("manifest.json", "other-step")(own, folders)


def _all_files_but(name: str) -> Callable[[Path, Path], None]:
    def substitute(own: Path, folders: Path) -> None:
        for path in _step_folder(folders / "other-run").iterdir():
            if path.name != name:
                shutil.copy(path, _step_folder(own) / path.name)

    return substitute


def _another_rank(kind: str, suffix: str) -> Callable[[Path, Path], None]:
    def substitute(own: Path, _folders: Path) -> None:
        paths = [_step_folder(own) / f"{kind}-0000{rank}.{suffix}" for rank in (0, 1)]
        one, other = (path.read_bytes() for path in paths)
        paths[0].write_bytes(other)
        paths[1].write_bytes(one)

    return substitute


def _swapped_halves(own: Path, _folders: Path) -> None:
    path = _step_folder(own) / "tensors-00000.safetensors"
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    path.write_bytes(data[:end] + data[end + 12 : end + 24] + data[end : end + 12] + data[end + 24 :])


def _whole_folder_of_another_step(own: Path, folders: Path) -> None:
    shutil.rmtree(_step_folder(own))
    shutil.copytree(_step_folder(folders / "other-step"), own / f"step-{_STEP:08d}")


_SUBSTITUTIONS = {
    "tensors of another step": _replace_file("tensors-00001.safetensors", "other-step"),
    "state of another step": _replace_file("state.json", "other-step"),
    "state of a rank of another step": _replace_file("rank-00000.json", "other-step"),
    "the manifest of another step": _manifest_of_another_step,
    "all but the manifest of another run": _all_files_but("manifest.json"),
    "all but the tensors of another run": _all_files_but("tensors-00000.safetensors"),
    "tensors of another rank": _another_rank("tensors", "safetensors"),
    "state of another rank": _another_rank("rank", "json"),
    "two halves of a tensor": _swapped_halves,
    "a folder of another step": _whole_folder_of_another_step,
}


@pytest.mark.parametrize("name", _SUBSTITUTIONS)
def test_swapped_files_are_detected(folders: Path, tmp_path: Path, name: str) -> None:
    own = Path(shutil.copytree(folders / "own", tmp_path / "own"))
    _SUBSTITUTIONS[name](own, folders)
    assert _is_noticed(CheckpointStore(own), _targets())


def test_the_message_names_file_and_tensor(folders: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(folders / "own", tmp_path / "own"))
    path = _step_folder(own) / "tensors-00001.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (info,) = CheckpointStore(own).complete()
    with pytest.raises(StateError, match=r"tensors-00001\.safetensors: .*model\.(of_rank_1|shared)"):
        info.verify()
