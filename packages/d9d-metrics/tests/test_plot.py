import math
import random
import sys
from pathlib import Path

import pytest

from d9d_dist import UserError
from d9d_metrics import JsonlTracker, plot_metrics


def write_run(path: Path, *, steps: int, values: tuple[str, ...]) -> None:
    tracker = JsonlTracker(path)
    tracker.log_config({"name": "run"})
    noise = random.Random(0)  # noqa: S311 - not for secrets
    for step in range(steps):
        tracker.log(step, {name: 3 * math.exp(-step / 50) + noise.gauss(0, 0.1) for name in values})
    tracker.close()


def height_and_inks(png: Path) -> tuple[int, set[tuple[int, ...]]]:
    from matplotlib.image import imread

    pixels = (imread(png)[..., :3] * 255).round().astype(int)
    return pixels.shape[0], set(map(tuple, pixels.reshape(-1, 3).tolist()))


def num_pale_blue_pixels(png: Path) -> int:
    from matplotlib.image import imread

    red, _, blue = imread(png)[..., :3].transpose(2, 0, 1)
    return int(((red > 0.6) & (blue > red + 0.05)).sum())


BLUE, ORANGE = (42, 111, 187), (217, 98, 43)


def test_plots_one_panel_per_group_with_values(tmp_path: Path) -> None:
    run, png = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    write_run(run, steps=300, values=("loss", "evaluation_loss", "learning_rate"))
    plot_metrics(str(run), str(png), title="run")
    tall, inks = height_and_inks(png)
    assert {BLUE, ORANGE} <= inks
    plot_metrics(run, png, panels=[["loss", "absent"], ["also absent"]])
    low, inks = height_and_inks(png)
    assert low < tall
    assert BLUE in inks
    assert ORANGE not in inks


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e-5])
def test_plots_a_diverged_or_constant_run(tmp_path: Path, value: float) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    for step in range(150):
        tracker.log(step, {"loss": value})
    plot_metrics(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert height_and_inks(tmp_path / "loss.png")[0] > 0


def test_a_noisy_curve_is_smoothed_over_its_raw_values(tmp_path: Path) -> None:
    run, png = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    write_run(run, steps=300, values=("loss",))
    plot_metrics(run, png)
    noisy = num_pale_blue_pixels(png)
    tracker = JsonlTracker(run)
    tracker.resume(-1)
    for step in range(300):
        tracker.log(step, {"loss": 3 * math.exp(-step / 50)})
    plot_metrics(run, png)
    assert noisy > 4 * num_pale_blue_pixels(png)


def test_error_names_the_values_of_the_file(tmp_path: Path) -> None:
    write_run(tmp_path / "metrics.jsonl", steps=2, values=("nll", "lr"))
    with pytest.raises(
        UserError,
        match=r"got panels \[\['loss'\]\], but .* has no values for them; expected names from \['lr', 'nll'\]",
    ):
        plot_metrics(tmp_path / "metrics.jsonl", tmp_path / "loss.png", panels=[["loss"]])
    assert not (tmp_path / "loss.png").exists()


def test_without_matplotlib_the_error_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "metrics.jsonl", steps=2, values=("loss",))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs matplotlib\. Install it: pip install 'matplotlib>=3"):
        plot_metrics(tmp_path / "metrics.jsonl", tmp_path / "loss.png")


def test_plots_are_not_registered_in_matplotlibs_global_state(tmp_path: Path) -> None:
    write_run(tmp_path / "metrics.jsonl", steps=2, values=("loss",))
    plot_metrics(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert "matplotlib.pyplot" not in sys.modules
