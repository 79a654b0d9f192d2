import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from d9d_dist import MeshConfig, UserError
from d9d_dist.context_parallel.split import ContextSplit
from d9d_dist.testing import run_ranks


def _positions(rank: int, num_ranks: int, length: int) -> list[int]:
    size = length // (2 * num_ranks)
    last = 2 * num_ranks - 1 - rank
    return [*range(rank * size, (rank + 1) * size), *range(last * size, (last + 1) * size)]


def _round_trips() -> list[Any]:
    """Split and join random trees; return the positions and the split of one more row on this rank."""
    with MeshConfig(context_parallel_shard=-1).build() as ctx:
        split = ContextSplit(ctx.mesh_for("batch")["cp"])
        num_chunks = 2 * ctx.world_size

        # Ranks do not load conftest.py: without derandomize each rank would draw different examples.
        @settings(max_examples=30, derandomize=True, database=None, deadline=None)
        @given(
            before=st.lists(st.integers(1, 3), max_size=2),
            after=st.lists(st.integers(1, 3), max_size=2),
            size=st.integers(1, 3),
            dtype=st.sampled_from([torch.int64, torch.bool, torch.float64, torch.bfloat16]),
            backwards=st.booleans(),
        )
        def check(before: list[int], after: list[int], size: int, dtype: torch.dtype, backwards: bool) -> None:
            shape, dim = (*before, size * num_chunks, *after), len(before)
            tensor = (torch.rand(shape, device=ctx.device) * 100).to(dtype)
            torch.distributed.broadcast(tensor, src=0)
            dim = dim - len(shape) if backwards else dim
            tree: Any = {"a": [tensor, "text", 3], "b": (tensor.transpose(0, dim).contiguous().transpose(0, dim),)}
            part = split.split(tree, dim=dim)
            assert part["a"][1:] == ["text", 3]
            wanted = torch.tensor(_positions(ctx.rank, ctx.world_size, shape[dim]), device=ctx.device)
            assert torch.equal(part["a"][0], tensor.index_select(dim, wanted))
            joined = split.join(part, dim=dim)
            assert torch.equal(joined["a"][0], tensor)
            assert torch.equal(joined["b"][0], tensor)

        check()
        length = 3 * num_chunks
        return [split.positions(length).cpu(), split.split(torch.arange(length).unsqueeze(0))]


@pytest.mark.parametrize("world_size", [2, 4])
def test_join_is_the_inverse_of_split(world_size: int) -> None:
    for rank, (positions, of_the_batch) in enumerate(run_ranks(_round_trips, world_size=world_size)):
        assert positions.dtype == torch.int64
        assert positions.tolist() == [_positions(rank, world_size, 6 * world_size)]
        assert torch.equal(positions, of_the_batch)


def _gradients() -> list[Tensor]:
    with MeshConfig(context_parallel_shard=-1).build() as ctx:
        split = ContextSplit(ctx.mesh_for("batch")["cp"])
        generator = torch.Generator().manual_seed(0)
        row, weight = torch.randn(2, 2, 24, dtype=torch.float64, generator=generator).to(ctx.device)
        gradients = []
        for kind in ("equal", "partial"):
            part = split.split(row).clone().requires_grad_()
            # Equal: each rank computes the whole loss. Partial: each rank computes a different part of the loss.
            share = 1.0 if kind == "equal" else (1.0 + ctx.rank) / sum(range(1, ctx.world_size + 1))
            (split.join(part, gradient=kind).square() * weight * share).sum().backward()
            assert part.grad is not None
            gradients.append((part.grad - split.split(2 * row * weight)).abs().max().cpu())
        whole = row.clone().requires_grad_()
        split.split(whole).square().sum().backward()
        assert whole.grad is not None
        torch.distributed.all_reduce(whole.grad)
        return [*gradients, (whole.grad - 2 * row).abs().max().cpu()]


@pytest.mark.parametrize("world_size", [2, 4])
def test_join_and_split_have_a_backward(world_size: int) -> None:
    for errors in run_ranks(_gradients, world_size=world_size):
        assert all(error < 1e-14 for error in errors)


def test_a_single_rank_gets_the_whole_batch() -> None:
    with MeshConfig().build() as ctx:
        split = ContextSplit(ctx.mesh_for("batch")["cp"])
        tree = {"odd": torch.arange(7).unsqueeze(0)}
        assert split.split(tree) is tree
        assert split.join(tree) is tree
        assert split.positions(7).tolist() == [list(range(7))]


def _messages() -> list[str]:
    with MeshConfig(context_parallel_shard=-1).build() as ctx:
        split = ContextSplit(ctx.mesh_for("batch")["cp"])
        calls: list[Callable[[], object]] = [
            lambda: split.split({"labels": [torch.zeros(2, 9)]}),
            lambda: split.split(torch.zeros(9)),
            lambda: split.split({"weight": torch.zeros(8)}),
            lambda: split.join(torch.zeros(2, 3)),
            lambda: split.positions(6),
            lambda: ContextSplit(ctx.mesh_for("batch")),
        ]
        messages = []
        for call in calls:
            with pytest.raises(UserError) as caught:
                call()
            messages.append(str(caught.value))
        return messages


def test_invalid_calls_are_refused() -> None:
    expected = [
        r"the tensor \['labels'\]\[0\] has length 9; expected a multiple of 4, for two chunks per rank of the 2 "
        r"context-parallel ranks. Pad sequences, with ignored labels, to 12\.",
        r"the tensor has the shape \(9,\); expected the sequence in dim 1",
        r"the tensor \['weight'\] has the shape \(8,\); expected the sequence in dim 1. Do not pass it",
        r"the tensor has length 3; expected a multiple of 2: .* Join the result of `split`",
        r"a row has length 6; expected a multiple of 4",
        r"got a mesh with the axes \(pp, dp, cp, tp\); expected exactly one. Slice it: mesh\['cp'\]",
    ]
    for messages in run_ranks(_messages, world_size=2):
        for message, pattern in zip(messages, expected, strict=True):
            assert re.search(pattern, message), message
