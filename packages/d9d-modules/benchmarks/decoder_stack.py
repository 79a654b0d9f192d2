"""Time of a stack of Qwen3 decoder layers, forward and backward, relative to `transformers` with SDPA.

    uv run --group test python packages/d9d-modules/benchmarks/decoder_stack.py --output decoder_stack.json

Both have the same weights and run in one process, in pairs of alternating order, so other load on the machine affects
both; compare ratios, not seconds. Outputs and gradients are compared before the timing.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from d9d_modules import DecoderLayer, GroupedQueryAttention, SwiGLU, rotary_tables

THETA = 1_000_000.0
OUR_NAMES = {
    "self_attn": "attention",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "feed_forward_norm",
    "mlp": "feed_forward",
}


def main() -> None:
    """Measure, print JSON, and optionally write it."""
    parser = argparse.ArgumentParser(description="Time of a stack of decoder layers, forward and backward.")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--intermediate-size", type=int, default=1536)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    dtype: torch.dtype = getattr(torch, args.dtype)
    theirs = their_stack(args).to(dtype)
    ours = our_stack(args).to(dtype)
    with torch.no_grad():
        weights = dict(theirs.layers.named_parameters())
        for name, weight in ours.layers.named_parameters():
            weight.copy_(weights[name if name in weights else _their_name(name)])
    x = torch.randn(args.batch, args.length, args.hidden_size, dtype=dtype, requires_grad=True)
    direction = torch.randn_like(x)

    def step(stack: nn.Module) -> Tensor:
        ours.zero_grad()
        theirs.zero_grad()
        x.grad = None
        out = stack(x)
        out.backward(direction)
        return out

    steps: dict[str, Callable[[], Tensor]] = {"ours": lambda: step(ours), "transformers": lambda: step(theirs)}
    figures = {
        **{name: value for name, value in vars(args).items() if name not in {"output"}},
        "threads": torch.get_num_threads(),
        "largest_difference": _difference(steps, x),
        **_times(steps, args.repeats),
        "share_of_products_in_transformers": round(_share_of_products(steps["transformers"]), 3),
    }
    print(json.dumps(figures, indent=2))
    if args.output:
        args.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


class Stack(nn.Module):
    """Sequence of layers that share their rotary tables, as in a model."""

    def __init__(self, layers: list[nn.Module], apply: Callable[[nn.Module, Tensor, Any], Tensor], tables: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._apply_layer, self._tables = apply, tables

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Map hidden states [B, L, D] to the same shape."""
        tables = self._tables(x_BLD)
        for layer in self.layers:
            x_BLD = self._apply_layer(layer, x_BLD, tables)
        return x_BLD


def our_stack(args: argparse.Namespace) -> Stack:
    """Build the layers of this package."""
    layers: list[nn.Module] = [
        DecoderLayer(
            args.hidden_size,
            attention=GroupedQueryAttention(
                args.hidden_size,
                num_heads=args.heads,
                num_kv_heads=args.kv_heads,
                head_dim=args.head_dim,
                qk_norm_eps=1e-6,
            ),
            feed_forward=SwiGLU(args.hidden_size, args.intermediate_size),
        )
        for _ in range(args.layers)
    ]
    return Stack(
        layers,
        lambda layer, x, tables: layer(x, tables),
        lambda x: rotary_tables(torch.arange(x.shape[1]).unsqueeze(0), head_dim=args.head_dim, theta=THETA),
    )


def their_stack(args: argparse.Namespace) -> Stack:
    """Build the layers of transformers."""
    config = Qwen3Config(
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )
    config._attn_implementation = "sdpa"
    rotary = Qwen3RotaryEmbedding(config)
    return Stack(
        [Qwen3DecoderLayer(config, index) for index in range(args.layers)],
        lambda layer, x, tables: layer(x, position_embeddings=tables),
        lambda x: rotary(x, torch.arange(x.shape[1]).unsqueeze(0)),
    )


def _their_name(name: str) -> str:
    for theirs, ours in OUR_NAMES.items():
        name = name.replace(f".{ours}.", f".{theirs}.")
    return name


def _difference(steps: dict[str, Callable[[], Tensor]], x: Tensor) -> dict[str, float]:
    """Return the largest differences of outputs and input gradients, relative to the largest value of each."""
    found = []
    for step in steps.values():
        out = step().detach()
        found.append((out, torch.empty(0) if x.grad is None else x.grad))
    return {
        name: round(((a - b).abs().max() / b.abs().max()).item(), 8)
        for name, a, b in zip(("output", "gradient"), *found, strict=True)
    }


def _share_of_products(step: Callable[[], Tensor]) -> float:
    """Return the share of a step's CPU time that its matrix products and its attention take."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            step()
    events = profiler.key_averages()
    named = [
        each for each in events if each.key.startswith(("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot"))
    ]
    return sum(each.self_cpu_time_total for each in named) / sum(each.self_cpu_time_total for each in events)


def _times(steps: dict[str, Callable[[], Tensor]], repeats: int) -> dict[str, Any]:
    """Return medians, and the ratio of each pair."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    gc.disable()
    for repeat in range(repeats):
        for name in sorted(steps, reverse=repeat % 2 == 1):
            gc.collect()
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
    gc.enable()
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["transformers"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "seconds": {name: round(statistics.median(times), 4) for name, times in seconds.items()},
        "ratio": round(middle, 3),
        "ratio_quartiles": [round(low, 3), round(high, 3)],
    }


if __name__ == "__main__":
    main()
