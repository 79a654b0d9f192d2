"""Time to inject LoRA into many linear layers, compared with manual replacement and peft, and memory to merge them.

    uv run python packages/d9d-peft/benchmarks/inject_and_merge.py --output inject_and_merge.json

All create the same factors, initialize them, and freeze all other parameters. They run alternately in one
process, so other load on the machine affects both; compare ratios, not seconds. Merging runs in a separate process,
whose peak memory is read before and after.
"""

import argparse
import gc
import json
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_peft import LoRA, inject, merge_

LINEARS_IN_BLOCK = 8


def main() -> None:
    """Measure, print the results as JSON, and optionally write them to a file."""
    parser = argparse.ArgumentParser(description="Time of injecting LoRA, memory of merging it.")
    parser.add_argument("--linears", type=int, default=2000)
    parser.add_argument("--size", type=int, default=64, help="size of each linear layer for the time of injection")
    parser.add_argument("--merged-linears", type=int, default=64)
    parser.add_argument("--merged-size", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    figures: dict[str, object] = {name: value for name, value in vars(args).items() if name != "output"}
    for device in ("meta", "cpu"):
        seconds = _times(args.linears, args.size, args.rank, torch.device(device), args.repeats)
        ratios = {
            name: statistics.median(ours / theirs for ours, theirs in zip(seconds["inject"], values, strict=True))
            for name, values in seconds.items()
        }
        figures[device] = {
            "seconds": {name: statistics.median(values) for name, values in seconds.items()},
            "ratios": ratios,
        }
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        figures["merge"] = pool.submit(_merge_memory, args.merged_linears, args.merged_size, args.rank).result()
    print(json.dumps(figures, indent=2))
    if args.output:
        args.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def build(num_linears: int, size: int, device: torch.device) -> nn.Module:
    """Build blocks of linear layers."""
    with device:
        return nn.Sequential(
            *(
                nn.Sequential(*(nn.Linear(size, size) for _ in range(LINEARS_IN_BLOCK)))
                for _ in range(num_linears // LINEARS_IN_BLOCK)
            )
        )


class HandMade(nn.Module):
    """Manually written LoRA layer."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_empty(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output of the layer plus the update."""
        return self.base(x) + 2.0 * F.linear(F.linear(x, self.lora_a), self.lora_b)


def replace_by_hand(model: nn.Module, rank: int) -> None:
    """Replace all linear layers and freeze all other parameters."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            model.set_submodule(name, HandMade(module, rank))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def inject_with_peft(model: nn.Module, rank: int) -> None:
    """Inject with peft."""
    peft: Any = import_module("peft")
    config = peft.LoraConfig(target_modules=r"\d+\.\d+", r=rank, lora_alpha=2 * rank)
    peft.get_peft_model(model, config, low_cpu_mem_usage=next(model.parameters()).is_meta)


def _times(num_linears: int, size: int, rank: int, device: torch.device, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each method, measured alternately; the first pair is a warm-up and is dropped."""
    ways: dict[str, Callable[[nn.Module], object]] = {
        "inject": lambda model: inject(LoRA(nn.Linear, rank=rank), model),
        "by_hand": lambda model: replace_by_hand(model, rank),
    }
    if find_spec("peft") is not None:
        ways["peft"] = lambda model: inject_with_peft(model, rank)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name in sorted(ways, reverse=repeat % 2 == 0):
            model = build(num_linears, size, device)
            gc.collect()
            begin = time.perf_counter()
            ways[name](model)
            seconds[name].append(time.perf_counter() - begin)
    return {name: values[1:] for name, values in seconds.items()}


def _merge_memory(num_linears: int, size: int, rank: int) -> dict[str, float]:
    """Return the peak of the extra memory of merging, relative to the memory of the model."""
    merge_(_injected(LINEARS_IN_BLOCK, size, rank))  # warm-up: the first product allocates memory once
    model = _injected(num_linears, size, rank)
    model_bytes = sum(parameter.nbytes for parameter in model.parameters())
    before = _highest_bytes()
    merge_(model)
    more = _highest_bytes() - before
    return {"model_bytes": model_bytes, "more_bytes": more, "more": more / model_bytes}


def _injected(num_linears: int, size: int, rank: int) -> nn.Module:
    model = build(num_linears, size, torch.device("cpu"))
    inject(LoRA(nn.Linear, rank=rank), model)
    return model


def _highest_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
