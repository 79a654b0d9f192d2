import random
import re

import pytest
import torch

from d9d_state.checkpoint.boxes import Box, cover_problem


def _split(draws: random.Random, box: Box, depth: int) -> list[Box]:
    """Split a box randomly in two, repeatedly."""
    dims = [dim for dim, size in enumerate(box.shape) if size > 1]
    if depth == 0 or not dims:
        return [box]
    dim = draws.choice(dims)
    cut = draws.randrange(1, box.shape[dim])
    parts = []
    for start, size in ((0, cut), (cut, box.shape[dim] - cut)):
        offset, shape = list(box.offset), list(box.shape)
        offset[dim] += start
        shape[dim] = size
        parts += _split(draws, Box(tuple(offset), tuple(shape)), depth - 1)
    return parts


def _is_cover(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Check the cover by counting every element."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        counts[tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))] += 1
    return bool((counts == 1).all())


def test_cover_problem_matches_counting_elements() -> None:
    draws = random.Random(0)  # noqa: S311
    verdicts = set()
    for _ in range(300):
        shape = tuple(draws.randrange(1, 6) for _ in range(draws.randrange(4)))
        boxes = _split(draws, Box((0,) * len(shape), shape), depth=3)
        match draws.randrange(4):
            case 0:
                boxes.pop(draws.randrange(len(boxes)))
            case 1:
                boxes.append(draws.choice(boxes))
            case 2:
                boxes[0] = Box(boxes[0].offset, draws.choice(boxes).shape)
        draws.shuffle(boxes)
        inside = all(
            start + size <= total
            for box in boxes
            for start, size, total in zip(box.offset, box.shape, shape, strict=True)
        )
        expected = inside and _is_cover(shape, boxes)
        assert (cover_problem(shape, boxes) is None) == expected, (shape, boxes)
        verdicts.add(expected)
    assert verdicts == {True, False}


@pytest.mark.parametrize(
    ("boxes", "problem"),
    [
        ([Box((0, 0), (2, 3))], "its chunks contain 6 of 12 elements"),
        (
            [Box((0, 0), (3, 3)), Box((2, 0), (2, 3))],
            r"the chunks \[3, 3\] at \[0, 0\] and \[2, 3\] at \[2, 0\] overlap",
        ),
        ([Box((0, 0), (5, 3))], r"the chunk \[5, 3\] at \[0, 0\] exceeds the shape \[4, 3\]"),
        ([Box((0,), (12,))], r"the chunk \[12\] at \[0\] is empty or has other dims than the shape \[4, 3\]"),
        ([Box((0, 0), (4, 3)), Box((4, 0), (0, 3))], r"the chunk \[0, 3\] at \[4, 0\] is empty or"),
    ],
)
def test_error_names_the_bad_boxes(boxes: list[Box], problem: str) -> None:
    found = cover_problem((4, 3), boxes)
    assert found is not None
    assert re.match(problem, found)


def test_a_tensor_without_elements_has_no_chunks() -> None:
    assert cover_problem((0, 3), []) is None
    assert cover_problem((), [Box((), ())]) is None
    assert cover_problem((), [Box((), ()), Box((), ())]) is not None


def test_cover_check_scales_to_many_boxes() -> None:
    boxes = [Box((row, 0), (1, 7)) for row in range(20_000)]
    assert cover_problem((20_000, 7), boxes) is None
