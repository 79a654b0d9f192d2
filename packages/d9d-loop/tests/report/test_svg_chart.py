import re
from xml.etree import ElementTree

from d9d_loop.report.run_history import Interruption, RunHistory
from d9d_loop.report.svg_chart import timeline


def _interruption(step: int, cause: str) -> Interruption:
    return Interruption(0.0, step, 0, None, None, cause, None, None)


def test_lost_steps_and_interruptions_are_drawn_with_their_causes() -> None:
    lives = [[(0.0, 0), (50.0, 50), (60.0, 60)], [(80.0, 50), (85.0, 51), (200.0, 100)]]
    history = RunHistory(200.0, 0.8, [_interruption(60, "rank 2 <is> gone")], lives=lives)
    root = ElementTree.fromstring(timeline(history))  # noqa: S314 - our own text
    (gap,) = root.findall("rect")
    left, width = (float(gap.attrib[name]) for name in ("x", "width"))
    curves = {each.attrib["class"]: each.attrib["points"] for each in root.findall("polyline") if each.attrib["points"]}
    kept_of_last_life = [tuple(map(float, point.split(","))) for point in curves["curve c0"].split()]
    lost = [tuple(map(float, point.split(","))) for point in curves["curve lost"].split()]
    assert len(kept_of_last_life) == 3
    assert kept_of_last_life[0][1] > kept_of_last_life[1][1] > kept_of_last_life[2][1]  # up is less in an SVG
    first_life = re.findall(r'class="curve lost" points="([^"]+)"', timeline(history))[0].split()
    assert len(first_life) == 2  # from step 50, which was kept, to step 60, which was not
    assert left == float(first_life[-1].split(",")[0])
    assert left + width == kept_of_last_life[1][0]
    assert len(lost) == 1
    assert gap.findtext("title") == "after step 60: rank 2 <is> gone"
    assert "minutes" in "".join(root.itertext())


def test_a_run_without_progress_is_drawn() -> None:
    history = RunHistory(0.0, 1.0, [_interruption(0, "killed")], lives=[[(0.0, 0)], [(0.0, 0)]])
    assert len(ElementTree.fromstring(timeline(history)).findall("rect")) == 1  # noqa: S314 - our own text
