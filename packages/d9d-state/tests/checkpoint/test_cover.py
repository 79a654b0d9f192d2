import random
import re

import pytest
import torch

from d9d_dist import Region
from d9d_state.checkpoint.cover import cover_problem


def _split(draws: random.Random, region: Region, depth: int) -> list[Region]:
    """Split a region randomly in two, repeatedly."""
    dims = [dim for dim, size in enumerate(region.sizes) if size > 1]
    if depth == 0 or not dims:
        return [region]
    dim = draws.choice(dims)
    cut = draws.randrange(1, region.sizes[dim])
    parts = []
    for start, size in ((0, cut), (cut, region.sizes[dim] - cut)):
        offset, shape = list(region.offsets), list(region.sizes)
        offset[dim] += start
        shape[dim] = size
        parts += _split(draws, Region(tuple(offset), tuple(shape)), depth - 1)
    return parts


def _is_cover(shape: tuple[int, ...], regions: list[Region]) -> bool:
    """Check the cover by counting every element."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for region in regions:
        counts[tuple(slice(start, start + size) for start, size in zip(region.offsets, region.sizes, strict=True))] += 1
    return bool((counts == 1).all())


def test_cover_problem_matches_counting_elements() -> None:
    draws = random.Random(0)  # noqa: S311
    verdicts = set()
    for _ in range(300):
        shape = tuple(draws.randrange(1, 6) for _ in range(draws.randrange(4)))
        regions = _split(draws, Region((0,) * len(shape), shape), depth=3)
        match draws.randrange(4):
            case 0:
                regions.pop(draws.randrange(len(regions)))
            case 1:
                regions.append(draws.choice(regions))
            case 2:
                regions[0] = Region(regions[0].offsets, draws.choice(regions).sizes)
        draws.shuffle(regions)
        inside = all(
            start + size <= total
            for region in regions
            for start, size, total in zip(region.offsets, region.sizes, shape, strict=True)
        )
        expected = inside and _is_cover(shape, regions)
        assert (cover_problem(shape, regions) is None) == expected, (shape, regions)
        verdicts.add(expected)
    assert verdicts == {True, False}


@pytest.mark.parametrize(
    ("regions", "problem"),
    [
        ([Region((0, 0), (2, 3))], "its chunks contain 6 of 12 elements"),
        (
            [Region((0, 0), (3, 3)), Region((2, 0), (2, 3))],
            r"the chunks \[3, 3\] at \[0, 0\] and \[2, 3\] at \[2, 0\] overlap",
        ),
        ([Region((0, 0), (5, 3))], r"the chunk \[5, 3\] at \[0, 0\] exceeds the shape \[4, 3\]"),
        ([Region((0,), (12,))], r"the chunk \[12\] at \[0\] is empty or has other dims than the shape \[4, 3\]"),
        ([Region((0, 0), (4, 3)), Region((4, 0), (0, 3))], r"the chunk \[0, 3\] at \[4, 0\] is empty or"),
    ],
)
def test_error_names_the_bad_boxes(regions: list[Region], problem: str) -> None:
    found = cover_problem((4, 3), regions)
    assert found is not None
    assert re.match(problem, found)


def test_a_tensor_without_elements_has_no_chunks() -> None:
    assert cover_problem((0, 3), []) is None
    assert cover_problem((), [Region((), ())]) is None
    assert cover_problem((), [Region((), ()), Region((), ())]) is not None


def test_cover_check_scales_to_many_boxes() -> None:
    regions = [Region((row, 0), (1, 7)) for row in range(20_000)]
    assert cover_problem((20_000, 7), regions) is None
