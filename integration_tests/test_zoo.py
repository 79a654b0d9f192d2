"""Any module trains from its built values and with the results of a plain loop, in each layout.

The default run tests a sample of the zoo; `--all` tests all of it, which takes an hour on two cores. `-rP` shows how
many modules of each test are equal, are refused, and do not run in a plain loop either.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from zoo import TORCH
from zoo_jobs import compiled_differences, differences, plain_traces
from zoo_research import RESEARCH
from zoo_stateful import STATEFUL
from zoo_unusual import UNUSUAL

import d9d_dist.tensor_parallel.styles
from d9d_dist import SequenceParallel
from d9d_dist.testing import run_ranks
from d9d_loop._hugging_face_tensor_plan import _SplitExperts

LAYOUTS = (
    [{}],
    [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}, {"tensor_parallel": 2}],
    [{"data_parallel_replicate": 2, "data_parallel_shard": 2}, {"data_parallel_shard": 2, "tensor_parallel": 2}],
)
"""The meshes of one, two and four ranks. Models that carry no plan are not tried with tensor parallelism."""

SAMPLE = (
    "embedding with padding",
    "batch norm, cumulative",
    "frozen layers",
    "tied weights",
    "mixed dtypes",
    "Python's and NumPy's random numbers",
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
    "sparse graph": "are sparse tensors; expected dense tensors",
    "weight is a property": "expected nn.Module as the first base class",
    "weight captured by a function": "project holds layer.weight",
    "attribute shares memory": "table holds embed.weight",
    "teacher from the second step": _WRITES,
    "normalized in the third step": _WRITES,
    "averaged model": _WRITES,
    "target network": "forward calls state_dict() of a Linear",
    "own state dict": "forward calls state_dict() of a Linear",
    "sparse rows": "the gradient of table, of shape (9, 4), is sparse; expected a dense gradient",
    "half precision": "trained parameters are float16; expected float32 or bfloat16",
    "frozen in the second step": _WRITES,
    "parameter made in forward": "the first step created, replaced or deleted the parameters gain",
    "layer replaced in forward": "replace",  # of one process, and of several
    "queue in an attribute": "codes: the values differ between ranks",
    "moving average in a number": "mean: the values differ between ranks",
}
"""Modules of `UNUSUAL`, `RESEARCH` and `STATEFUL` that are refused, with the error; some of them on one rank, too."""

COMPILED = {
    "transformer encoder layer": "",
    "timm:test_vit": "",
    "transformers:gpt2": "",
    "transformers:qwen3": "",
    "counter": "seen[int(steps) % 3] = True",
    "threads": "concurrent/futures/thread.py",
}
"""Modules that Inductor compiles, with a line that runs eagerly. Of the last one, only what FSDP adds is compiled."""

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
    problems = []
    for name, lines in found.items():
        refusal = {**REFUSED, **REFUSED_UNUSUAL}.get(name)
        if refusal is None:
            problems += [f"{name}: {lines[0]} ({len(lines)} differences)"] if lines else []
        elif not lines:
            problems.append(f"{name} is not refused any more")
        else:
            problems += [f"{name}: {line}" for line in lines if refusal not in line]
    assert not problems, "\n".join(problems)
    refused = sorted(REFUSED.keys() & names) + sorted(REFUSED_UNUSUAL.keys() & names)
    print(
        f"zoo: {len(names) - len(refused)} equal, {len(refused)} refused ({', '.join(refused)}), {len(failed)} not run"
    )
    return failed


@pytest.mark.slow
@pytest.mark.long
def test_a_sample_trains_as_in_a_plain_loop(tmp_path: Path, exhaustive: bool) -> None:
    assert not _check(SAMPLE, tmp_path, max_ranks=4 if exhaustive else 2)


@pytest.mark.full
@pytest.mark.parametrize("names", _chunks([name for name in TORCH if name not in SAMPLE]), ids=lambda names: names[0])
def test_torch_modules_train_as_in_a_plain_loop(names: tuple[str, ...], tmp_path: Path) -> None:
    assert not _check(names, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("names", _chunks([*UNUSUAL, *RESEARCH, *STATEFUL]), ids=lambda names: names[0])
def test_unusual_modules_train_as_in_a_plain_loop(names: tuple[str, ...], tmp_path: Path) -> None:
    assert not _check(names, tmp_path)


def _norms_of_heads_are_not_reduced() -> AbstractContextManager[object]:
    return mock.patch.object(SequenceParallel, "has_partial_gradients", False)


def _whole_layers_get_the_gradient_of_a_part() -> AbstractContextManager[object]:
    return mock.patch.object(d9d_dist.tensor_parallel.styles, "copy_to_axis", lambda x, mesh: x)


def _experts_are_doubled() -> AbstractContextManager[object]:
    forward = _SplitExperts.forward
    return mock.patch.object(_SplitExperts, "forward", lambda *args, **options: 2 * forward(*args, **options))


def _differences_with(bug: Callable[[], AbstractContextManager[object]] | None, *args: Any) -> dict[str, list[str]]:
    with nullcontext() if bug is None else bug():
        return differences(*args)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("transformers:qwen3", _norms_of_heads_are_not_reduced),
        ("transformers:diffllama", _whole_layers_get_the_gradient_of_a_part),
        ("transformers:qwen3_moe", _experts_are_doubled),
    ],
)
def test_a_bug_of_a_tensor_plan_is_caught(
    name: str, bug: Callable[[], AbstractContextManager[object]], tmp_path: Path
) -> None:
    arguments = [name], [{"tensor_parallel": 2}]
    for planted in (bug, None):
        folder = tmp_path / str(planted is None)
        folder.mkdir()
        run_ranks(plain_traces, [name], str(folder), world_size=1, timeout=1200)
        for found in run_ranks(_differences_with, planted, *arguments, str(folder), world_size=2, timeout=1200):
            assert any("gradient 1" in line for line in found[name]) == bool(found[name]) == (planted is not None)


@pytest.mark.full
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_modules_train_as_in_a_plain_loop(name: str, tmp_path: Path) -> None:
    run_ranks(plain_traces, [name], str(tmp_path), world_size=1, timeout=1200)
    for mesh in ({}, {"data_parallel_shard": 2}):
        found = run_ranks(compiled_differences, name, mesh, str(tmp_path), world_size=1 + len(mesh), timeout=1200)
        for lines, num_graphs, _ in found:
            assert not lines
            assert num_graphs or name == "threads"
        assert ("runs these lines of the model eagerly" in found[0][2]) == bool(COMPILED[name])
        assert COMPILED[name] in found[0][2]


@pytest.mark.full
def test_a_sample_of_libraries_trains_as_in_a_plain_loop(tmp_path: Path) -> None:
    assert not _check(LIBRARY_SAMPLE, tmp_path)


def test_library_modules_train_as_in_a_plain_loop(of_libraries: tuple[str, ...], tmp_path: Path) -> None:
    """Print the modules that do not run on a small configuration in a plain loop either."""
    for name, why in _check(of_libraries, tmp_path).items():
        print(f"{name} is not in the zoo: {why}")


def test_at_most_five_percent_of_torch_modules_are_refused() -> None:
    assert len(REFUSED) <= 0.05 * len(TORCH)
