"""Check of every rank's device and links, before the model is built: one slow or faulty part affects all ranks.

Each device multiplies matrices of small integers, whose product is exact in float32 for any summation order, and writes
and reads memory. For the links, each rank sends a message to the next rank of a ring, which measures each link
separately. An all-reduce of the same size over all ranks follows; the slowest link determines its time.
"""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import torch
import torch.distributed as dist

from d9d_dist import DistributedContext, gather_json
from d9d_loop.resilience.resilience_config import HealthConfig

_MIB = 1 << 20
_REPEATS = 3  # runs per measurement; the fastest counts, because the first compiles kernels and opens connections
_LEAST_SECONDS = 1e-3  # shorter measurements are never reported as slow
_LEAST_SHARE = 0.05  # fraction of the step time; shorter waits for data are never reported as slow
_SHOWN = 8
_MAX_CPU_MIB = 4  # a CPU writes new pages slowly: 64 MiB would take half of the time in which a small job starts


class HealthError(RuntimeError):
    """Failure or wrong result of a device or link; raised with the same message on all ranks."""


@dataclass(frozen=True, slots=True)
class RankHealth:
    """Measurements of a rank. Times are in seconds.

    Attributes:
        link_seconds: Time of a message from the previous rank; for rank 0, from the last rank.
        wrong: Descriptions of the checks that failed or gave wrong values; empty if all passed.
        data_seconds: Time per step that the rank has waited for its data; 0 before the first step.
    """

    rank: int
    host: str
    device: str
    compute_seconds: float
    memory_seconds: float
    link_seconds: float
    all_reduce_seconds: float
    wrong: tuple[str, ...]
    data_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class HealthReport:
    """Measurements of all ranks.

    Attributes:
        slow: Descriptions of the measurements that exceed `slow_factor` times the median, by part and rank.
    """

    ranks: tuple[RankHealth, ...]
    slow: Mapping[tuple[str, int], str]

    def __str__(self) -> str:
        usual = ", ".join(f"{what} {1e3 * median(times):.1f} ms" for what, times in _times(self.ranks).items())
        return "\n".join([f"health of {len(self.ranks)} ranks, medians: {usual}.", *self.slow.values()])


def check_health(
    config: HealthConfig, *, ctx: DistributedContext, data_seconds: float = 0.0, step_seconds: float = 0.0
) -> HealthReport | None:
    """Check and time every rank's device and links; return the measurements, or `None` if the check is disabled.

    Call it before models are built: it takes well below a second, for any number of ranks. Slow measurements are only
    returned: print the report if `slow` is not empty. Collective over all ranks: sends and receives between neighbors,
    all-reduces, barriers, and an all-gather.

    `data_seconds` is the time per step that this rank has waited for its data, `step_seconds` the time of a step. Waits
    for data of less than a twentieth of a step are never reported as slow.

    Raises:
        HealthError: On all ranks, if a device or a link of any rank fails or gives wrong values. Lists the faulty ones.
    """
    if not config.enabled:
        return None
    gathered = gather_json(asdict(replace(_measure(config, ctx), data_seconds=data_seconds)))
    ranks = tuple(replace(RankHealth(**each), wrong=tuple(each["wrong"])) for each in gathered)
    wrong = [f"rank {rank.rank} ({rank.device} of {rank.host}): {what}" for rank in ranks for what in rank.wrong]
    if wrong:
        shown = "\n".join(f"- {problem}" for problem in wrong[:_SHOWN])
        more = f"\nand {len(wrong) - _SHOWN} more" if wrong[_SHOWN:] else ""
        raise HealthError(f"the health check failed:\n{shown}{more}\nStart the job without these machines.")
    return HealthReport(ranks, find_slow(ranks, factor=config.slow_factor, step_seconds=step_seconds))


def find_slow(ranks: Sequence[RankHealth], *, factor: float, step_seconds: float = 0.0) -> dict[tuple[str, int], str]:
    """Describe the measurements that took more than `factor` times the median over ranks, by part and rank.

    Measurements below a millisecond are omitted, and waits for data below a twentieth of a step. All-reduce times are
    not compared, since one slow rank makes the all-reduce slow on every rank.
    """
    found: dict[tuple[str, int], str] = {}
    for what, times in _times(ranks).items():
        usual = median(times)
        least = max(factor * usual, _LEAST_SECONDS, _LEAST_SHARE * step_seconds if what == "data" else 0.0)
        for rank, seconds in zip(ranks, times, strict=True):
            if what != "all-reduce" and seconds > least:
                times_usual = f", {seconds / usual:.1f} times the median" if usual else ""
                found[what, rank.rank] = (
                    f"slow {what} of {_where(what, rank, ranks)}: {1e3 * seconds:.1f} ms{times_usual}."
                )
    return found


def _times(ranks: Sequence[RankHealth]) -> Mapping[str, list[float]]:
    return {
        "compute": [rank.compute_seconds for rank in ranks],
        "memory": [rank.memory_seconds for rank in ranks],
        "link": [rank.link_seconds for rank in ranks],
        "data": [rank.data_seconds for rank in ranks],
        "all-reduce": [rank.all_reduce_seconds for rank in ranks],
    }


