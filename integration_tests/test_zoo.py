"""Any module trains from its built values and with the results of a plain loop, in each layout.

The default run tests a sample of the zoo; `--all` tests all of it, which takes an hour on two cores.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
from zoo import TORCH
from zoo_jobs import differences, plain_traces
from zoo_research import RESEARCH
from zoo_unusual import UNUSUAL

from d9d_dist.testing import run_ranks

LAYOUTS = (
    [{}],
    [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}, {"tensor_parallel": 2}],
    [{"data_parallel_replicate": 2, "data_parallel_shard": 2}, {"data_parallel_shard": 2, "tensor_parallel": 2}],
)
"""The meshes of one, two and four ranks. Models that carry no plan are not tried with tensor parallelism."""

SAMPLE = (
    "lstm, time first",
    "attention with other sizes",
    "embedding with padding",
    "batch norm, cumulative",
    "frozen layers",
    "weight norm, old, alone",
    "spectral norm",
    "orthogonal",
    "own parameters",
    "tied weights",
    "lists and dicts",
    "gradient of gradients",
    "mixed dtypes",
    "complex",
    "Python's and NumPy's random numbers",
    "embedding by frequency",
    "embedding with a largest norm",
    "embedding bag by frequency",
)

LIBRARY_SAMPLE = ("transformers:qwen3", "timm:test_vit")

REFUSED = {
    "transformers:ibert": "buffers differ between ranks after step 1, because forward updates them",
}
"""Modules that are refused on several ranks, with the error. I-BERT keeps ranges of activations in buffers."""

_WRITES = "forward replaces or writes to"
_BUFFERS = "buffers differ between ranks after step 1"
REFUSED_UNUSUAL = {
    "momentum encoder": _WRITES,
    "normalized in forward": _WRITES,
    "normalized in forward by data": _WRITES,
    "initialized by the first batch": _WRITES,
    "codebook of moving averages": _BUFFERS,
    "observed for quantization": _BUFFERS,
    "hooks of parameters": "have hooks (register_hook); expected none",
    "scripted": "is a module of torch.jit; expected Python modules",
    "traced": "is a module of torch.jit; expected Python modules",
    "dynamically quantized": "in the state dict; expected tensors only",
    "queue of negatives": _BUFFERS,
    "sparse graph": "are sparse tensors; expected dense ones",
    "weight is a property": "expected nn.Module as the first base class",
    "weight captured by a function": "project holds layer.weight",
    "attribute shares memory": "table holds embed.weight",
}
"""Modules of `UNUSUAL` and `RESEARCH` that are refused, with the error; two of them on one rank, too."""

_CHUNK = 16


def _chunks(names: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(names[start : start + _CHUNK]) for start in range(0, len(names), _CHUNK)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """List the modules of libraries only where they are tested, because their imports take seconds."""
    if "of_libraries" not in metafunc.fixturenames:
        return
    chunks: list[tuple[str, ...]] = [()]
    if metafunc.config.option.all:
        from zoo_libraries import library_names  # noqa: PLC0415

        chunks = _chunks([name for name in library_names() if name not in LIBRARY_SAMPLE])
    cases = [pytest.param(names, id="".join(names[:1]), marks=pytest.mark.full) for names in chunks]
    metafunc.parametrize("of_libraries", cases)


def _check(names: Sequence[str], folder: Path, *, max_ranks: int = 4) -> dict[str, str]:
    """Compare modules in the layouts of up to `max_ranks`; return those that do not run in a plain loop either."""
    [failed] = run_ranks(plain_traces, names, str(folder), world_size=1, timeout=1200)
    names = [name for name in names if name not in failed]
    found: dict[str, list[str]] = {name: [] for name in names}
    for size, meshes in zip((1, 2, 4), LAYOUTS, strict=True):
        if size > max_ranks:
            break
        for ours in run_ranks(differences, names, meshes, str(folder), world_size=size, timeout=1200):
            for name in names:
                found[name] += ours[name]
    for name, lines in found.items():
        refusal = {**REFUSED, **REFUSED_UNUSUAL}.get(name)
        if refusal is not None:
            assert lines, f"{name} is not refused any more"
            assert all(refusal in line for line in lines), lines
        else:
            assert not lines, f"{name}: {lines[0]} ({len(lines)} differences)"
    return failed


def test_a_sample_trains_as_in_a_plain_loop(tmp_path: Path, exhaustive: bool) -> None:
    assert not _check(SAMPLE, tmp_path, max_ranks=4 if exhaustive else 2)


@pytest.mark.full
@pytest.mark.parametrize("names", _chunks([name for name in TORCH if name not in SAMPLE]), ids=lambda names: names[0])
def test_torch_modules_train_as_in_a_plain_loop(names: tuple[str, ...], tmp_path: Path) -> None:
    assert not _check(names, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("names", _chunks([*UNUSUAL, *RESEARCH]), ids=lambda names: names[0])
def test_unusual_modules_train_as_in_a_plain_loop(names: tuple[str, ...], tmp_path: Path) -> None:
    assert not _check(names, tmp_path)


@pytest.mark.full
def test_a_sample_of_libraries_trains_as_in_a_plain_loop(tmp_path: Path) -> None:
    assert not _check(LIBRARY_SAMPLE, tmp_path)


def test_library_modules_train_as_in_a_plain_loop(of_libraries: tuple[str, ...], tmp_path: Path) -> None:
    """Print the modules that do not run on a small configuration in a plain loop either."""
    for name, why in _check(of_libraries, tmp_path).items():
        print(f"{name} is not in the zoo: {why}")


def test_few_are_refused() -> None:
    assert len(REFUSED) <= 0.05 * len(TORCH)
