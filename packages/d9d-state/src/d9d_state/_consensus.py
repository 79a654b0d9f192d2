"""What ranks decide together, over tensors of bytes and integers only, so that no peer's object is ever unpickled."""

import torch
import torch.distributed as dist

from d9d_dist import DistributedContext
from d9d_state.errors import StateError

_MAX_PROBLEM_BYTES = 4000  # of the text of one rank's problem


def num_ranks(ctx: DistributedContext | None) -> int:
    """How many ranks take part.

    Raises:
        ValueError: If there are several ranks, but no context that says so.
    """
    if ctx is not None:
        return ctx.world_size
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(f"got no ctx on {dist.get_world_size()} ranks; pass the DistributedContext as ctx.")
    return 1


def is_main(ctx: DistributedContext | None) -> bool:
    """Whether this rank writes what is written once."""
    return ctx is None or ctx.is_main_process


def agree(problem: str | None, ctx: DistributedContext | None) -> None:
    """Go on only if no rank has a problem. Collective.

    Args:
        problem: What is wrong on this rank; `None` if nothing is.
        ctx: The ranks; `None` for this process alone.

    Raises:
        StateError: On every rank, with the problem of each rank that has one.
    """
    if ctx is None or ctx.world_size == 1:
        if problem is not None:
            raise StateError(problem)
        return
    text = "" if problem is None else problem
    own = torch.frombuffer(bytearray(text.encode()[:_MAX_PROBLEM_BYTES]) or bytearray(1), dtype=torch.uint8)
    length = torch.tensor([0 if problem is None else own.numel()], device=ctx.device)
    lengths = [torch.zeros_like(length) for _ in range(ctx.world_size)]
    dist.all_gather(lengths, length)
    sizes = [int(size) for size in lengths]
    if not any(sizes):
        return
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=ctx.device)
    padded[: sizes[ctx.rank]] = own[: sizes[ctx.rank]].to(ctx.device)
    gathered = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    texts = [bytes(data[:size].tolist()).decode(errors="replace") for data, size in zip(gathered, sizes, strict=True)]
    raise StateError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text))


def broadcast_int(value: int, ctx: DistributedContext | None) -> int:
    """The main process's integer, on every rank. Collective."""
    if ctx is None or ctx.world_size == 1:
        return value
    shared = torch.tensor([value], dtype=torch.int64, device=ctx.device)
    dist.broadcast(shared, src=0)
    return int(shared)
