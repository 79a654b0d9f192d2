"""Benchmark of checkpoints: speed of a synchronous save and of verification, and blocking time of a background save.

    uv run python packages/d9d-state/benchmarks/checkpoint_save.py --folder /dev/shm/checkpoints

Prints JSON. Every figure is a ratio of alternating measurements, so other load on the machine affects all of them: a
save relative to writing and syncing the same bytes to one file, verification relative to reading the same files with
one thread, all without the page cache, and the blocking time of a background save relative to copying the same bytes
to allocated host memory. Reads of as many threads as verification has, without digests, show what the disk allows. The
first save of a store is measured in new stores, with and without `prepare`. The reference is torch's `async_save` with
its defaults. Hashing needs processor time: `digest_gb_per_s` bounds saves and verification on one CPU.
"""

import argparse
import ctypes
import json
import os
import random
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from d9d_state import CheckpointStore
from d9d_state._digests import PartRecord
from d9d_state.checkpoint._verify import FilePart, num_threads, parts_of, share_of

_BLOCK = 1 << 22


def make_tensors(megabytes: int, num_tensors: int) -> dict[str, torch.Tensor]:
    """Create tensors of equal size."""
    elements = megabytes * (1 << 20) // 4 // num_tensors
    return {f"model.{index}": torch.rand(elements) for index in range(num_tensors)}


def seconds(work: Callable[[], object]) -> float:
    """Return the duration of a call in seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ratio(numerators: list[float], denominators: list[float]) -> dict[str, Any]:
    """Return the median of the ratios of pairs, with a bootstrapped 95 % interval."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    draws = random.Random(0)  # noqa: S311
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "median": round(statistics.median(ratios), 3),
        "low": round(medians[50], 3),
        "high": round(medians[-50], 3),
        "pairs": len(ratios),
    }


def bytes_of(buffer: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return memoryview((ctypes.c_char * buffer.nbytes).from_address(buffer.data_ptr())).cast("B")


def write_raw(path: Path, buffer: torch.Tensor) -> None:
    """Baseline: write and fsync the same bytes to one file."""
    view = bytes_of(buffer)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for start in range(0, len(view), _BLOCK):
        os.write(descriptor, view[start : start + _BLOCK])
    os.fsync(descriptor)
    os.close(descriptor)


def read_raw(folder: Path) -> None:
    """Baseline: read every file of a folder."""
    block = memoryview(bytearray(_BLOCK))
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def read_raw_in_threads(parts: Sequence[FilePart], folder: Path, threads: int) -> None:
    """Read parts of files with several threads, a contiguous share each, without digests: bounds verification."""

    def read(share: Sequence[FilePart]) -> None:
        block = memoryview(bytearray(_BLOCK))
        for part in share:
            with (folder / part.file).open("rb", buffering=0) as file:
                file.seek(part.start)
                left = part.record.size
                while left:
                    left -= file.readinto(block[: min(left, _BLOCK)])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, [share_of(parts, rank=rank, num_ranks=threads) for rank in range(threads)]))


