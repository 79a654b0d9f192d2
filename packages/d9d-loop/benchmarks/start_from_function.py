"""Measure the time and host memory of starting a job from a model that a function builds. Print JSON.

    python packages/d9d-loop/benchmarks/start_from_function.py --ranks 2 --millions 500

Time is measured from the construction of the `Trainer` to `ModelReady`, as a ratio to one plain build of the same model
in the same run; each is the minimum over the repeats. Processor time counts all threads of the busiest rank. Memory
that an earlier build freed is returned to the system first, because writing to it again takes half the time.
Memory is the largest sum of the ranks' proportional set sizes (`/proc/PID/smaps_rollup`) above the sum before the
start, in copies of the model; the shards together are one copy.
"""

import argparse
import ctypes
import gc
import json
import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from d9d_dist import StageInfo
from d9d_dist.testing import RankPool
from d9d_loop import Loss, ModelReady, Task, Trainer, TrainerConfig, validate_config
from d9d_pipeline import Inputs

_WIDTH = 2048


class _Squares(Task):
    def inputs(self, batch: torch.Tensor) -> Inputs:
        return Inputs(batch)

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        return Loss(outputs.square().sum(), weight=len(batch))


class _Build:
    """Function that builds a chain of linear layers with the default initialization."""

    def __init__(self, millions: int) -> None:
        self.num_layers = max(millions * 10**6 // _WIDTH**2, 1)

    def __call__(self, stage: StageInfo) -> nn.Module:
        return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(self.num_layers)))


class _ReadyError(Exception):
    """Raised to end the job when the model has its values."""


def _prepare() -> None:
    torch.set_num_threads(1)
    gc.collect()
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).malloc_trim(0)


def _start(build: _Build, folder: Path, mesh: dict[str, int]) -> tuple[float, float]:
    _prepare()
    sections = {"mesh": mesh, "trackers": (), "export": False, "logging": {"progress": False}}
    values = {"steps": 1, "batch": {"global_size": 8}, "run": {"folder": folder}, **sections}
    config = validate_config(
        TrainerConfig, {**values, "resilience": {"health": {"enabled": False}, "watchdog": {"enabled": False}}}
    )
    seconds: list[tuple[float, float]] = []
    begin, begin_busy = time.perf_counter(), time.process_time()
    trainer = Trainer(config, model=build, data=[torch.ones(_WIDTH)] * 8, task=_Squares())

    def stop(ready: ModelReady) -> None:
        seconds.append((time.perf_counter() - begin, time.process_time() - begin_busy))
        raise _ReadyError

    trainer.events.on(ModelReady, stop)
    with suppress(_ReadyError):
        trainer.train()
    return seconds[0]


def _plain_build(build: _Build) -> tuple[float, float]:
    _prepare()
    begin, begin_busy = time.perf_counter(), time.process_time()
    build(StageInfo())
    return time.perf_counter() - begin, time.process_time() - begin_busy


def _pid() -> int:
    return os.getpid()


def _memory(processes: list[int]) -> int:
    total = 0
    for process in processes:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def main() -> None:
    """Measure one start."""
    parser = argparse.ArgumentParser(description="Start a job from a model that a function builds.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--millions", type=int, default=500, help="parameters, in millions")
    parser.add_argument("--layout", choices=("shard", "replicate"), default="shard")
    parser.add_argument("--repeats", type=int, default=1, help="pairs of a plain build and a start")
    options = parser.parse_args()
    build = _Build(options.millions)
    mesh = {f"data_parallel_{options.layout}": options.ranks}
    copy_bytes = build.num_layers * (_WIDTH**2 + _WIDTH) * 4
    peak, done = 0, threading.Event()

    def watch(processes: list[int]) -> None:
        nonlocal peak
        before = _memory(processes)
        while not done.wait(0.02):
            peak = max(peak, _memory(processes) - before)

    plains: list[tuple[float, float]] = []
    all_starts: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder, RankPool() as pool:
        pool.run(_start, _Build(1), Path(folder) / "warm", mesh, world_size=options.ranks)
        processes = pool.run(_pid, world_size=options.ranks)
        watcher = threading.Thread(target=watch, args=(processes,))
        for repeat in range(options.repeats):
            plains += pool.run(_plain_build, build, world_size=1)
            if not repeat:
                watcher.start()
            starts = pool.run(_start, build, Path(folder) / f"job{repeat}", mesh, world_size=options.ranks)
            seconds, busy = (max(each) for each in zip(*starts, strict=True))
            all_starts.append((seconds, busy))
            done.set()
        watcher.join()
    (plain, plain_busy), (seconds, busy) = (
        [min(each) for each in zip(*found, strict=True)] for found in (plains, all_starts)
    )
    print(
        json.dumps(
            {
                "ranks": options.ranks,
                "layout": options.layout,
                "parameters": copy_bytes // 4,
                "repeats": options.repeats,
                "plain_build_seconds": round(plain, 2),
                "start_seconds": round(seconds, 2),
                "start_ratio": round(seconds / plain, 2),
                "plain_build_processor_seconds": round(plain_busy, 2),
                "start_processor_seconds": round(busy, 2),
                "start_processor_ratio": round(busy / plain_busy, 2),
                "peak_copies": round(peak / copy_bytes, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
