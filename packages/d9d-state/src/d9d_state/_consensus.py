"""What ranks decide together, over tensors of bytes and integers only, so that no peer's object is ever unpickled."""

import torch
import torch.distributed as dist

from d9d_dist import DistributedContext
from d9d_state._tensor_bytes import bytes_of
from d9d_state.errors import StateError
from d9d_state.json_value import JsonValue, dump_json, parse_json

_MAX_PROBLEM_BYTES = 4000  # of the text of one rank's problem
_MAX_BYTES = 1 << 28  # of what one rank gives, so that a length that is nonsense allocates nothing


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


def exchange_bytes(
    data: bytes, ctx: DistributedContext | None, *, group: dist.ProcessGroup | None = None
) -> list[bytes]:
    """What each rank gives, on every rank, in the order of ranks. Collective: one or two all-gathers of plain bytes.

    Args:
        data: What this rank gives; may be empty. If all ranks give nothing, only lengths travel.
        ctx: The ranks; `None` for this process alone.
        group: A group of all ranks that works on the CPU, for a thread beside the training; `None` for the default
            group, on the device of the context.

    Raises:
        StateError: On every rank, if what one of them gives is too long.
    """
    if ctx is None or ctx.world_size == 1:
        return [data]
    device = ctx.device if group is None else torch.device("cpu")
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    lengths = [torch.zeros_like(length) for _ in range(ctx.world_size)]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(size) for size in lengths]
    if not all(0 <= size <= _MAX_BYTES for size in sizes):
        raise StateError(f"ranks give {sizes} bytes; expected 0 to {_MAX_BYTES} of each.")
    if not any(sizes):
        return [b""] * len(sizes)
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    gathered = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return [bytes(bytes_of(part.cpu())[:size]) for part, size in zip(gathered, sizes, strict=True)]


def exchange_json(
    value: JsonValue, ctx: DistributedContext | None, *, group: dist.ProcessGroup | None = None
) -> list[JsonValue]:
    """The value of each rank, on every rank, in the order of ranks; tuples come as lists. Collective.

    Args:
        value: What this rank gives.
        ctx: The ranks; `None` for this process alone.
        group: As in `exchange_bytes`.

    Raises:
        StateError: On every rank, if what one of them gives is too long.
        ValueError: If the value is no JSON; then the other ranks wait for it in vain.
    """
    return [parse_json(data) for data in exchange_bytes(dump_json(value), ctx, group=group)]


def agree(problem: str | None, ctx: DistributedContext | None, *, group: dist.ProcessGroup | None = None) -> None:
    """Go on only if no rank has a problem. Collective.

    Args:
        problem: What is wrong on this rank; `None` if nothing is.
        ctx: The ranks; `None` for this process alone.
        group: As in `exchange_bytes`.

    Raises:
        StateError: On every rank, with the problem of each rank that has one.
    """
    data = b"" if problem is None else problem.encode(errors="replace")[:_MAX_PROBLEM_BYTES] or b"unknown"
    texts = [given.decode(errors="replace") for given in exchange_bytes(data, ctx, group=group)]
    if not any(texts):
        return
    if len(texts) == 1:
        raise StateError(problem)
    raise StateError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text))


def broadcast_int(value: int, ctx: DistributedContext | None) -> int:
    """The main process's integer, on every rank. Collective."""
    if ctx is None or ctx.world_size == 1:
        return value
    shared = torch.tensor([value], dtype=torch.int64, device=ctx.device)
    dist.broadcast(shared, src=0)
    return int(shared)
