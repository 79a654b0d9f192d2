"""Peak memory of loading a model with a quantized base, relative to the bytes of its dense bfloat16 weights.

    uv run python packages/d9d-peft/benchmarks/quantized_memory.py --output quantized_memory.json

Each way runs in a process of its own, on the CPU: `dense` loads the dense weights, `after` loads and then quantizes
them, `streamed` quantizes them while they are loaded. `peak` is the growth of the largest resident set, `stored` the
size of the frozen weights (codes and scales if quantized).
"""

import argparse
import json
import resource
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import nn

from d9d_peft import LoRA, inject, quantize_base
from d9d_state import load_model_state, save_model_state, sequential


def main() -> None:
    """Measure, print the results as JSON, and optionally write them to a file."""
    parser = argparse.ArgumentParser(description="Peak memory of loading a quantized base.")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    dense = args.layers * args.size**2 * 2
    found = {"dense_bytes": dense}
    with tempfile.TemporaryDirectory() as folder:
        save_model_state(build(args.layers, args.size, "cpu"), folder, progress=False)
        for way in ("dense", "after", "streamed"):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                peak, stored = pool.submit(load, way, folder, args.layers, args.size, args.readers).result()
            found[way] = {"peak": round(peak / dense, 3), "stored": round(stored / dense, 3)}
    print(json.dumps(found, indent=2))
    if args.output:
        args.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def build(layers: int, size: int, device: str) -> nn.Module:
    """Build linear layers."""
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(size, size, bias=False, dtype=torch.bfloat16) for _ in range(layers)))


def load(way: str, folder: str, layers: int, size: int, readers: int) -> tuple[int, int]:
    """Load the model in one way; return the growth of the peak, and the size of the frozen weights, in bytes."""
    torch.set_num_threads(1)
    quantize_base_of(build(1, 256, "cpu"))  # loads kernels
    model = build(layers, size, "meta")
    before = peak()
    mapper = inject(LoRA(nn.Linear, rank=8), model)
    if way == "streamed":
        mapper = sequential(mapper, quantize_base(model))
    model.to_empty(device="cpu")
    load_model_state(model, folder, mapper, num_readers=readers, progress=False)
    if way == "after":
        quantize_base(model)
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return peak() - before, sum(parameter.nbytes for parameter in frozen)


def quantize_base_of(model: nn.Module) -> None:
    """Inject adapters into a model, and quantize it."""
    inject(LoRA(nn.Linear, rank=8), model)
    quantize_base(model)


def peak() -> int:
    """Return the largest resident set of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
