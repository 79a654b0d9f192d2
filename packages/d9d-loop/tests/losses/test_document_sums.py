import pytest
import torch
from packed_rows import packed_rows
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

from d9d_dist import ContextSplit, UserError
from d9d_dist.testing import run_ranks
from d9d_loop.losses import sum_per_document


def test_sums_equal_a_loop_over_documents() -> None:
    rows = packed_rows()
    values = rows.values().requires_grad_()
    sums = sum_per_document(values, rows.document_ids)
    expected = torch.stack([each.sum() for each in rows.take(values, trained=False)]).view(3, 4)
    assert_close(sums[:, :4], expected)
    assert_close(sums.shape, torch.Size([3, 24]))
    sums.square().sum().backward()
    assert_close(values.grad, (2 * sums).gather(1, rows.document_ids))


def test_sums_are_computed_in_at_least_float32() -> None:
    ones = torch.ones(1, 1000, dtype=torch.bfloat16)
    assert_close(sum_per_document(ones, torch.zeros(1, 1000, dtype=torch.int64))[0, 0], torch.tensor(1000.0))


def test_other_shapes_and_ids_are_refused() -> None:
    with pytest.raises(UserError, match=r"the values have shape \(1, 3\), and the document ids \(1, 2\)"):
        sum_per_document(torch.ones(1, 3), torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(UserError, match="document ids are 0 to 4; expected 0 to 2"):
        sum_per_document(torch.ones(1, 3), torch.tensor([[0, 1, 4]]))


def _sums_of_a_rank() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    rows = packed_rows()
    values = rows.values()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    split = ContextSplit(mesh["cp"])
    own = split.split(values).clone().requires_grad_()
    sums = sum_per_document(own, split.split(rows.document_ids), cp=mesh["cp"])
    (sums.square().sum() / mesh.size()).backward()  # the loss of both ranks together is the sum of squares
    assert own.grad is not None
    return sums.detach(), split.join(own.grad)


def test_documents_may_span_context_parallel_ranks() -> None:
    torch.manual_seed(0)
    rows = packed_rows()
    values = rows.values().requires_grad_()
    expected = sum_per_document(values, rows.document_ids)
    expected.square().sum().backward()
    for sums, gradient in run_ranks(_sums_of_a_rank, world_size=2):
        assert_close(sums, expected.detach())
        assert_close(gradient, values.grad)
