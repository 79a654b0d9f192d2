"""Collectives on bytes, JSON and errors. They send tensors only, so a rank never unpickles data from another rank."""

import torch
import torch.distributed as dist

from d9d_dist import DistributedContext
from d9d_state._tensor_bytes import bytes_of
from d9d_state.errors import StateError
from d9d_state.json_value import JsonValue, dump_json, parse_json

_MAX_PROBLEM_BYTES = 4000  # longer error texts of a rank are truncated
_MAX_BYTES = 1 << 28  # limit per rank: a corrupt length must not allocate memory


def num_ranks(ctx: DistributedContext | None) -> int:
    """Return the number of ranks.

    Raises:
        ValueError: If the default process group has several ranks but `ctx` is `None`.
    """
    if ctx is not None:
        return ctx.world_size
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(f"got no ctx on {dist.get_world_size()} ranks; pass the DistributedContext as ctx.")
    return 1


def is_main(ctx: DistributedContext | None) -> bool:
    """Return True on the main process, which writes the files that exist once."""
    return ctx is None or ctx.is_main_process


def exchange_bytes(
    data: bytes, ctx: DistributedContext | None, *, group: dist.ProcessGroup | None = None
) -> list[bytes]:
    """All-gather bytes of different lengths. Collective: one all-gather of the lengths and one of the padded bytes.

    Args:
        data: This rank's bytes. If they are empty on all ranks, the second all-gather is skipped.
        ctx: Distributed context; `None` for a single process.
        group: Gloo group of all ranks, for use in a background thread. `None` uses the default group with tensors on
            `ctx.device`.

    Returns:
        The bytes of each rank, in rank order.

    Raises:
        StateError: On every rank, if the bytes of one rank exceed the size limit.
    """
    if ctx is None or ctx.world_size == 1:
        return [data]
    device = ctx.device if group is None else torch.device("cpu")
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    lengths = [torch.zeros_like(length) for _ in range(ctx.world_size)]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(size) for size in lengths]
    if not all(0 <= size <= _MAX_BYTES for size in sizes):
        raise StateError(f"ranks send {sizes} bytes; expected 0 to {_MAX_BYTES} from each rank.")
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
    """All-gather a JSON value. Collective.

    Args:
        value: This rank's value.
        ctx: Distributed context; `None` for a single process.
        group: As in `exchange_bytes`.

    Returns:
        The value of each rank, in rank order. Tuples become lists.

    Raises:
        StateError: On every rank, if the text of one rank exceeds the size limit.
        ValueError: If the value is not JSON. Only this rank raises; the other ranks wait in the all-gather.
    """
    return [parse_json(data) for data in exchange_bytes(dump_json(value), ctx, group=group)]


def agree(problem: str | None, ctx: DistributedContext | None, *, group: dist.ProcessGroup | None = None) -> None:
    """Raise on all ranks if any rank has an error. Collective.

    Args:
        problem: Error text of this rank; `None` if it has no error.
        ctx: Distributed context; `None` for a single process.
        group: As in `exchange_bytes`.

    Raises:
        StateError: On every rank, with the error text of each rank that has one.
    """
    data = b"" if problem is None else problem.encode(errors="replace")[:_MAX_PROBLEM_BYTES] or b"unknown"
    texts = [given.decode(errors="replace") for given in exchange_bytes(data, ctx, group=group)]
    if not any(texts):
        return
    if len(texts) == 1:
        raise StateError(problem)
    raise StateError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text))


def broadcast_int(value: int, ctx: DistributedContext | None) -> int:
    """Broadcast an integer from the main process. Collective."""
    if ctx is None or ctx.world_size == 1:
        return value
    shared = torch.tensor([value], dtype=torch.int64, device=ctx.device)
    dist.broadcast(shared, src=0)
    return int(shared)
