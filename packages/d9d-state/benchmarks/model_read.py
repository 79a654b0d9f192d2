"""Benchmark of loading a model: speed relative to a loop of `pread` and to a copy in memory, and peak memory.

    uv run python packages/d9d-state/benchmarks/model_read.py

One GiB in four files, 8 experts of each layer stacked into one parameter. Prints one JSON line per case. The compared
functions alternate in one process and write to memory that was touched before; files are in the page cache. Memory is
measured in a separate process: the peak of its resident set minus its value with the model before the read.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from d9d_dist import MeshConfig
from d9d_dist.testing import run_ranks
from d9d_state import ModelFolder, StateMapper, load_model_state, model_load, read_model_state, repeat, stack

NUM_EXPERTS = 8
NUM_FILES = 4
SIZE = 1024


class Layers(nn.Module):
    """Module with the stacked experts of each layer."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(NUM_EXPERTS, SIZE, SIZE) for _ in range(num_layers))


def mapper_of(num_layers: int) -> StateMapper:
    """Return the mapper from single experts on disk to stacks in memory."""
    layer = stack([f"layers.{{i}}.experts.{expert}" for expert in range(NUM_EXPERTS)], "layers.{i}")
    return repeat(layer, i=range(num_layers))


def write_folder(folder: Path, num_layers: int) -> None:
    """Write the files with the safetensors library."""
    names = [f"layers.{layer}.experts.{expert}" for layer in range(num_layers) for expert in range(NUM_EXPERTS)]
    weight_map = {}
    for number in range(NUM_FILES):
        file = f"model-{number + 1:05d}-of-{NUM_FILES:05d}.safetensors"
        part = names[number * len(names) // NUM_FILES : (number + 1) * len(names) // NUM_FILES]
        save_file({name: torch.randn(SIZE, SIZE) for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def pread_loop(folder: Path, model: Layers) -> None:
    """Baseline: read every tensor into its destination, one after the other."""
    source = ModelFolder.open(folder)
    files = {path: os.open(str(path), os.O_RDONLY) for path in set(source.files.values())}
    for index, parameter in enumerate(model.layers):
        for expert in range(NUM_EXPERTS):
            name = f"layers.{index}.experts.{expert}"
            view = memoryview(parameter.detach()[expert].view(-1).view(torch.uint8).numpy())
            position = source.starts[name]
            while view:
                count = os.preadv(files[source.files[name]], [view], position)
                view, position = view[count:], position + count
    for descriptor in files.values():
        os.close(descriptor)


def speed(folder: Path, num_layers: int, repeats: int) -> dict[str, Any]:
    """Return medians, and ratios of adjacent measurements."""
    model, other, mapper = Layers(num_layers), Layers(num_layers), mapper_of(num_layers)

    def copy() -> None:
        for ours, theirs in zip(model.layers, other.layers, strict=True):
            ours.detach().copy_(theirs.detach())

    def stream() -> None:
        for _name, _tensor in read_model_state(folder, mapper, progress=False):
            pass

    def load(num_readers: int) -> Callable[[], None]:
        return lambda: load_model_state(model, folder, mapper, num_readers=num_readers, progress=False)

    calls: dict[str, Callable[[], None]] = {
        "pread": lambda: pread_loop(folder, model),
        "memcpy": copy,
        "load, 1 reader": load(1),
        "load, 4 readers": load(4),
        "stream": stream,
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat_index in range(repeats + 1):
        for name in random.sample(sorted(calls), len(calls)):
            start = time.perf_counter()
            calls[name]()
            if repeat_index:  # the first round is a warm-up
                seconds[name].append(time.perf_counter() - start)
    num_bytes = num_layers * NUM_EXPERTS * SIZE * SIZE * 4
    result: dict[str, Any] = {"case": "speed", "bytes": num_bytes, "repeats": repeats}
    for name, values in seconds.items():
        result[name] = {
            "gb_per_s": round(num_bytes / statistics.median(values) / 1e9, 2),
            **{f"x {peer}": _ratio(values, seconds[peer]) for peer in ("pread", "memcpy") if peer != name},
        }
    return result


def _ratio(ours: list[float], theirs: list[float]) -> list[float]:
    """Return the median of the time ratios, with a bootstrapped 95 % interval."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(1000))  # noqa: S311
    return [round(value, 3) for value in (statistics.median(ratios), medians[25], medians[974])]


def memory(folder: Path, num_layers: int, what: str) -> dict[str, Any]:
    """Return the increase of this process's peak memory in bytes."""
    mapper = mapper_of(num_layers)
    model = Layers(num_layers) if what == "load" else None
    for parameter in [] if model is None else model.layers:
        parameter.detach().fill_(1.0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    if model is None:
        for _name, _tensor in read_model_state(folder, mapper, progress=False):
            pass
    else:
        load_model_state(model, folder, mapper, progress=False)
    peak = _status("VmHWM")
    group = NUM_EXPERTS * SIZE * SIZE * 4
    bound = round(1.1 * group + 32e6)
    return {"case": f"memory, {what}", "beyond_mb": round((peak - before) / 1e6, 1), "bound_mb": round(bound / 1e6, 1)}


def _status(field: str) -> int:
    """Return a memory value of this process in bytes, from /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _bytes_of_rank(folder: str, num_layers: int, dim: int) -> tuple[int, int]:
    """Return the bytes that this rank reads for shards along a dim, and the bytes of all tensors."""
    readers: list[Any] = []
    original = model_load.RegionReader

    def recorded(*args: Any, **kwargs: Any) -> Any:
        readers.append(original(*args, **kwargs))
        return readers[-1]

    model_load.RegionReader = recorded  # ty: ignore[invalid-assignment]
    with MeshConfig(data_parallel_shard=4).build() as ctx:
        model = Layers(num_layers)
        for index, parameter in enumerate(list(model.layers)):
            placed = distribute_tensor(parameter.detach(), ctx.mesh_for("flat"), [Shard(dim)], src_data_rank=None)
            model.layers[index] = nn.Parameter(placed)
        load_model_state(model, folder, mapper_of(num_layers), unused="ignore", progress=False)
    return readers[0].num_bytes_read, num_layers * NUM_EXPERTS * SIZE * SIZE * 4


def main() -> None:
    """Run the benchmarks and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32, help="number of layers, 32 MiB each")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--memory", choices=["load", "stream"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        print(json.dumps(memory(arguments.folder, arguments.layers, arguments.memory)), flush=True)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder, arguments.layers)
        for what in ("load", "stream"):
            command = [sys.executable, __file__, "--layers", str(arguments.layers), "--memory", what, "--folder", name]
            subprocess.run(command, check=True)  # noqa: S603 - runs this file
        print(json.dumps(speed(folder, arguments.layers, arguments.repeats)), flush=True)
        for dim in (0, 1, 2):
            shares = [read / whole for read, whole in run_ranks(_bytes_of_rank, name, 4, dim, world_size=4)]
            print(json.dumps({"case": f"bytes of a rank of 4, Shard({dim})", "share": max(shares)}), flush=True)


if __name__ == "__main__":
    main()
