from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_accelerator import DeviceLog, FakeAccelerator, StreamOrder, why_no_fake_accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from d9d_dist.testing import RankError, RankPool

pytestmark = pytest.mark.skipif(why_no_fake_accelerator() is not None, reason=str(why_no_fake_accelerator()))


@cache
def _pool() -> RankPool:
    """Return a process of this file only: the fake accelerator stays for the rest of a process."""
    return RankPool()


def _run(function: Callable[..., Any], *args: Any) -> Any:
    return _pool().run(function, *args, world_size=1)[0]


def _attention(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    q, k = q.view(2, 4, 6, 8), k.view(2, 4, 6, 8)
    return F.scaled_dot_product_attention(q, k, k, is_causal=True).contiguous() * w.sum()


_PROGRAMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "products": lambda a, b, w: (a @ w).mT @ b,
    "views": lambda a, b, w: torch.cat((a, b))[::2].transpose(0, 1).reshape(-1, 4),
    "reductions": lambda a, b, w: torch.stack((a.softmax(-1).sum(0), b.logsumexp(0))).amax(0),
    "norm": lambda a, b, w: F.layer_norm(a, (32,)) + F.rms_norm(b, (32,)),
    "selection": lambda a, b, w: torch.where(a > b, a, b).topk(3).values,
    "dtypes": lambda a, b, w: (a.bfloat16() * b.bfloat16()).float() + (a > 0),
    "loss": lambda a, b, w: F.cross_entropy(a @ w, b.argmax(-1), reduction="none"),
    "attention": _attention,
    "in place": lambda a, b, w: (a * 1).add_(b).mul_(2).index_fill_(0, torch.arange(2, device=a.device), 1.0),
}


def _described(device: str) -> dict[str, list[Any]]:
    """Return shape, strides and dtype of the results and gradients of all programs."""
    if device == "fakegpu":
        FakeAccelerator.install()
    described = {}
    for name, program in _PROGRAMS.items():
        inputs = [torch.randn(shape, device=device, requires_grad=True) for shape in ((12, 32), (12, 32), (32, 32))]
        result = program(*inputs)
        result.sum().backward()
        tensors = [result, *(each.grad for each in inputs)]
        described[name] = [
            None if x is None else (tuple(x.shape), x.stride(), x.dtype, x.device.type == device) for x in tensors
        ]
    return described


def test_operators_have_the_shapes_strides_and_dtypes_of_the_cpu() -> None:
    assert _run(_described, "fakegpu") == _described("cpu")


def _host_waits() -> list[str]:
    device = FakeAccelerator.install()
    x = torch.ones(4, 4, device="fakegpu")
    pinned = torch.ones(4, pin_memory=True)
    with device.record() as log:
        pinned[1:].to("fakegpu", non_blocking=True)
        torch.empty(4, 4, pin_memory=True).copy_(x, non_blocking=True)
        (x + 1.0).sum()
        x.sum().item()
        x.tolist()
        x.nonzero()
        pinned.to("fakegpu")
        torch.ones(4).to("fakegpu", non_blocking=True)
        torch.tensor(1.0, device="fakegpu")
        torch.accelerator.synchronize()
        torch.accelerator.current_stream().record_event().synchronize()
    assert all(wait.stack[0].partition(" ")[2] == "_host_waits" for wait in log.host_waits)
    return [wait.name for wait in log.host_waits]


def test_every_wait_of_the_host_is_recorded() -> None:
    copy_in = "copy from pageable or with blocking"
    read = ["scalar read", "copy to host", "size of nonzero"]
    assert _run(_host_waits) == [*read, copy_in, copy_in, copy_in, "device synchronized", "event synchronized"]


def _memory() -> tuple[int, int, int]:
    device = FakeAccelerator.install()
    kept = torch.empty(256, device="fakegpu")
    before = device.allocated_bytes
    with device.record() as log:
        a = torch.empty(1000, device="fakegpu")  # 4,096 bytes
        b = a + a  # 4,096 bytes
        del a
        c = torch.empty(300, device="fakegpu")  # 1,536 bytes
        c.untyped_storage().resize_(0)
        del b, c
    assert log.start_bytes == before >= kept.nbytes
    return log.peak_bytes - before, device.allocated_bytes - before, len(log.of("allocation")) - len(log.of("free"))


def test_memory_is_counted_in_blocks() -> None:
    assert _run(_memory) == (8192, 0, 0)