def _where(what: str, rank: RankHealth, ranks: Sequence[RankHealth]) -> str:
    if what != "link":
        return f"rank {rank.rank} ({rank.device} of {rank.host})"
    before = ranks[rank.rank - 1]
    return f"ranks {before.rank} to {rank.rank} ({before.host} to {rank.host})"


def _measure(config: HealthConfig, ctx: DistributedContext) -> RankHealth:
    """Measure this rank. Device errors are recorded, not raised, since peers wait for this rank in the link check."""
    wrong: list[str] = []
    compute = _guarded(lambda: _compute(config.matrix_size, ctx), wrong, "computing")
    memory_mib = min(config.memory_mib, _MAX_CPU_MIB) if ctx.device.type == "cpu" else config.memory_mib
    memory = _guarded(lambda: _memory(memory_mib * _MIB // 4, ctx), wrong, "memory")
    link = all_reduce = 0.0
    if ctx.world_size > 1:
        size = config.message_mib * _MIB // 4
        link, is_right = _link(size, ctx)
        wrong += [] if is_right else [f"data received from rank {(ctx.rank - 1) % ctx.world_size} is wrong"]
        all_reduce, is_right = _all_reduce(size, ctx)
        wrong += [] if is_right else ["an all-reduce returned wrong sums"]
    times = (compute, memory, link, all_reduce)
    return RankHealth(ctx.rank, socket.gethostname(), str(ctx.device), *times, wrong=tuple(wrong))


def _guarded(measure: Callable[[], tuple[float, bool]], wrong: list[str], what: str) -> float:
    try:
        seconds, is_right = measure()
    except (RuntimeError, MemoryError) as error:
        wrong.append(f"{what} failed: {str(error).splitlines()[0]}")
        return 0.0
    wrong += [] if is_right else [f"{what} returned wrong values"]
    return seconds


def _compute(size: int, ctx: DistributedContext) -> tuple[float, bool]:
    """Time the product of a[i, k] = (i + k) mod 3 and b[k, j] = (k + j) mod 5 - 2; check its row and column sums."""
    index = torch.arange(size, device=ctx.device)
    a_MK = (index[:, None] + index) % 3
    b_KN = (index[:, None] + index) % 5 - 2
    a, b = a_MK.float(), b_KN.float()
    seconds, product_MN = _fastest(lambda: a @ b, ctx)
    # The expected row and column sums need only matrix-vector products, not a second matrix product.
    rows_M, columns_N = (a_MK * b_KN.sum(1)).sum(1), (b_KN * a_MK.sum(0)[:, None]).sum(0)
    product = product_MN.round().long()
    return seconds, torch.equal(product.sum(1), rows_M) and torch.equal(product.sum(0), columns_N)


def _memory(size: int, ctx: DistributedContext) -> tuple[float, bool]:
    """Write a pattern and its complement to memory, time the second write, and compare the values."""
    pattern = torch.arange(size, dtype=torch.int32, device=ctx.device)
    seconds, copy = _fastest(pattern.bitwise_not, ctx)
    return seconds, torch.equal(copy.bitwise_not_(), pattern)


def _link(size: int, ctx: DistributedContext) -> tuple[float, bool]:
    """Time a message to the next rank, and check the message received from the previous rank."""
    before, after = (ctx.rank - 1) % ctx.world_size, (ctx.rank + 1) % ctx.world_size
    message = _message(ctx.rank, size, ctx)
    received = torch.empty_like(message)

    def exchange() -> torch.Tensor:
        sends = dist.P2POp(dist.isend, message, after)
        receives = dist.P2POp(dist.irecv, received, before)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()
        return received

    seconds, _ = _fastest(exchange, ctx, together=True)
    return seconds, torch.equal(received, _message(before, size, ctx))


def _all_reduce(size: int, ctx: DistributedContext) -> tuple[float, bool]:
    """Time an all-reduce of small integers, which differ between ranks, and check the sums."""
    message = _message(ctx.rank, size, ctx)

    def reduce() -> torch.Tensor:
        total = message.clone()
        dist.all_reduce(total)
        return total

    seconds, total = _fastest(reduce, ctx, together=True)
    ranks = torch.arange(ctx.world_size, device=ctx.device)
    # Sums of (x + rank) mod 256 over ranks, for each x in 0..255. Integers below 2^24 are exact in float32.
    sums = ((torch.arange(256, device=ctx.device)[:, None] + ranks) % 256).sum(1).float()
    return seconds, torch.equal(total, sums[torch.arange(size, device=ctx.device) % 256])


def _message(rank: int, size: int, ctx: DistributedContext) -> torch.Tensor:
    return ((torch.arange(size, device=ctx.device) + rank) % 256).float()


def _fastest(
    work: Callable[[], torch.Tensor], ctx: DistributedContext, *, together: bool = False
) -> tuple[float, torch.Tensor]:
    """Return the shortest time of a few runs in seconds, and the last result. `together` starts runs with a barrier."""
    seconds = []
    for _ in range(_REPEATS):
        if together:
            ctx.barrier()
        start = time.perf_counter()
        result = work()
        if ctx.device.type != "cpu":
            torch.accelerator.synchronize(ctx.device)
        seconds.append(time.perf_counter() - start)
    return min(seconds), result
