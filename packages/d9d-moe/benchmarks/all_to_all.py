"""Bytes that an all-to-all dispatch sends between ranks, compared with the minimum for the routing.

    uv run --group test python packages/d9d-moe/benchmarks/all_to_all.py --output all_to_all.json

Ranks are processes of this machine, over gloo. Bytes are counted at the operators of the collective. The minimum is
one row per token and other rank that has some of its experts, for dispatch and combine, forward and backward.
`metadata` counts the other data sent: numbers of rows, expert indices, and the weights and their gradients.
`per_choice` is the cost of sending one row per choice of an expert on another rank.
"""

import argparse
import json
from pathlib import Path
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


@final
class _Sent(TorchDispatchMode):
    """Adds the bytes that a rank sends to other ranks in all-to-alls: rows of tokens, and other data."""

    def __init__(self, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.bytes = {"moved": 0, "metadata": 0}
        self._rank, self._hidden_size = rank, hidden_size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            x, _, sizes, _ = args
            is_row = x.shape[-1] == self._hidden_size and x.is_floating_point()
            self.bytes["moved" if is_row else "metadata"] += (sum(sizes) - sizes[self._rank]) * x[:1].nbytes
        return func(*args, **(kwargs or {}))


def _count(routing_name: str, sizes: dict[str, int]) -> dict[str, int]:
    """Return the bytes that this rank sends in forward and backward, and the minimum."""
    with MeshConfig(data_parallel_shard=-1, expert_parallel=-1).build() as ctx:
        routing = _routing(routing_name, sizes, seed=ctx.rank)
        tokens = torch.randn(sizes["tokens"], sizes["hidden_size"], requires_grad=True)
        routing.probabilities.requires_grad_()
        with _Sent(ctx.rank, sizes["hidden_size"]) as sent:
            dispatcher = AllToAllDispatcher(ctx.group_for("expert", "ep_shard"))
            dispatched = dispatcher.dispatch(tokens, routing, num_experts=sizes["experts"])
            dispatched.combine(dispatched.rows).wait().sum().backward()
        homes_TA = routing.indices // (sizes["experts"] // ctx.world_size)
        is_there_TR = torch.zeros(sizes["tokens"], ctx.world_size, dtype=torch.bool).scatter_(1, homes_TA, value=True)
        is_there_TR[:, ctx.rank] = False
    row_bytes = 4 * tokens[0].nbytes  # dispatch and combine, forward and backward
    return {
        **sent.bytes,
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
