import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d_dist.collectives.consensus import gather_json
from d9d_loop.job.flop_formula import AttentionFlops, FlopFormula, ImageFlops, pairs_of_patches
from d9d_metrics import transformer_flops_per_token


def mask_of(attention: AttentionFlops, lengths: list[int]) -> np.ndarray:
    """Return the mask of a row of documents; chunks begin at the start of the row."""
    ids = np.repeat(np.arange(len(lengths)), lengths)
    query, key = np.indices((len(ids), len(ids)))
    allowed = ids[query] == ids[key]
    if attention.is_causal:
        allowed &= key <= query
    if attention.window is not None:
        allowed &= abs(query - key) < attention.window
    if attention.chunk is not None:
        allowed &= query // attention.chunk == key // attention.chunk
    return allowed


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 10),
    chunk=st.none() | st.integers(1, 10),
    is_causal=st.booleans(),
    padding=st.integers(0, 3),
)
def test_pairs_are_those_of_the_mask(
    lengths: list[int], window: int | None, chunk: int | None, is_causal: bool, padding: int
) -> None:
    is_causal = is_causal or chunk is not None
    attention = AttentionFlops(per_pair=1.0, is_causal=is_causal, window=window, chunk=chunk)
    numbers = torch.cat([*(torch.arange(1, length + 1) for length in lengths), torch.zeros(padding, dtype=torch.int64)])
    assert attention.pairs_at(numbers[None]) == mask_of(attention, lengths).sum()
    whole = [mask_of(attention, [length]).sum() for length in lengths]
    assert attention.pairs_of_lengths(lengths) == sum(whole)
    formula = FlopFormula(per_row=3.0, attention=(attention, AttentionFlops(per_pair=2.0)))
    row_by_row = sum(formula.at(numbers_L[None]) for numbers_L in (torch.arange(1, length + 1) for length in lengths))
    assert formula.of_lengths(lengths) == row_by_row
    assert FlopFormula.from_json(formula.to_json()) == formula


def test_images_that_were_not_measured_are_unknown_after_their_way_between_ranks() -> None:
    formula = FlopFormula(per_row=1.0, images=ImageFlops(per_patch=None))
    found = FlopFormula.from_json(gather_json(formula.to_json())[0])
    assert found == formula
    assert found.images is not None
    assert found.images.of({}) == 0
    assert math.isnan(found.images.of({"pixel_values": torch.ones(1, 3, 4, 4)}))


@pytest.mark.parametrize("training", [True, False])
def test_windows_frozen_weights_latent_and_linear_attention(training: bool) -> None:
    length, forward = 8, 2 * 100 + 6 * 15
    allowed = sum(mask_of(AttentionFlops(per_pair=1.0, window=window), [length]).sum() for window in (3, None))
    expected = (3 if training else 1) * (length * forward + 4 * 2 * (6 + 5) * allowed) - training * length * 2 * 60
    each = transformer_flops_per_token(
        num_matmul_parameters=100,
        num_layers=2,
        num_heads=4,
        head_dim=6,
        value_dim=5,
        sequence_length=length,
        window=3,
        num_window_layers=1,
        num_frozen_parameters=60,
        state_size=15,
        training=training,
    )
    assert each * length == pytest.approx(expected)


@settings(max_examples=30)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=3),
    window=st.none() | st.integers(1, 10),
)
def test_pairs_of_patches_are_those_of_their_windows(sizes: list[tuple[int, int, int]], window: int | None) -> None:
    total = 0
    for frames, height, width in sizes:
        row, column = np.indices((height, width)).reshape(2, -1) // (window or 9)
        total += frames * int(((row[:, None] == row) & (column[:, None] == column)).sum())
    assert int(pairs_of_patches(torch.tensor(sizes), window)) == total


def test_images_count_by_patches_or_by_tiles_without_padding() -> None:
    flops = ImageFlops(per_patch=10.0, per_pair=((None, 1.0), (2, 100.0)))
    sizes = torch.tensor([[1, 2, 3], [2, 1, 1]])
    inputs = {"pixel_values": torch.ones(8, 5), "image_grid_thw": sizes}
    assert float(flops.of(inputs)) == 10 * 8 + (36 + 2) + 100 * (16 + 4 + 2)
    tiles = torch.ones(2, 3, 3, 4, 5)
    tiles[1, 1:] = 0
    assert float(flops.of({"pixel_values": tiles})) == 10 * 4 * 4 * 5
    assert float(flops.of({"pixel_values": tiles[0]})) == 10 * 3 * 4 * 5
    assert flops.of({}) == 0


def test_only_images_of_the_measured_size_are_known_and_no_images_count_nothing() -> None:
    tiles = ImageFlops(per_patch=2.0, size=(4, 4))
    assert tiles.of({"pixel_values": torch.ones(3, 1, 4, 4)}) == 2.0 * 3 * 16
    assert math.isnan(tiles.of({"pixel_values": torch.ones(3, 1, 4, 8)}))
    grids = ImageFlops(per_patch=2.0, per_pair=((None, 1.0), (3, 1.0)))
    for num_patches in (0, 1):
        empty = {"pixel_values": torch.ones(num_patches, 6), "image_grid_thw": torch.ones(0, 3, dtype=torch.int64)}
        assert float(grids.of(empty)) == 0
