"""Steps of folders of `transformers` in pipelines and with sharded experts, and the memory of loading them in stages.

    python packages/d9d-loop/benchmarks/folder_layouts.py
    python packages/d9d-loop/benchmarks/folder_layouts.py --only experts --repeats 5

Each run is a job on local ranks with random weights; the runs of a case alternate, every other round in reverse order.
Times are of the steps after the second one: wall time of rank 0, and the CPU time of all threads of all ranks.

- `pipeline`: a Qwen3 of 12 layers, as a folder and as d9d's own family, 1F1B. The pipelines of `transformers` have no
  backward pass (`DistributedConfig(pp_size=...)` is for generation), so they are no peer in training.
- `experts`: a Qwen3-MoE with 64 experts, its experts sharded over all ranks, and its layers tensor-parallel.
- `memory`: the peak of each rank while a folder is loaded in pipeline stages, beside the parameters of its stage.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from d9d_dist import DistributedContext, StageInfo
from d9d_dist.testing import RankPool
from d9d_loop import Loss, ModelProvider, ModelReady, StepDone, Task, Trainer, TrainerConfig, hugging_face_model
from d9d_loop.jobs import NextToken
from d9d_modules import Qwen3ForCausalLM, Qwen3Params, parallelize_decoder
from d9d_pipeline import Inputs

VOCABULARY, WIDTH, LENGTH, ROWS, STEPS = 2048, 256, 128, 8, 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": WIDTH // 4,
    "tie_word_embeddings": False,
}


def save_folder(folder: str, kind: str) -> None:
    """Save a model of random weights."""
    import transformers  # noqa: PLC0415 - before this process forks ranks, it needs only torch

    torch.manual_seed(0)
    if kind == "experts":
        more = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": WIDTH, "num_hidden_layers": 4}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **more, intermediate_size=WIDTH))
    else:
        wide = {**SIZES, "hidden_size": 1024, "head_dim": 256} if kind == "memory" else SIZES
        config = transformers.Qwen3Config(**wide, intermediate_size=3 * wide["hidden_size"], num_hidden_layers=12)
        model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(folder)


class OwnFamily(ModelProvider):
    """The model of the case `pipeline` in d9d's own family."""

    params = Qwen3Params(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_layers=12,
        num_heads=4,
        num_kv_heads=4,
        head_dim=WIDTH // 4,
        intermediate_size=3 * WIDTH,
    )

    def build(self, stage: StageInfo) -> nn.Module:
        """Build a stage."""
        return Qwen3ForCausalLM(self.params, stage)

    def parallelize(self, model: nn.Module, ctx: DistributedContext) -> None:
        """Shard the stage, of which there is nothing to shard."""
        parallelize_decoder(model, ctx)


class OwnTask(Task):
    """Prediction of the next token with d9d's own family, whose head returns losses."""

    def inputs(self, batch: dict[str, Tensor]) -> Inputs:
        """Return the arguments of the model."""
        return Inputs(batch["input_ids"], labels=batch["labels"])

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Loss:
        """Return the sum of the losses."""
        return Loss(outputs.sum(), weight=batch["labels"].numel())


