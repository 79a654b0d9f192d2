"""Compare d9d-state with the safetensors library: hostile headers, reads into shards, and streamed writes.

    uv run python packages/d9d-state/benchmarks/safetensors_library.py

Prints one JSON line per case. Each case runs in its own process. Times are CPU times, which other jobs disturb less.
Memory is the growth of the peak resident set, in MB. Files are in the page cache, and the memory that a read fills was
touched before.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "faults"))

from hostile_headers import HOSTILE

from d9d_dist import Region, UserError
from d9d_state import ModelFolder, TensorInfo
from d9d_state.region_reader import RegionReader
from d9d_state.safetensors_file import StreamedFile
from d9d_state.safetensors_header import read_header

NUM_TENSORS = 4
SIZE = 4096  # 64 MiB per tensor in float32
REGIONS = {
    "whole": Region((0, 0), (SIZE, SIZE)),
    "rows": Region((SIZE // 2, 0), (SIZE // 4, SIZE)),
    "columns": Region((0, SIZE // 2), (SIZE, SIZE // 4)),
}


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Return the CPU seconds of a call and the growth of the peak resident set in MB."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, start = _status("VmRSS"), time.process_time()
    work()
    return round(time.process_time() - start, 4), round((_status("VmHWM") - before) / 1e6, 1)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def hostile(folder: Path, _name: str, by: str) -> dict[str, Any]:
    """Open every hostile file; return the names of accepted files, and the files that need too much memory."""
    path = folder / "hostile.safetensors"
    accepted: list[str] = []

    def open_file(name: str) -> None:
        try:
            if by == "ours":
                read_header(path)
            else:
                with safe_open(path, framework="pt") as file:
                    file.offset_keys()
            accepted.append(name)
        except (UserError, SafetensorError):
            pass

    most = {}
    for name, file in HOSTILE.items():
        length = file.write(path)
        _, megabytes = measured(partial(open_file, name))
        if megabytes > max(2 * length / 1e6, 1):
            most[name] = megabytes
    path.unlink()
    return {"files": len(HOSTILE), "accepted": accepted, "peak_mb_above_twice_the_header": most}


def read(folder: Path, name: str, by: str) -> dict[str, Any]:
    """Read one region of every tensor into existing memory."""
    region = REGIONS[name]
    targets = [torch.full(region.sizes, 1.0) for _ in range(NUM_TENSORS)]

    def ours() -> None:
        with RegionReader(ModelFolder.open(folder)) as reader:
            for index, target in enumerate(targets):
                reader.read_into(str(index), region, target)

    def library() -> None:
        rows, columns = (slice(start, start + size) for start, size in zip(region.offsets, region.sizes, strict=True))
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            for index, target in enumerate(targets):
                target.copy_(file.get_slice(str(index))[rows, columns])

    runs = [measured(ours if by == "ours" else library) for _ in range(6)][1:]
    num_bytes = sum(target.nbytes for target in targets)
    return {
        "gb_per_cpu_s": round(num_bytes / statistics.median(seconds for seconds, _ in runs) / 1e9, 2),
        "peak_mb": max(megabytes for _, megabytes in runs),
        "bytes_mb": round(num_bytes / 1e6, 1),
    }


def write(folder: Path, _name: str, by: str) -> dict[str, Any]:
    """Write tensors that are computed one after the other, as an export does."""
    info = TensorInfo((SIZE // 4, SIZE), torch.float32)
    path = folder / f"written-{os.getpid()}.safetensors"

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for index in range(NUM_TENSORS):
            yield str(index), torch.full(info.shape, float(index))

    def ours() -> None:
        file = StreamedFile(path, {str(index): info for index in range(NUM_TENSORS)}, metadata={})
        for name, tensor in tensors():
            file.write(name, tensor)
        file.close()

    def library() -> None:
        save_file(dict(tensors()), path)  # the library takes all tensors at once

    seconds, megabytes = measured(ours if by == "ours" else library)
    path.unlink()
    return {"cpu_seconds": seconds, "peak_mb": megabytes, "bytes_mb": round(NUM_TENSORS * info.num_bytes / 1e6, 1)}


CASES: dict[str, Callable[[Path, str, str], dict[str, Any]]] = {"hostile": hostile, "read": read, "write": write}


def main() -> None:
    """Run all cases, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs=4, metavar=("FOLDER", "KIND", "NAME", "BY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        folder, kind, name, by = arguments.case
        print(json.dumps({"kind": kind, "case": name, "by": by, **CASES[kind](Path(folder), name, by)}), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        save_file({str(i): torch.randn(SIZE, SIZE) for i in range(NUM_TENSORS)}, f"{folder}/model.safetensors")
        cases = [("read", name) for name in REGIONS] + [("write", "stream"), ("hostile", "all")]
        for kind, name in cases:
            for by in ("ours", "library"):
                subprocess.run([sys.executable, __file__, "--case", folder, kind, name, by], check=True)  # noqa: S603


if __name__ == "__main__":
    main()
