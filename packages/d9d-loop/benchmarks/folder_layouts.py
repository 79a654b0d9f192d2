"""Steps of folders of `transformers` in pipelines and with sharded experts, and the memory of loading them in stages.

    python packages/d9d-loop/benchmarks/folder_layouts.py
    python packages/d9d-loop/benchmarks/folder_layouts.py --only experts --repeats 5

Local ranks have the engines of both models of a case, with random weights, and run their steps in turn, every other
time in reverse order. Times are the wall time of rank 0, and the CPU time of all threads of all ranks.

- `pipeline`: a Qwen3 of 12 layers, as a folder and as d9d's own family, 1F1B. The pipelines of `transformers` have no
  backward pass (`DistributedConfig(pp_size=...)` is for generation), so they are no peer in training.
- `experts`: a Qwen3-MoE with 64 experts, its experts sharded over all ranks, and its layers tensor-parallel, with 1,024
  and 4,096 tokens a step: the optimizer and FSDP's gathers of the dense layers do not depend on the tokens. The bytes
  are those of dispatched rows and their gradients, beside the fewest: one row for each other rank with its experts.
- `memory`: the peak of each rank while a folder is loaded in pipeline stages, beside the parameters of its stage.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, final
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_dist import DistributedContext, StageInfo
from d9d_dist.testing import RankPool
from d9d_loop import (
    Engine,
    EngineConfig,
    Loss,
    ModelProvider,
    ModelReady,
    Task,
    Trainer,
    TrainerConfig,
    hugging_face_model,
)
from d9d_loop.jobs import NextToken
from d9d_modules import Qwen3ForCausalLM, Qwen3Params, parallelize_decoder
from d9d_moe import AllToAllDispatcher
from d9d_moe.router import Routing
from d9d_pipeline import Inputs

VOCABULARY, WIDTH, LENGTH, ROWS = 2048, 256, 128, 8
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


def steps(folder: str, meshes: dict[str, dict[str, int]], num_rows: int, runs: str, repeats: int) -> dict[str, Any]:
    """Run steps of engines in turn; return the wall and CPU seconds of each, and the bytes of dispatched rows."""
    torch.set_num_threads(1)
    rank, sent = int(os.environ["RANK"]), {"moved": 0, "bound": 0}
    ids = torch.randint(VOCABULARY, (num_rows, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row[None, :-1], "labels": row[None, 1:]} for row in ids]
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in meshes}
    with ExitStack() as stack:
        runnable: dict[str, Callable[[], object]] = {}
        for name, mesh in meshes.items():
            own = name == "own family"
            config = {"mesh": mesh, "run": {"folder": f"{runs}/{name}"}, "health": {"enabled": False}}
            model, task = (OwnFamily(), OwnTask()) if own else (hugging_face_model(folder), NextToken())
            engine = stack.enter_context(
                Engine.open(EngineConfig.model_validate(config | {"progress": False}), model=model, task=task)
            )
            parts = mesh.get("data_parallel_shard", 1)
            batches = rows if "pipeline_parallel" in mesh else [_stacked(rows[rank % parts :: parts])]
            runnable[name] = partial(_step, engine, batches, task.loss)
        for repeat in range(repeats + 1):
            for name in [*meshes][:: -1 if repeat % 2 else 1]:
                before = time.perf_counter(), time.process_time()
                with _counted(sent) if "experts" in meshes and not repeat else nullcontext():
                    runnable[name]()
                taken[name].append((time.perf_counter() - before[0], time.process_time() - before[1]))
    return {"seconds": {name: times[1:] for name, times in taken.items()}, "bytes": sent}  # the first step warms up


def _step(engine: Engine, batches: list[dict[str, Tensor]], loss: Callable[..., Loss]) -> None:
    engine.forward_backward(batches, loss)
    engine.step()
    dist.barrier()


def _stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}


@final
class _Sent(TorchDispatchMode):
    """Adds the bytes of rows that dispatchers send to other ranks."""

    def __init__(self, sent: dict[str, int]) -> None:
        super().__init__()
        self._sent = sent

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            x, _, sizes, _ = args
            if x.is_floating_point() and x.shape[-1] == WIDTH:
                self._sent["moved"] += (sum(sizes) - sizes[dist.get_rank()]) * x[:1].nbytes
        return func(*args, **(kwargs or {}))


@contextmanager
def _counted(sent: dict[str, int]) -> Generator[None]:
    """Add the bytes that dispatchers send to other ranks, and the fewest for the same choices of experts."""
    dispatch = AllToAllDispatcher.dispatch

    def bounded(self: AllToAllDispatcher, x: Tensor, routing: Routing, *, num_experts: int) -> Any:
        homes = routing.indices // (num_experts // dist.get_world_size())
        is_there = torch.zeros(len(x), dist.get_world_size(), dtype=torch.bool).scatter_(1, homes, value=True)
        is_there[:, dist.get_rank()] = False
        sent["bound"] += 4 * int(is_there.sum()) * x[:1].nbytes  # to the experts and back, forward and backward
        return dispatch(self, x, routing, num_experts=num_experts)

    with mock.patch.object(AllToAllDispatcher, "dispatch", bounded), _Sent(sent):
        yield


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


def compare(
    folder: str, meshes: dict[str, dict[str, int]], ranks: int, repeats: int, num_rows: int = ROWS
) -> dict[str, Any]:
    """Return the median seconds of the steps of a case, and the median ratio of the first to the second of a pair."""
    with tempfile.TemporaryDirectory() as runs:
        found = in_processes(steps, folder, meshes, num_rows, runs, repeats, ranks=ranks)
    seconds = {
        name: {
            "wall": [wall for wall, _ in found[0]["seconds"][name]],
            "cpu": [
                sum(cpu) for cpu in zip(*([cpu for _, cpu in each["seconds"][name]] for each in found), strict=True)
            ],
        }
        for name in meshes
    }
    first, second = seconds.values()
    ratios = {what: [a / b for a, b in zip(first[what], second[what], strict=True)] for what in first}
    sent = {name: sum(each["bytes"][name] for each in found) for name in ("moved", "bound")}
    return {
        "seconds": {
            name: {what: round(statistics.median(each[what]), 4) for what in each} for name, each in seconds.items()
        },
        **{f"ratio of {what} to {[*meshes][1]}": round(statistics.median(each), 3) for what, each in ratios.items()},
        **{
            f"quartiles of {what}": [round(x, 3) for x in statistics.quantiles(each)[::2]]
            for what, each in ratios.items()
        },
        **({"sent bytes": sent["moved"], "fewest bytes": sent["bound"]} if sent["bound"] else {}),
    }


def in_processes(function: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
    """Return the results of a function on new ranks."""
    with RankPool() as pool:
        return pool.run(function, *args, world_size=ranks, timeout=600.0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
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
                for num_rows in (ROWS, 4 * ROWS):
                    found = compare(folder, meshes, 4, arguments.repeats, num_rows)
                    result[f"experts on 4 ranks, {num_rows * LENGTH} tokens"] = found
            else:
                found = in_processes(load, folder, {"pipeline_parallel": 4}, f"{root}/runs", ranks=4)
                worst = max(found, key=lambda each: each["peak_bytes"] - 1.1 * each["parameter_bytes"])
                extra = worst["peak_bytes"] - 1.1 * worst["parameter_bytes"]
                result["memory of 4 stages"] = {**worst, "megabytes_above_1.1_of_the_parameters": round(extra / 1e6, 1)}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
