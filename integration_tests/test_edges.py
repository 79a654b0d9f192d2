"""The dependencies between packages are those of the architecture, in the metadata, the contracts, and the code."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]

EDGES: dict[str, set[str]] = {
    "d9d-dist": set(),
    "d9d-state": {"d9d-dist"},
    "d9d-modules": {"d9d-dist", "d9d-state"},
    "d9d-moe": {"d9d-dist", "d9d-state", "d9d-modules"},
    "d9d-pipeline": {"d9d-dist"},
    "d9d-metrics": {"d9d-dist"},
    "d9d-peft": {"d9d-dist", "d9d-state"},
    "d9d-loop": {"d9d-dist", "d9d-state", "d9d-pipeline", "d9d-metrics"},
}


def _project(name: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text(encoding="utf-8"))


def _siblings(requirements: list[str]) -> set[str]:
    names = {re.split(r"[\[<>=~!; ]", requirement)[0] for requirement in requirements}
    return names & EDGES.keys()


def _module(name: str) -> str:
    return name.replace("-", "_")


@pytest.mark.parametrize("name", EDGES)
def test_declared_dependencies_are_the_edges(name: str) -> None:
    project = _project(name)["project"]
    assert _siblings(project["dependencies"]) == EDGES[name]
    assert project["version"].count(".") == 2
    for requirement in project["dependencies"]:
        if _siblings([requirement]):
            assert re.fullmatch(r"d9d-\w+>=\d+\.\d+,<\d+\.\d+", requirement), "a range on each sibling"


def test_the_meta_package_depends_on_all_packages_and_has_a_version_of_at_least_2026() -> None:
    project = _project("d9d-all")["project"]
    assert _siblings(project["dependencies"]) == set(EDGES)
    assert int(project["version"].split(".")[0]) >= 2026
    for name in EDGES:
        for extra in _project(name)["project"].get("optional-dependencies", {}):
            forwarded = project["optional-dependencies"][extra]
            assert any(requirement.startswith(f"{name}[{extra}]") for requirement in forwarded)


def test_each_contract_breaks_when_it_is_violated(tmp_path: Path) -> None:
    """Stub packages import everything forbidden: the linter must report every pair."""
    forbidden = {(name, other) for name in EDGES for other in EDGES.keys() - EDGES[name] - {name}}
    for name in EDGES:
        package = tmp_path / _module(name)
        package.mkdir()
        (package / "__init__.py").touch()
        imports = [f"import {_module(other)}.part" for one, other in sorted(forbidden) if one == name]
        (package / "part.py").write_text("\n".join(imports) + "\n")
    config = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(config)
    done = subprocess.run(
        ["lint-imports", "--no-cache"], cwd=tmp_path, capture_output=True, text=True, check=False, env=_path(tmp_path)
    )
    assert done.returncode == 1, done.stdout
    assert "0 kept, 8 broken" in done.stdout
    for name, other in forbidden:
        assert f"{_module(name)}.part -> {_module(other)}.part" in done.stdout, (name, other)


def _cycle(edges: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _imports(*packages: str) -> dict[str, set[str]]:
    """Return the modules that each module imports, under `TYPE_CHECKING` and inside functions too."""
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=False, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def test_no_modules_import_each_other_in_a_cycle() -> None:
    edges = _imports(*map(_module, EDGES))
    assert "d9d_state.mapper.graph" in edges["d9d_state.mapper.state_mapper"]
    assert _cycle(edges) == []


def test_a_cycle_under_type_checking_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "cyclic_stub"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "above.py").write_text("import cyclic_stub.below\n")
    (package / "below.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import cyclic_stub.above\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert set(_cycle(_imports("cyclic_stub"))) == {"cyclic_stub.above", "cyclic_stub.below"}


def _path(folder: Path) -> dict[str, str]:
    import os  # noqa: PLC0415

    return {**os.environ, "PYTHONPATH": str(folder)}
