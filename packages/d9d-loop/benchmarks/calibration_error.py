"""Error of step times that are predicted for this machine, as JSON: calibrate it, then run 20 small jobs on its CPU.

    OMP_NUM_THREADS=1 python packages/d9d-loop/benchmarks/calibration_error.py [--hardware FILE]

Each job is the preset of examples/ on one or two ranks. Its time is the smallest of the last steps.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from d9d_dist.testing import run_ranks
from d9d_loop.config.preset import PresetConfig
from d9d_loop.events import StepDone
from d9d_loop.job.preset_job import preset_trainer
from d9d_loop.planning import Hardware
from d9d_loop.planning.calibration import calibrate
from d9d_loop.planning.step_model import PARTS

EXAMPLES = Path(__file__).parents[3] / "examples"
PRESET = """
steps = 6
[run]
name = "calibration"
[dataset]
use = "pretrain:PackedText"
[task]
use = "pretrain:NextByte"
[model]
use = "pretrain:Decoder"
[model.dense]
vocab_size = 256
max_position_embeddings = 256
[batch]
global_size = 8
"""


def jobs() -> Iterator[tuple[int, list[str]]]:
    """Yield the number of ranks and the settings of each job."""

    def settings(hidden: int, layers: int, length: int, size: int, *more: str) -> list[str]:
        values = {
            "model.dense.hidden_size": hidden,
            "model.dense.num_layers": layers,
            "model.dense.num_heads": 4,
            "model.dense.num_kv_heads": 2,
            "model.dense.head_dim": hidden // 4,
            "model.dense.intermediate_size": 3 * hidden,
            "dataset.text.length": length,
            "batch.global_size": 4 * size if "pp" in more else 2 * size,
            "batch.microbatch_size": size,
        }
        extra = {
            "full": ["--model.parallelism.activation_checkpointing", "full"],
            "tp": ["--mesh.tensor_parallel", "2"],
            "pp": ["--mesh.pipeline_parallel", "2"],
            "dp": ["--mesh.data_parallel_shard", "2"],
        }
        return [
            *(word for key, value in values.items() for word in (f"--{key}", str(value))),
            *(word for name in more for word in extra[name]),
        ]

    for hidden, layers, length, size in ((128, 4, 128, 1), (256, 4, 128, 4), (256, 8, 256, 2), (512, 4, 256, 4)):
        yield 1, settings(hidden, layers, length, size)
        yield 1, settings(hidden, layers, length, size, "full")
        for axis in ("dp", "tp", "pp"):
            yield 2, settings(hidden, layers, length, size, axis)


def measured(arguments: list[str]) -> float:
    """Run a job; return the seconds of its fastest step after the first two. Collective over its ranks."""
    sys.path.insert(0, str(EXAMPLES))
    times = []
    trainer = preset_trainer(PresetConfig.from_cli(arguments=arguments))
    trainer.events.on(StepDone, lambda event: times.append(time.perf_counter()))
    trainer.train()
    return min(after - before for before, after in pairwise(times[1:]))


def predicted(arguments: list[str], num_ranks: int, hardware: str) -> dict[str, float]:
    """Return the predicted seconds of a step and of its parts."""
    sys.path.insert(0, str(EXAMPLES))
    trainer = preset_trainer(PresetConfig.from_cli(arguments=arguments))
    plan = trainer.plan(world_size=num_ranks, hardware=Hardware.load(hardware))
    return {name: getattr(plan.time, name) for name in ("total", *PARTS)}


def main() -> None:
    """Calibrate, run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", type=Path, help="description of this machine; measured without it")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        preset = Path(folder, "preset.toml")
        preset.write_text(PRESET)
        start = time.perf_counter()
        hardware = options.hardware or calibrate(Path(folder) / "mine.toml")
        result = {"calibration_s": time.perf_counter() - start, "hardware": hardware.read_text()}
        rows, errors = [], []
        for number, (num_ranks, settings) in enumerate(jobs()):
            arguments = [str(preset), *settings, "--run.folder", f"{folder}/{number}"]
            seconds = run_ranks(measured, arguments, world_size=num_ranks)[0]
            parts = run_ranks(predicted, arguments, num_ranks, str(hardware), world_size=1)[0]
            rows.append({"ranks": num_ranks, "settings": " ".join(settings), "seconds": seconds, "predicted": parts})
            errors.append(parts["total"] / seconds - 1)
            print(num_ranks, " ".join(settings), f"{seconds:.3f}", f"{parts['total']:.3f}", file=sys.stderr)
    mape, bias = (round(100 * fmean(each), 1) for each in (map(abs, errors), errors))
    print(json.dumps({**result, "mape": mape, "bias": bias, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