def train(folder: str, name: str, mesh: dict[str, int], runs: str) -> dict[str, float]:
    """Train for some steps; return the medians of wall and CPU seconds of a step of this rank."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (ROWS * STEPS, LENGTH + 1), generator=generator)
    config = {
        "steps": STEPS,
        "batch": {"global_size": ROWS, "microbatch_size": 1 if "pipeline_parallel" in mesh else 2},
        "mesh": mesh,
        "run": {"folder": runs},
        "checkpoint": {"every": 1000},
        "trackers": (),
        "rehearsal": False,
        "export": False,
        "logging": {"progress": False},
        "resilience": {"health": {"enabled": False}},
    }
    own = name == "own family"
    trainer = Trainer(
        TrainerConfig.model_validate(config),
        model=OwnFamily() if own else hugging_face_model(folder),
        data=[{"input_ids": row[:-1], "labels": row[1:]} for row in ids],
        task=OwnTask() if own else NextToken(),
    )
    times: list[tuple[float, float]] = []
    trainer.events.on(StepDone, lambda _: times.append((time.perf_counter(), time.process_time())))
    trainer.train()
    pairs = list(pairwise(times[1:]))
    taken = [[after[index] - before[index] for before, after in pairs] for index in (0, 1)]
    return dict(zip(("wall", "cpu"), map(statistics.median, taken), strict=True))


def load(folder: str, mesh: dict[str, int], runs: str) -> dict[str, float]:
    """Load a folder in a job; return the peak of this rank's memory and the bytes of its parameters."""
    found: dict[str, float] = {}

    class LoadedError(Exception):
        pass

    def measure(ready: ModelReady) -> None:
        found["peak_bytes"] = status("VmHWM") - before
        found["parameter_bytes"] = sum(each.numel() * each.element_size() for each in ready.model.parameters())
        raise LoadedError

    config = {
        "steps": 1,
        "batch": {"global_size": ROWS, "microbatch_size": 1},
        "mesh": mesh,
        "run": {"folder": runs},
        "trackers": (),
        "rehearsal": False,
        "resilience": {"health": {"enabled": False}},
    }
    trainer = Trainer(
        TrainerConfig.model_validate(config),
        model=hugging_face_model(folder),
        data=[{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * ROWS,
        task=NextToken(),
    )
    trainer.events.on(ModelReady, measure)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    with suppress(LoadedError):
        trainer.train()
    return found


def status(field: str) -> int:
    """Return a memory value of this process in bytes, from /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def compare(folder: str, meshes: dict[str, dict[str, int]], ranks: int, repeats: int) -> dict[str, Any]:
    """Return the seconds of each run of a case, and the ratios of the first to the others of the same round."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in meshes}
    with RankPool() as pool, tempfile.TemporaryDirectory() as runs:
        for repeat in range(repeats + 1):
            for name in [*meshes][:: -1 if repeat % 2 else 1]:
                run = f"{runs}/{repeat}{name}"
                each = pool.run(train, folder, name, meshes[name], run, world_size=ranks, timeout=600.0)
                if repeat:  # the first round warms up
                    found[name].append({"wall": each[0]["wall"], "cpu": sum(rank["cpu"] for rank in each)})
    base, *others = found
    return {
        "seconds": {
            name: {what: round(statistics.median(each[what] for each in times), 4) for what in ("wall", "cpu")}
            for name, times in found.items()
        },
        **{
            f"ratio of {what} to {name}": round(
                statistics.median(a[what] / b[what] for a, b in zip(found[base], found[name], strict=True)), 3
            )
            for name in others
            for what in ("wall", "cpu")
        },
    }


def in_processes(function: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
    """Return the results of a function on new ranks."""
    with RankPool() as pool:
        return pool.run(function, *args, world_size=ranks, timeout=600.0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    cases = ("pipeline", "experts", "memory")
    parser.add_argument("--only", choices=cases, nargs="+", default=cases)
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    for case in arguments.only:
        with tempfile.TemporaryDirectory() as root:
            folder = f"{root}/model"
            in_processes(save_folder, folder, case, ranks=1)
            if case == "pipeline":
                for ranks in (2, 4):
                    mesh = {"pipeline_parallel": ranks}
                    found = compare(folder, {"folder": mesh, "own family": mesh}, ranks, arguments.repeats)
                    result[f"pipeline on {ranks} ranks"] = found
            elif case == "experts":
                sharded = {"data_parallel_shard": 4, "expert_parallel": 4}
                meshes = {"experts": sharded, "tensor parallel": {"tensor_parallel": 4}}
                result["experts on 4 ranks"] = compare(folder, meshes, 4, arguments.repeats)
            else:
                found = in_processes(load, folder, {"pipeline_parallel": 4}, f"{root}/runs", ranks=4)
                worst = max(found, key=lambda each: each["peak_bytes"] - 1.1 * each["parameter_bytes"])
                extra = worst["peak_bytes"] - 1.1 * worst["parameter_bytes"]
                result["memory of 4 stages"] = {**worst, "megabytes_above_1.1_of_the_parameters": round(extra / 1e6, 1)}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
