import sys
from pathlib import Path
from typing import Any

import pytest

from d9d_pipeline import (
    Backward,
    Costs,
    DualPipeV,
    Forward,
    OneForwardOneBackward,
    TimedAction,
    Timeline,
    ZeroBubbleV,
    build,
    plot_program,
    plot_simulation,
    simulate,
)
from d9d_pipeline.actions import SendOutput


def axes() -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(10.0, 3.0)).subplots()


def legend(drawn: Any) -> list[str]:
    found = drawn.get_legend()
    assert found is not None
    return [text.get_text() for text in found.get_texts()]


def bars(drawn: Any) -> set[tuple[float, float]]:
    """Return the (start, end) times of all plotted boxes."""
    boxes = [path.get_extents() for collection in drawn.collections for path in collection.get_paths()]
    return {(round(box.x0, 6), round(box.x1, 6)) for box in boxes}


def test_plots_computations_and_transfers() -> None:
    drawn = axes()
    plot_program(build(OneForwardOneBackward(), num_ranks=2, num_microbatches=2), drawn, title="1F1B")
    assert drawn.get_title(loc="left") == "1F1B: bubble 33.3 %"
    assert [label.get_text() for label in drawn.get_yticklabels()] == ["rank 0", "rank 1"]
    assert drawn.yaxis_inverted()
    assert legend(drawn) == ["forward", "backward", "transfer"]
    assert bars(drawn) == {(0, 1), (1, 2), (4, 6), (7, 9), (2, 4), (4, 5), (5, 7)}
    assert sorted(text.get_text() for text in drawn.texts) == ["0"] * 4 + ["1"] * 4
    (links,) = drawn.lines
    points = links.get_path().vertices.tolist()
    assert len(points) == 4 * 3
    assert [points[index : index + 2] for index in (0, 6)] == [[[4.0, 1.0], [4.0, 0.0]], [[1.0, 0.0], [1.0, 1.0]]]


def test_legend_has_halves_overlaps_and_stages() -> None:
    drawn = axes()
    plot_simulation(simulate(build(DualPipeV(), num_ranks=2, num_microbatches=4), Costs(transfer=0.25)), drawn)
    assert legend(drawn) == [
        *("forward", "backward", "backward, inputs", "backward, weights", "at the same time"),
        *("stage 1 of a rank", "stage 2 of a rank", "transfer"),
    ]
    assert drawn.get_title(loc="left").startswith("bubble ")


def test_stages_of_a_rank_have_different_shades() -> None:
    from matplotlib.colors import to_rgba_array

    drawn = axes()
    plot_program(build(ZeroBubbleV(), num_ranks=2, num_microbatches=4), drawn)
    colors = {
        color for collection in drawn.collections for color in map(tuple, to_rgba_array(collection.get_facecolor()))
    }
    assert len(colors) == 3 * 2


def test_plots_measured_times() -> None:
    forward, send = TimedAction(Forward(0, 0), 0.1, 0.2), TimedAction(SendOutput(0, 0, 1), 0.2, 0.21)
    ranks = ((forward, send, TimedAction(Backward(0, 0), 0.4, 0.6)), (TimedAction(Forward(1, 0), 0.21, 0.3),))
    drawn = axes()
    plot_simulation(Timeline(ranks, unit="s"), drawn)
    assert drawn.get_xlabel() == "time (s)"
    assert bars(drawn) == {(0.1, 0.2), (0.2, 0.21), (0.4, 0.6), (0.21, 0.3)}
    assert "transfer" in legend(drawn)


@pytest.mark.parametrize("name", ["picture.png", "picture.svg"])
def test_writes_a_file(tmp_path: Path, name: str) -> None:
    plot_program(build(OneForwardOneBackward(), num_ranks=2, num_microbatches=2), tmp_path / name)
    assert (tmp_path / name).stat().st_size > 1000


def test_a_plot_is_wide_enough_for_its_numbers(tmp_path: Path) -> None:
    from matplotlib.image import imread

    drawn: list[float] = []
    for microbatches in (2, 20):
        timeline = simulate(build(OneForwardOneBackward(), num_ranks=2, num_microbatches=microbatches))
        plot_simulation(timeline, str(tmp_path / "picture.png"))
        drawn.append(imread(tmp_path / "picture.png").shape[1])
    assert drawn[0] == 8 * 150
    assert drawn[1] > 1.7 * drawn[0]


def test_plots_an_empty_timeline(tmp_path: Path) -> None:
    plot_simulation(Timeline(((), ())), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").exists()


def test_without_matplotlib_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"plots need matplotlib\. Install it: pip install 'matplotlib>=3"):
        plot_program(build(OneForwardOneBackward(), num_ranks=1, num_microbatches=1), tmp_path / "picture.png")
