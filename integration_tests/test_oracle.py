"""The grid of the oracle: every layout computes what one process computes, in float64, number by number."""

from collections.abc import Iterator
from itertools import combinations

import pytest
import torch
from oracle import DEGREES, FACTORS, Cell, grid, is_complete, is_paired, is_possible, main, parse_cell

from d9d_dist import UserError
from d9d_dist.testing import accelerators_for
from d9d_loop.testing import parse_layout


@pytest.mark.parametrize("cell", grid(), ids=lambda cell: cell.name)
def test_equals_one_process(cell: Cell) -> None:
    found = list(cell.differences())
    assert not found, f"{len(found)} differences. First: {found[0]}"


@pytest.mark.gpu
@pytest.mark.parametrize("cell", grid(), ids=lambda cell: cell.name)
def test_accelerators_equal_one_process_on_the_cpu(cell: Cell) -> None:
    ranks = parse_layout(cell.layout).world_size
    if not accelerators_for(ranks):
        pytest.skip(f"needs {ranks} accelerators; this machine has {torch.accelerator.device_count()}")
    found = list(cell.differences(device="accelerator"))
    assert not found, f"{len(found)} differences. First: {found[0]}"


def test_the_grid_has_every_pair_that_can_stand_together() -> None:
    covered = {pair for cell in grid() for pair in combinations(cell.values, 2)}
    every_value = [(key, value) for key, values in FACTORS.items() for value in values]
    paired = {pair for pair in combinations(every_value, 2) if is_paired(pair)}
    for pair in paired - covered:
        assert not any(map(is_complete, _with(dict(pair)))), pair
    assert len(paired & covered) > 200


def _with(values: dict[str, str]) -> Iterator[dict[str, str]]:
    """Every choice of the other factors' values, as far as it is possible."""
    key = next((key for key in FACTORS if key not in values), None)
    if not is_possible(values):
        return
    if key is None:
        yield values
        return
    for value in FACTORS[key]:
        yield from _with({**values, key: value})


def test_the_grid_has_every_axis_at_2_4_and_8_ranks() -> None:
    found = {
        (axis, parse_layout(cell.layout).world_size)
        for cell in grid()
        for axis in DEGREES
        if dict(cell.values)[axis] != "1"
    }
    # An axis that is replicated over for context parallelism alone has two ranks in this grid; others join it.
    assert found >= {(axis, size) for axis in DEGREES if axis != "cp_replicate" for size in (2, 4, 8)}
    assert found >= {("cp_replicate", 2), ("cp_replicate", 8)}


def test_a_name_leads_to_its_cell() -> None:
    for cell in grid():
        assert parse_cell(cell.name) == cell


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sparse,tp=2", "got model=sparse; expected one of dense, tied, moe, plain."),
        ("dense,tp=3", "got tp=3; expected one of 1, 2, 4."),
        ("dense,fsdp=2", "got fsdp=2; expected one of model, pp, schedule, dp_replicate,"),
    ],
)
def test_a_wrong_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_cell(name)


def test_the_command_line_lists_and_runs_cells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [cell.name for cell in grid()]
    assert main(["plain,tp=2"]) == 0
    assert capsys.readouterr().out == "plain,tp=2: same\n"
