"""Bytes that an all-to-all dispatch sends between ranks, compared with the minimum for the routing.

    uv run --group test python packages/d9d-moe/benchmarks/all_to_all.py --output all_to_all.json

Ranks are processes of this machine, over gloo. Bytes are counted at the calls of the collective. The minimum is one row
per token and other rank that has some of its experts, for dispatch and combine, forward and backward. `metadata` counts
the other data sent: numbers of rows, expert indices, and the weights and their gradients. `per_choice` is the cost of
sending one row per choice of an expert on another rank.
"""

import argparse
import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist import MeshConfig
from d9d_dist.testing import run_ranks
from d9d_moe import AllToAllDispatcher
from d9d_moe.router import Routing


def main() -> None:
    """Count, print the results as JSON, and optionally write them to a file."""
    parser = argparse.ArgumentParser(description="Bytes sent between ranks, relative to the minimum.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="tokens per rank")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    figures: dict[str, Any] = {name: value for name, value in vars(args).items() if name != "output"}
    for routing in ("balanced", "Zipf"):
        ranks = run_ranks(_count, routing, figures, world_size=args.ranks)
        total = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
        shares = {f"{name} / bound": total[name] / total["bound"] for name in ("moved", "metadata")}
        figures[routing] = {**total, **shares, "moved / per_choice": total["moved"] / total["per_choice"]}
    text = json.dumps(figures, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n", encoding="utf-8")


def _count(routing_name: str, sizes: dict[str, int]) -> dict[str, int]:
    """Return the bytes that this rank sends in forward and backward, and the minimum."""
    sent = {"moved": 0, "metadata": 0}
    real = dist.all_to_all_single

    def counted(received: Tensor, x: Tensor, arriving: Any = None, leaving: Any = None, **options: Any) -> Any:
        group = options["group"]
        parts = [len(x) // group.size()] * group.size() if leaving is None else leaving
        row_bytes = x[0].numel() * x.element_size() if len(x) else 0
        is_row = x.shape[1] == sizes["hidden_size"] and x.is_floating_point()
        sent["moved" if is_row else "metadata"] += (sum(parts) - parts[group.rank()]) * row_bytes
        return real(received, x, arriving, leaving, **options)

    with MeshConfig(data_parallel_shard=-1, expert_parallel=-1).build() as ctx:
        routing = _routing(routing_name, sizes, seed=ctx.rank)
        tokens = torch.randn(sizes["tokens"], sizes["hidden_size"], requires_grad=True)
        routing.probabilities.requires_grad_()
        with mock.patch.object(dist, "all_to_all_single", counted):
            dispatcher = AllToAllDispatcher(ctx.group_for("expert", "ep_shard"))
            dispatched = dispatcher.dispatch(tokens, routing, num_experts=sizes["experts"])
            dispatched.combine(dispatched.rows).wait().sum().backward()
        homes_TA = routing.indices // (sizes["experts"] // ctx.world_size)
        is_there_TR = torch.zeros(sizes["tokens"], ctx.world_size, dtype=torch.bool).scatter_(1, homes_TA, value=True)
        is_there_TR[:, ctx.rank] = False
    row_bytes = 4 * tokens[0].nbytes  # dispatch and combine, forward and backward
    return {
        **sent,
        "bound": int(is_there_TR.sum()) * row_bytes,
        "per_choice": int((homes_TA != ctx.rank).sum()) * row_bytes,
    }


def _routing(name: str, sizes: dict[str, int], *, seed: int) -> Routing:
    """Draw the experts of each token, uniformly or with a share of the n-th expert proportional to about 1 / n."""
    draws = torch.Generator().manual_seed(seed)
    shares = torch.ones(sizes["experts"]) if name == "balanced" else 1.0 / torch.arange(1, sizes["experts"] + 1)
    indices = torch.multinomial(shares.expand(sizes["tokens"], -1), sizes["top_k"], generator=draws)
    return Routing(indices, torch.full(indices.shape, 1 / sizes["top_k"]))


if __name__ == "__main__":
    main()
