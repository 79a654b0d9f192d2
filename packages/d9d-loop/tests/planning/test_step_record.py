"""Step record: FLOPs, bytes, peak memory, and answers to reads of the host."""

import pytest
import torch
from torch import nn

from d9d_dist.planned_device import each_block, recorded_blocks
from d9d_loop.planning import recorded
from d9d_loop.planning.dry_run_mode import DryRunMode
from d9d_loop.planning.step_record import RepeatMarks


def test_a_product_has_its_flops_bytes_and_shapes() -> None:
    a, b = torch.zeros(4, 8), torch.zeros(8, 2)
    with recorded() as record:
        a @ b
    (product,) = record.operations
    assert (product.name, product.flops, product.num_bytes) == ("mm", 2 * 4 * 8 * 2, 4 * (32 + 16 + 8))
    assert (product.shapes, product.results) == (((4, 8), (8, 2)), ((4, 2),))


def test_grouped_products_and_grouped_convolutions_have_their_flops() -> None:
    with DryRunMode(), recorded() as record:
        rows, weights = torch.zeros(6, 16, dtype=torch.bfloat16), torch.zeros(2, 16, 32, dtype=torch.bfloat16)
        torch._grouped_mm(rows, weights, offs=torch.zeros(2, dtype=torch.int32))
        image, kernel = torch.zeros(1, 4, 5, 5), torch.zeros(6, 2, 3, 3, requires_grad=True)
        torch.conv2d(image, kernel, groups=2).sum().backward()
    found = {each.name: each.flops for each in record.operations}
    assert found["_grouped_mm"] == 2 * 6 * 16 * 32
    assert found["convolution_backward"] == found["convolution"] == 2 * 6 * 9 * 2 * 9


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
    with DryRunMode(), recorded() as fake:
        run()
    assert fake.operations == real.operations
    assert fake.peak_bytes == real.peak_bytes


def test_the_host_reads_finite_numbers_and_unset_flags() -> None:
    with DryRunMode(), recorded():
        assert torch.zeros(()).item() == 1.0
        assert not torch.zeros((), dtype=torch.bool).item()
        assert torch.zeros(2, 2).tolist() == [[0, 0], [0, 0]]


def test_a_record_of_one_of_several_equal_blocks_counts_all_of_them() -> None:
    def run() -> None:
        total = torch.zeros(1)
        for block in each_block(17, 4):
            product = torch.ones(block.stop - block.start, 8) @ torch.ones(8, 8)
            total = total + product.sum()

    with DryRunMode(), recorded() as short:
        run()
    with DryRunMode(), recorded() as whole, recorded_blocks(lambda: lambda num_equal: False):
        run()
    assert short.operations == whole.operations
    assert short.peak_bytes == whole.peak_bytes


def test_a_tensor_has_no_share_of_a_freed_tensor_at_its_address() -> None:
    marks = RepeatMarks(1)
    for _ in range(100):
        repeated = torch.zeros(4)
        marks.add_state([repeated])
        assert marks.share(repeated) == 1
        del repeated
        assert marks.share(torch.zeros(4)) == 0


def test_a_device_query_is_answered_and_not_recorded() -> None:
    with DryRunMode():
        x, y = torch.zeros(2), torch.zeros(2, device="xla:1")
        with recorded() as record:
            devices = [torch.ops.prim.device(x), torch.ops.prim.device(y)]
    assert devices == [torch.device("cpu"), torch.device("xla:1")]
    assert record.operations == []


def test_equal_chunks_are_one_tensor_with_the_bytes_of_all() -> None:
    whole = torch.zeros(8, 3)
    with recorded() as real:
        torch.cat(torch.chunk(whole, 4, dim=0), dim=1)
    with DryRunMode() as mode, torch.no_grad(), recorded() as fake:
        joined = torch.cat(torch.chunk(mode.from_tensor(whole), 4, dim=0), dim=1)
    assert joined.shape == (2, 12)
    moved = [sum(each.num_bytes for each in record.operations) for record in (fake, real)]
    assert moved[0] == moved[1]
    assert fake.peak_bytes == real.peak_bytes


@pytest.mark.parametrize("has_positions", [False, True])
def test_only_rows_with_positions_have_a_mask_of_packed_samples(has_positions: bool) -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
    )
    with DryRunMode(), recorded() as record:
        model: nn.Module = transformers.LlamaForCausalLM(config)
        ids = torch.zeros(1, 6, dtype=torch.int64)
        model(input_ids=ids, use_cache=False, **({"position_ids": ids.clone()} if has_positions else {}))
    [attention] = [each for each in record.operations if "attention" in each.name]
    assert ((1, 1, 6, 6) in attention.shapes) == has_positions
