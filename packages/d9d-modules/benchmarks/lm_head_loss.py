"""Time and peak memory of a language-model head's loss, forward and backward, relative to torch's own.

    uv run python packages/d9d-modules/benchmarks/lm_head_loss.py --output lm_head_loss.json

Peers are torch with all logits, and its `linear_cross_entropy` in chunks of 512 tokens, which are faster on a CPU than
the chunks of 8 tokens that it chooses. `products` are the three matrix products that
each of them needs at least, without a loss, one tile at a time; ours has four, because it computes the logits twice.
All run in one process, each round in another order, so other load on the machine affects all; compare ratios, not
seconds. Memory is the peak of torch's CPU allocator above its value before, without the two gradients that backward
returns, in units of one float32 tensor of all logits.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from d9d_modules.lm_head import language_model_head


def main() -> None:
    """Measure, print JSON, and optionally write it."""
    parser = argparse.ArgumentParser(description="Time and memory of the loss of a language-model head, on the CPU.")
    parser.add_argument("--vocab-size", type=int, default=150_000)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    dtype: torch.dtype = getattr(torch, args.dtype)
    hidden = torch.randn(1, args.tokens, args.hidden_size, dtype=dtype, requires_grad=True)
    weight = (torch.randn(args.vocab_size, args.hidden_size) * 0.05).to(dtype).requires_grad_()
    labels = torch.randint(0, args.vocab_size, (1, args.tokens))
    losses: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: language_model_head(hidden, weight, labels=labels, backend="chunked"),
        "torch": lambda: F.cross_entropy(
            F.linear(hidden, weight).float().flatten(0, 1), labels.flatten(), reduction="none"
        ),
        "linear_cross_entropy": lambda: F.linear_cross_entropy(
            hidden[0], weight, labels[0], reduction="sum", options=nn.LinearCrossEntropyOptions(batch_chunk_size=512)
        ),
    }

    def step(name: str) -> None:
        hidden.grad = weight.grad = None
        if name == "products":
            products(hidden[0].detach(), weight.detach())
        else:
            losses[name]().sum().backward()

    memory = {}
    names = [*losses, "products"]
    for name in names:
        hidden.grad = weight.grad = None  # gradients of the previous step must not be counted
        memory[name] = _peak_bytes(lambda name=name: step(name))
    gradients = (hidden.numel() + weight.numel()) * hidden.element_size()
    logits = 4 * args.tokens * args.vocab_size
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(args.repeats):
        for name in names[:: -1 if repeat % 2 else 1]:
            gc.collect()
            start = time.perf_counter()
            step(name)
            seconds[name].append(time.perf_counter() - start)
    figures = {
        "vocab_size": args.vocab_size,
        "tokens": args.tokens,
        "hidden_size": args.hidden_size,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "memory_of_logits": {name: round((peak - gradients) / logits, 3) for name, peak in memory.items()},
        "seconds": {name: round(statistics.median(times), 3) for name, times in seconds.items()},
        "ratios": {name: quartiles(seconds["ours"], seconds[name]) for name in names[1:]},
    }
    print(json.dumps(figures, indent=2))
    if args.output:
        args.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def products(hidden: Tensor, weight: Tensor, tile: int = 256) -> tuple[Tensor, Tensor]:
    """Return the results of the three matrix products, with logits instead of their gradients in the last two."""
    of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
    for start in range(0, len(hidden), tile):
        rows = hidden[start : start + tile]
        logits = rows @ weight.T
        torch.mm(logits, weight, out=of_hidden[start : start + tile])
        of_weight.addmm_(logits.T, rows)
    return of_hidden, of_weight


def quartiles(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Return the median and the quartiles of the ratios of pairs."""
    low, middle, high = statistics.quantiles((a / b for a, b in zip(ours, theirs, strict=True)), n=4)
    return {"ratio": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


def _peak_bytes(function: Callable[[], None]) -> int:
    """Return the peak of the allocated bytes while a function runs, above the value before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    if results is None:
        raise RuntimeError("torch was built without its profiler.")
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    now, peak = 0, 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


if __name__ == "__main__":
    main()
