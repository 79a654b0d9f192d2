"""Forward and backward of a mixture-of-experts layer, relative to the grouped products and the loop of `transformers`.

    uv run --group test python packages/d9d-moe/benchmarks/moe_layer.py --output moe_layer.json

All have the same weights and run alternately in one process, so other load on the machine affects all; compare
ratios, not seconds. Outputs and gradients are compared before the timing.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from d9d_moe import MoELayer, TopKRouter


def main() -> None:
    """Measure, print the results as JSON, and optionally write them to a file."""
    parser = argparse.ArgumentParser(description="Time of a mixture-of-experts layer, forward and backward.")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--intermediate-size", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--peers", choices=["grouped_mm", "eager"], nargs="+", default=["grouped_mm", "eager"])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    dtype: torch.dtype = getattr(torch, args.dtype)
    ours = our_layer(args).to(dtype)
    peers = {name: their_layer(args, name).to(dtype) for name in args.peers}
    for peer in peers.values():
        copy_weights(ours, peer)
    layers: dict[str, nn.Module] = {"ours": ours, **{f"transformers {name}": peer for name, peer in peers.items()}}
    x = torch.randn(1, args.tokens, args.hidden_size, dtype=dtype)
    gradient = torch.randn_like(x)
    figures = {
        **{name: value for name, value in vars(args).items() if name != "output"},
        "threads": torch.get_num_threads(),
        "largest_difference": largest_difference(layers, x, gradient),
        **times(layers, x, gradient, args.repeats),
        f"share of products in {args.peers[0]}": round(share_of_products(peers[args.peers[0]], x, gradient), 3),
    }
    print(json.dumps(figures, indent=2))
    if args.output:
        args.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def our_layer(args: argparse.Namespace) -> MoELayer:
    """Build the layer of d9d-moe."""
    router = TopKRouter(args.hidden_size, num_experts=args.experts, top_k=args.top_k)
    return MoELayer(args.hidden_size, args.intermediate_size, router=router)


def their_layer(args: argparse.Namespace, implementation: str) -> nn.Module:
    """Build the layer of `transformers`."""
    from transformers import Qwen3MoeConfig  # noqa: PLC0415 - gpu.py runs without it
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock  # noqa: PLC0415

    config = Qwen3MoeConfig(
        hidden_size=args.hidden_size,
        moe_intermediate_size=args.intermediate_size,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = implementation
    return Qwen3MoeSparseMoeBlock(config)


@torch.no_grad()
def copy_weights(ours: MoELayer, theirs: nn.Module) -> None:
    """Copy the weights of the d9d-moe layer to the layer of `transformers`."""
    theirs.get_parameter("gate.weight").copy_(ours.get_parameter("router.weight"))
    fused = torch.cat([ours.get_parameter(f"experts.{name}_proj.weight") for name in ("gate", "up")], dim=1)
    theirs.get_parameter("experts.gate_up_proj").copy_(fused)
    theirs.get_parameter("experts.down_proj").copy_(ours.experts.down_proj.weight)


def step(layer: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Run forward and backward; return the output and the input gradient."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x)
    y = y[0] if isinstance(y, tuple) else y
    torch.autograd.backward(y, gradient)
    return y.detach(), torch.empty_like(x) if x.grad is None else x.grad


def largest_difference(layers: dict[str, nn.Module], x: Tensor, gradient: Tensor) -> float:
    """Return the largest difference of outputs and gradients, relative to the largest value."""
    expected, *others = [step(layer, x, gradient) for layer in layers.values()]
    pairs = [pair for other in others for pair in zip(other, expected, strict=True)]
    return max(((got - wanted).abs().max() / wanted.abs().max()).item() for got, wanted in pairs)


def share_of_products(layer: nn.Module, x: Tensor, gradient: Tensor) -> float:
    """Return the share of a layer's CPU time that its matrix products take, which no other work around them changes."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            step(layer, x, gradient)
    events = profiler.key_averages()
    products = sum(each.self_cpu_time_total for each in events if each.key in {"aten::mm", "aten::bmm", "aten::addmm"})
    return products / sum(each.self_cpu_time_total for each in events)


def times(layers: dict[str, nn.Module], x: Tensor, gradient: Tensor, repeats: int) -> dict[str, float]:
    """Return median milliseconds of each layer, and the median ratios of d9d-moe, measured in interleaved rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    names = list(layers)
    for index in range(repeats):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            begin = time.perf_counter()
            step(layers[name], x, gradient)
            seconds[name].append(time.perf_counter() - begin)
    figures = {f"{name} ms": round(statistics.median(each) * 1e3, 2) for name, each in seconds.items()}
    for name in names[1:]:
        ratios = [ours / theirs for ours, theirs in zip(seconds["ours"], seconds[name], strict=True)]
        figures[f"ratio to {name}"] = round(statistics.median(ratios), 3)
    return figures


if __name__ == "__main__":
    main()
