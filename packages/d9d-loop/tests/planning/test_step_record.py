"""Step record: FLOPs, bytes, peak memory, and answers to reads of the host."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from d9d_loop.planning import recorded


def test_a_product_has_its_flops_bytes_and_shapes() -> None:
    a, b = torch.zeros(4, 8), torch.zeros(8, 2)
    with recorded() as record:
        a @ b
    (product,) = record.operations
    assert (product.name, product.flops, product.num_bytes) == ("mm", 2 * 4 * 8 * 2, 4 * (32 + 16 + 8))
    assert (product.shapes, product.results) == (((4, 8), (8, 2)), ((4, 2),))


def test_the_peak_counts_tensors_that_are_alive_together() -> None:
    with recorded() as record:
        first = torch.zeros(1000)
        del first
        second, third = torch.zeros(500), torch.zeros(700)
        del second, third
    assert record.peak_bytes == 4 * 1200


def test_fake_and_real_tensors_have_the_same_record() -> None:
    def run() -> None:
        x = torch.zeros(16, 16, requires_grad=True)
        (x @ x).relu().sum().backward()

    with recorded() as real:
        run()
    with FakeTensorMode(), recorded() as fake:
        run()
    assert [each.name for each in fake.operations] == [each.name for each in real.operations]
    assert (fake.flops, fake.bytes_moved, fake.peak_bytes) == (real.flops, real.bytes_moved, real.peak_bytes)


def test_the_host_reads_finite_numbers_and_unset_flags() -> None:
    with FakeTensorMode(), recorded():
        assert torch.zeros(()).item() == 1.0
        assert not torch.zeros((), dtype=torch.bool).item()
        assert torch.zeros(2, 2).tolist() == [[0, 0], [0, 0]]
