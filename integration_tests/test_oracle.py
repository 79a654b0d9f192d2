"""Grids of the oracle: every layout gives the results of one process in float64."""

from collections.abc import Iterable, Iterator
from itertools import combinations

import pytest
import torch
from decoder_mutants import DECODER_MUTANTS
from mutants import MUTANTS, Mutant
from oracle import GRIDS, MAIN_JOB, cells, main, parse_cell
from oracle_decoders import DECODERS
from oracle_grid import DEGREES, Cell, Grid, Values

from d9d_dist import MeshConfig, StageInfo, UserError
from d9d_dist.testing import accelerators_for, run_ranks
from d9d_loop import ModelProvider
from d9d_loop.testing import parse_layout

ALL = [cell for grid in GRIDS for cell in cells(grid)]


def _caught_by(mutants: Iterable[Mutant]) -> dict[str, Cell]:
    """Return the cells that catch mutants, by name."""
    caught_by = [parse_cell(mutant.cell) for mutant in mutants]
    return {cell.name: cell for cell in caught_by}


CELLS = {**_caught_by((*MUTANTS, *DECODER_MUTANTS)), **{cell.name: cell for cell in ALL}}


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
@pytest.mark.sample(*_caught_by(mutant for mutant in (*MUTANTS, *DECODER_MUTANTS) if not mutant.is_nightly))
@pytest.mark.slow(
    "dense,dp_shard=2",
    "dense,dp_shard=2,mask=ragged",
    "dense,dp_shard=2,microbatch=1",
    "dense,pp=2",
    "plain,cp_shard=2",
    "plain,dp_replicate=2",
    "plain,pp=2",
    "plain,tp=2",
    "tied,pp=2",
)
def test_each_cell_equals_one_process(cell: Cell) -> None:
    found = list(cell.differences())
    assert not found, f"{len(found)} differences. First: {found[0]}"


@pytest.mark.gpu
@pytest.mark.parametrize("cell", ALL, ids=lambda cell: cell.name)
def test_accelerators_equal_one_process_on_the_cpu(cell: Cell) -> None:
    ranks = parse_layout(cell.layout).world_size
    if not accelerators_for(ranks):
        pytest.skip(f"needs {ranks} accelerators; this machine has {torch.accelerator.device_count()}")
    found = list(cell.differences(device="accelerator"))
    assert not found, f"{len(found)} differences. First: {found[0]}"


@pytest.mark.parametrize(("grid", "least"), [(MAIN_JOB, 200), (DECODERS, 250)], ids=["main job", "decoders"])
def test_the_grid_has_every_compatible_pair(grid: Grid, least: int) -> None:
    covered = {pair for cell in cells(grid) for pair in combinations(cell.values, 2)}
    paired = set(grid.pairs())
    for pair in paired - covered:
        assert not any(map(grid.is_complete, _with(grid, dict(pair)))), pair
    assert len(paired & covered) > least


def _with(grid: Grid, values: dict[str, str]) -> Iterator[Values]:
    """Yield all possible values of the other factors."""
    key = next((key for key in grid.factors if key not in values), None)
    if not grid.is_possible(values):
        return
    if key is None:
        yield values
        return
    for value in grid.factors[key]:
        yield from _with(grid, {**values, key: value})


def test_the_grid_has_every_axis_at_2_4_and_8_ranks() -> None:
    found = {
        (axis, parse_layout(cell.layout).world_size)
        for cell in cells(MAIN_JOB)
        for axis in DEGREES
        if dict(cell.values)[axis] != "1"
    }
    # In this grid `cp_replicate` has two ranks if it is the only axis; other axes are combined with it.
    assert found >= {(axis, size) for axis in DEGREES if axis != "cp_replicate" for size in (2, 4, 8)}
    assert found >= {("cp_replicate", 2), ("cp_replicate", 8)}


REFUSED = {
    "classifier,cp_shard=2": "head, a ClassificationHead, pools whole sequences, but 2 context-parallel ranks shard",
    "heads,cp_replicate=2": "heads.topic, a ClassificationHead, pools whole sequences, but 2 context-parallel ranks",
    "encoder,cp_shard=2": "with method = 'all_gather'; expected causal attention, because each rank attends only to",
    "qwen3,cp_shard=2,method=ring,window=5": "expected sdpa_attention or one whose is_standard_sdpa is true, ",
    "sinks,cp_shard=2,method=ring": "expected sdpa_attention or one whose is_standard_sdpa is true, ",
}
"""Combinations outside the grid, and the errors of `parallelize_decoder`."""


def test_combinations_outside_the_grid_are_refused() -> None:
    refused = {name: parse_cell(name) for name in REFUSED}
    assert not any(cell.grid.is_possible(dict(cell.values)) for cell in refused.values())
    layouts = [(cell.experiment.model, parse_layout(cell.layout).mesh) for cell in refused.values()]
    for messages in run_ranks(_refusals, layouts, world_size=2):
        for (name, expected), message in zip(REFUSED.items(), messages, strict=True):
            assert expected in message, name


def _refusals(layouts: list[tuple[ModelProvider, MeshConfig]]) -> list[str]:
    messages = []
    for provider, mesh in layouts:
        with mesh.build() as ctx, torch.device("meta"):
            model = provider.build(StageInfo())
            try:
                provider.parallelize(model, ctx)
            except UserError as error:
                messages.append(str(error))
            else:
                messages.append("not refused")
    return messages


def test_a_name_is_parsed_to_its_cell() -> None:
    assert len({cell.name for cell in ALL}) == len(ALL)
    for cell in ALL:
        assert parse_cell(cell.name) == cell


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sparse,tp=2", "got model=sparse; expected one of dense, tied, moe, plain, qwen3, llama3, "),
        ("dense,tp=3", "got tp=3; expected one of 1, 2, 4."),
        ("llama3,tp=4", "got tp=4; expected one of 1, 2."),
        ("dense,fsdp=2", "got fsdp=2; expected one of model, pp, schedule, dp_replicate,"),
    ],
)
def test_a_wrong_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_cell(name)


def test_the_command_line_lists_and_runs_cells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [cell.name for cell in ALL]
    assert main(["plain,tp=2"]) == 0
    assert capsys.readouterr().out == "plain,tp=2: same\n"
