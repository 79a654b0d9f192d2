import pytest
import torch
from torch import Tensor, nn

from d9d_dist.values.buffer_values import BufferValues
from d9d_dist.values.recomputation import recompute

LARGE = 1 << 15  # float32 values of a buffer whose writes are found by its version


class _Model(nn.Module):
    mean: Tensor
    calls: Tensor
    counts: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("counts", torch.zeros(2), persistent=False)
        self.register_buffer("frequencies", torch.ones(2), persistent=False)
        self.register_buffer("lazy", None)
        self.register_buffer("table", torch.zeros(LARGE))

    def change(self) -> None:
        self.mean.data.add_(torch.nan)  # torch counts no write
        self.calls = self.calls + 1
        self.counts.add_(1)
        self.frequencies = torch.zeros(3)
        self.lazy = torch.ones(1)
        self.table[0] = 7


def _values(model: _Model) -> dict[str, Tensor | None]:
    return {name: None if each is None else each.clone() for name, each in model._buffers.items()}


def test_each_change_of_a_buffer_is_undone_in_the_same_object() -> None:
    model = _Model()
    before, objects = _values(model), dict(model._buffers)
    buffers = BufferValues(model)
    for _ in range(2):
        model.change()
        buffers.restore()
        for name in ("mean", "calls", "counts", "lazy", "table"):
            now, value = model._buffers[name], before[name]
            assert now is objects[name], name
            assert now is None or value is None or torch.equal(now, value), name
    assert len(model.get_buffer("frequencies")) == 3, "a cache that forward replaced depends on attributes"


def test_a_buffer_that_checkpoints_omit_is_undone_if_a_tensor_of_its_shape_replaced_it() -> None:
    model = _Model()
    first, buffers = model.counts, BufferValues(model)
    for keeps in (False, True):
        model.counts = model.counts + 1
        buffers.restore(unless=torch.tensor(keeps))
        assert model.counts.eq(float(keeps)).all()
    buffers.restore()
    assert model.counts is first
    assert first.eq(0).all()


def test_uncounted_writes_to_large_buffers_are_found_by_comparing_the_first_copies() -> None:
    model = _Model()
    buffers = BufferValues(model)  # as of a training: refreshed before each step
    for step in range(3):
        buffers.refresh()
        model.table.data.add_(1)
        if step == 1:
            buffers.restore()
            assert model.table.eq(1).all()
    each_call = BufferValues(model)  # as of a recomputation
    model.table.data.add_(1)
    assert not each_call.end_forward()
    each_call.restore()
    assert model.table.eq(2).all()


def test_a_refresh_copies_the_current_values() -> None:
    model = _Model()
    buffers = BufferValues(model)
    copies = {each.data_ptr() for each in buffers.tensors()}
    buffers.refresh()
    kept = copies & {each.data_ptr() for each in buffers.tensors()}
    assert len(kept) >= 1, "the large buffer is not copied again"
    model.mean.data.fill_(3)
    model.table.add_(1)
    buffers.refresh()
    model.change()
    buffers.restore()
    assert model.mean.eq(3).all()
    assert model.table.eq(1).all()


def test_copies_of_large_buffers_that_a_forward_did_not_write_are_dropped() -> None:
    model = _Model()
    buffers = BufferValues(model)
    model.counts.add_(1)
    assert [slot.name for slot in buffers.end_forward()] == ["counts"]
    assert {each.numel() for each in buffers.tensors()} == {1, 2}
    model.mean.data.fill_(3)
    model.table.add_(1)
    buffers.restore()
    assert model.mean.eq(0).all()
    assert model.table.eq(1).all(), "its copy is dropped"


def test_a_graph_that_needs_a_small_buffer_stays_valid() -> None:
    model, x = _Model(), torch.ones(2, requires_grad=True)
    model.mean.fill_(2)
    buffers, y = BufferValues(model), x * model.mean
    buffers.restore()
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.eq(2).all()


def test_only_buffers_that_checkpoints_omit() -> None:
    model = _Model()
    buffers = BufferValues(model, "not saved", device=torch.device("cpu"))
    model.change()
    buffers.restore()
    assert model.counts.eq(0).all()
    assert model.calls == 1
    assert model.mean.isnan().all()


@pytest.mark.parametrize("keeps", [True, False])
def test_a_condition_on_the_device_decides(keeps: bool) -> None:
    model = _Model()
    buffers = BufferValues(model)
    model.change()
    buffers.restore(unless=torch.tensor(keeps))
    assert model.calls == float(keeps)
    assert bool(model.mean.isnan().all()) is keeps, "0 * NaN must not remain"
    assert (model._buffers["lazy"] is None) is not keeps
    assert model.table[0] == (7 if keeps else 0)


class _Cached(nn.Module):
    """Module with a table, and a number that says for what it is valid."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor
        self.register_buffer("table", torch.ones(4), persistent=False)
        self.version = 0

    def forward(self, x: torch.Tensor, version: int) -> torch.Tensor:
        if version != self.version:
            self.table, self.version = torch.full((4,), 1.0 + version), version
        return x * self.table


def test_a_cache_is_not_torn_from_the_number_that_describes_it() -> None:
    module, x = _Cached(), torch.ones(4, requires_grad=True)
    for _ in range(2):
        before = BufferValues(module)
        assert module(x, 1).eq(2).all()
        before.restore(unless=torch.tensor(False))
        before.restore()
    recompute(module)
    outputs = [module(x.exp(), version) for version in (2, 3)]
    gradients = [torch.autograd.grad(each.sum(), x)[0] for each in outputs]
    torch.testing.assert_close(gradients, [3 * torch.ones(4).exp(), 4 * torch.ones(4).exp()])
    assert module(x, 3).eq(4).all()


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_buffers_of_torchscript_are_restored() -> None:
    model = torch.jit.script(nn.BatchNorm1d(2))
    buffers = BufferValues(model)
    model(torch.randn(4, 2))
    assert model.num_batches_tracked == 1
    buffers.restore()
    assert model.num_batches_tracked == 0