def _counted() -> DeviceLog:
    device = FakeAccelerator.install()
    model = nn.Linear(32, 64, bias=False, device="fakegpu")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with device.record() as log:
        model(torch.empty(16, 32, device="fakegpu")).sum().backward()
        optimizer.step()
    return log


def test_kernels_have_flops_and_bytes() -> None:
    log = _run(_counted)
    products = log.of("kernel", name="mm")
    assert [product.flops for product in products] == [2 * 16 * 32 * 64] * 2 == [log.flops // 2] * 2
    assert products[0].num_bytes == 4 * (16 * 32 + 32 * 64 + 16 * 64)
    assert log.counts()["_fused_adamw_"] == 1


def _collectives() -> tuple[list[tuple[str, int, int]], bool, bool, tuple[int, ...], list[float]]:
    device = FakeAccelerator.install()
    with device.ranks(rank=3, world_size=8):
        mesh = init_device_mesh("fakegpu", (2, 4), mesh_dim_names=("a", "b"))
        x = torch.empty(4, 2, device="fakegpu")
        with device.record() as log:
            whole = DTensor.from_local(x, mesh["b"], [Shard(0)]).redistribute(placements=[Replicate()]).to_local()
            work = dist.all_reduce(x, async_op=True)
            torch.mm(x, x.mT)
            work.wait()
            torch.mm(x, x.mT)
            dist.isend(x, 1)
        counts = [torch.zeros(1) for _ in range(8)]
        dist.all_gather(counts, torch.tensor([5.0]))
    _, reduced, _ = collectives = log.of("collective")
    order, (beside, after) = StreamOrder(log), log.of("kernel", name="mm")
    entries = [(entry.name, entry.num_bytes, entry.number) for entry in collectives]
    return (
        entries,
        order.precedes(reduced, beside),
        order.precedes(reduced, after),
        tuple(whole.shape),
        torch.cat(counts).tolist(),
    )


def _results_on_cpu() -> dict[str, list[float]]:
    device, found = FakeAccelerator.install(), {}
    with device.ranks(rank=3, world_size=4):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
            total = torch.tensor([3.0])
            dist.all_reduce(total, op=op)
            found[str(op)] = total.tolist()
        part, mixed = torch.zeros(2), torch.zeros(8)
        dist.reduce_scatter_tensor(part, torch.arange(8.0))
        dist.all_to_all_single(mixed, torch.arange(8.0))
        found |= {"reduce_scatter": part.tolist(), "all_to_all": mixed.tolist()}
        with pytest.raises(NotImplementedError, match="all_to_all of CPU tensors only for one tensor in equal parts"):
            dist.all_to_all_single(torch.zeros(3), torch.zeros(8), [1, 1, 1, 0], [2, 2, 2, 2])
    return found


def test_collectives_on_the_cpu_are_those_of_ranks_with_equal_values() -> None:
    assert _run(_results_on_cpu) == {
        "RedOpType.SUM": [12.0],
        "RedOpType.AVG": [3.0],
        "RedOpType.MAX": [3.0],
        "RedOpType.PRODUCT": [81.0],
        "reduce_scatter": [24.0, 28.0],
        "all_to_all": [6.0, 7.0] * 4,
    }


def test_collectives_run_beside_the_stream_until_it_waits() -> None:
    entries, beside, after, shape, counts = _run(_collectives)
    assert entries == [("all_gather", 128, 4), ("all_reduce", 32, 8), ("send", 32, 8)]
    assert (beside, after) == (False, True)
    assert shape == (16, 2)
    assert counts == [5.0] * 8


def _mixed() -> None:
    FakeAccelerator.install()
    torch.cat((torch.ones(4, device="fakegpu"), torch.ones(4)))


def test_tensors_of_two_devices_are_an_error() -> None:
    with pytest.raises(RankError, match=r"cat.out got tensors on fakegpu, and CPU tensors of shapes \[\(4,\)\]"):
        _run(_mixed)


def _answered() -> tuple[float, list[int]]:
    device = FakeAccelerator.install()
    device.answer("_read_counts", lambda shape: range(shape[0]))
    return torch.ones((), device="fakegpu").item(), _read_counts()


def _read_counts() -> list[int]:
    return torch.ones(3, dtype=torch.int64, device="fakegpu").tolist()


def test_reads_of_the_host_return_zeros_or_the_given_answers() -> None:
    assert _run(_answered) == (0.0, [0, 1, 2])


def test_the_cpp_part_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert str(why_no_fake_accelerator()).startswith(
        "the fake accelerator is compiled at first use, which needs g++ and ninja"
    )
