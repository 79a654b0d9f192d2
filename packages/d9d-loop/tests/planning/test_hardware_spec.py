"""Hardware descriptions: those of the package, files, and errors."""

from importlib.resources import files
from pathlib import Path

import pytest

from d9d_dist import UserError
from d9d_loop.planning import Fitted, Hardware, hardware_names


@pytest.mark.parametrize("name", hardware_names())
def test_every_description_is_valid(name: str) -> None:
    assert Hardware.load(name).device.peak_flops["bf16"] > 1e14


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
