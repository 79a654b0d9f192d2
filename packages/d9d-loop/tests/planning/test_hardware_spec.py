"""Hardware descriptions: those of the package, files, and errors."""

from importlib.resources import files
from pathlib import Path

import pytest

from d9d_dist import UserError
from d9d_loop.planning import Fitted, Hardware, hardware_names


@pytest.mark.parametrize("name", hardware_names())
def test_every_description_is_valid(name: str) -> None:
    assert Hardware.load(name).device.peak_flops["bf16"] > 1e14


# Physical bounds of the fitted constants; `benchmarks/planning_error.py` fits within the same ones.
_BOUNDS = {
    "matmul_efficiency": (0.4, 1.0),
    "attention_efficiency": (0.2, 0.8),
    "memory_efficiency": (0.6, 0.95),
    "host_seconds": (4e-6, 1e-4),
    "link_efficiency": (0.2, 1.0),
    "network_efficiency": (0.2, 1.0),
}


@pytest.mark.parametrize("name", hardware_names())
def test_constants_are_within_physical_bounds_and_say_how_many_rows_they_come_from(name: str) -> None:
    hardware = Hardware.load(name)
    for constant, (low, high) in _BOUNDS.items():
        assert low <= getattr(hardware.fitted, constant) <= high, constant
    text = files("d9d_loop.planning").joinpath(f"hardware/{name}.toml").read_text()
    comment = text.partition("[fitted]")[2].splitlines()[0]
    # Files without own rows name the hardware whose constants they have, or say that they are estimates.
    expected = f"# Fitted to {hardware.fitted_rows} rows of " if hardware.fitted_rows else "# Not fitted: "
    assert comment.strip().startswith(expected)


def test_a_cluster_has_six_fitted_constants() -> None:
    assert len(Fitted.model_fields) == 6


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"got the hardware 'h1000'; expected one of .*h100-dgx"):
        Hardware.load("h1000")


def test_the_error_names_an_invalid_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n')
    with pytest.raises(UserError, match=r"mine\.toml is invalid"):
        Hardware.load(str(path))


@pytest.mark.parametrize("name", ["dense_error", "sparse_error", "memory_error"])
def test_an_interval_that_reaches_zero_is_refused(tmp_path: Path, name: str) -> None:
    text = files("d9d_loop.planning").joinpath("hardware/a100-40-dgx.toml").read_text()
    path = tmp_path / "mine.toml"
    others = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(name))
    path.write_text(f"{name} = 1.0\n{others}")
    with pytest.raises(UserError, match=rf"{name}\n  Input should be less than 1"):
        Hardware.load(str(path))


def test_the_error_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.toml does not exist"):
        Hardware.load(str(tmp_path / "none.toml"))