def drop_from_cache(folder: Path) -> None:
    """Remove the files of a folder from the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def hashing_speed(buffer: torch.Tensor) -> float:
    """Return the speed of the digests of one thread in GB/s."""
    view = bytes_of(buffer)
    return round(len(view) / 1e9 / seconds(lambda: PartRecord.of(view)), 2)


def copy(tensors: dict[str, torch.Tensor], buffer: torch.Tensor) -> None:
    """Baseline of the blocking time: copy every tensor to allocated memory."""
    position = 0
    for tensor in tensors.values():
        buffer[position : position + tensor.numel()].copy_(tensor)
        position += tensor.numel()


def synchronous(folder: Path, tensors: dict[str, torch.Tensor], buffer: torch.Tensor, pairs: int) -> dict[str, Any]:
    """Compare a save, including digests, with raw writes."""
    store = CheckpointStore(folder / "sync")
    store.save(0, tensors)
    raw, ours = [], []
    for pair in range(pairs):
        path = folder / f"raw-{pair}"
        runs = [(raw, lambda: write_raw(path, buffer)), (ours, lambda: store.save(pair + 1, tensors))]  # noqa: B023
        for figures, work in runs if pair % 2 else reversed(runs):
            figures.append(seconds(work))
        path.unlink()
        shutil.rmtree(store.folder / f"step-{pair + 1:08d}")
    return {"speed_against_raw": ratio(raw, ours), "raw_gb_per_s": round(buffer.nbytes / 1e9 / min(raw), 2)}


def verification(folder: Path, tensors: dict[str, torch.Tensor], pairs: int) -> dict[str, Any]:
    """Compare verification of all digests with plain reads of the same files, both without the page cache."""
    store = CheckpointStore(folder / "verified")
    store.save(0, tensors)
    (info,) = store.complete()
    parts, threads = parts_of(info.manifest), num_threads(None)
    raw, parallel, ours = [], [], []
    for pair in range(pairs):
        runs = [
            (raw, lambda: read_raw(info.folder)),
            (parallel, lambda: read_raw_in_threads(parts, info.folder, threads)),
            (ours, info.verify),
        ]
        for figures, work in runs if pair % 2 else reversed(runs):
            drop_from_cache(info.folder)
            figures.append(seconds(work))
    num_bytes = sum(path.stat().st_size for path in info.folder.iterdir())
    return {
        "speed_against_raw": ratio(raw, ours),
        "threads": threads,
        "speed_of_threads_without_digests": ratio(raw, parallel),
        "raw_gb_per_s": round(num_bytes / 1e9 / min(raw), 2),
    }


def blocking(folder: Path, tensors: dict[str, torch.Tensor], buffer: torch.Tensor, pairs: int) -> dict[str, Any]:
    """Measure the blocking time of background saves: the first save of a store, and later ones."""
    found: dict[str, Any] = {}
    store = CheckpointStore(folder / "later", keep_last=1)
    store.save(0, tensors, background=True)
    memcpy, ours = [], []
    for pair in range(pairs):
        store.wait()
        memcpy.append(seconds(lambda: copy(tensors, buffer)))
        ours.append(seconds(lambda: store.save(pair + 1, tensors, background=True)))  # noqa: B023
    store.wait()
    found["later"] = ratio(ours, memcpy)
    for name, is_prepared in (("first", True), ("first_unprepared", False)):
        memcpy, ours = [], []
        for pair in range(pairs):
            store = CheckpointStore(folder / f"{name}-{pair}")
            if is_prepared:
                store.prepare(tensors)
                time.sleep(0.5)  # longer than a training step
            memcpy.append(seconds(lambda: copy(tensors, buffer)))
            ours.append(seconds(lambda: store.save(0, tensors, background=True)))  # noqa: B023
            store.wait()
            shutil.rmtree(store.folder)
        found[name] = ratio(ours, memcpy)
    return found


def peer(folder: Path, tensors: dict[str, torch.Tensor], buffer: torch.Tensor, pairs: int) -> dict[str, Any]:
    """Measure the blocking time of torch's `async_save`, which needs a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    memcpy, theirs = [], []
    for pair in range(pairs):
        memcpy.append(seconds(lambda: copy(tensors, buffer)))
        futures: list[Any] = []
        path = folder / f"peer-{pair}"
        theirs.append(seconds(lambda: futures.append(dcp.async_save(dict(tensors), checkpoint_id=path))))  # noqa: B023
        futures[0].result()
        shutil.rmtree(path)
    dist.destroy_process_group()
    return {"first": round(theirs[0] / memcpy[0], 2), "later": ratio(theirs[1:], memcpy[1:])}


def main() -> None:
    """Parse the arguments, run the benchmarks and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("checkpoint_save_benchmark"))
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=15)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch")
    arguments.folder.mkdir(parents=True)
    try:
        tensors = make_tensors(arguments.megabytes, arguments.tensors)
        buffer = torch.cat(list(tensors.values()))
        figures = {
            "folder": str(arguments.folder),
            "megabytes": arguments.megabytes,
            "synchronous": synchronous(arguments.folder, tensors, buffer, arguments.pairs),
            "verification": verification(arguments.folder, tensors, arguments.pairs),
            "digest_gb_per_s": hashing_speed(buffer),
            "blocking_against_memcpy": blocking(arguments.folder, tensors, buffer, arguments.pairs),
            "async_save_of_torch": peer(arguments.folder, tensors, buffer, max(5, arguments.pairs // 3)),
        }
        print(json.dumps(figures, indent=2))
    finally:
        shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
