import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from d9d_dist import UserError
from d9d_loop.report import read_run, write_report
from d9d_loop.report.__main__ import main
from d9d_loop.report.svg_chart import line_chart

PNG = bytes.fromhex("89504e470d0a1a0a")


def _run(folder: Path, *, rate: float, steps: int = 20) -> Path:
    folder.mkdir(parents=True)
    records: list[dict[str, object]] = [
        {
            "step": step,
            "time": 1.0,
            "loss": 3 / step,
            "learning_rate": rate,
            "grad_norm": math.nan if step == 2 else 1.0,
        }
        for step in range(1, steps + 1)
    ]
    records += [{"step": steps, "time": 2.0, "evaluation_loss": 0.5}]
    records += [{"step": steps, "time": 2.0, "sample": {"text": "a <b> & c"}}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records).replace("NaN", '"nan"'))
    (folder / "config.json").write_text(json.dumps({"steps": steps, "optimizer": {"learning_rate": rate}}))
    (folder / "environment.json").write_text(json.dumps({"torch": "2.15"}))
    (folder / "schedule.png").write_bytes(PNG)
    (folder / "profile" / "step-00000010").mkdir(parents=True)
    (folder / "profile" / "step-00000010" / "summary.md").write_text("busy 40%")
    return folder


class _Checker(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta", "img", "br", "wbr"}:
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in {"src", "href"}]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _check(page: str) -> _Checker:
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    return checker


def test_a_report_is_one_page_with_everything(tmp_path: Path) -> None:
    page = write_report(_run(tmp_path / "one", rate=0.5)).read_text()
    checked = _check(page)
    assert "<td>optimizer.<wbr>learning_<wbr>rate</td>" in page  # breaks between words on a phone
    page = page.replace("<wbr>", "")
    assert all(link.startswith("data:image/png;base64,") for link in checked.links)
    assert len(checked.links) == 1
    for part in (
        "learning_rate",
        "optimizer.learning_rate",
        "2.15",
        "a &lt;b&gt; &amp; c",
        "held out",
        "0.15",
        "busy 40%",
    ):
        assert part in page
    assert "prefers-color-scheme: dark" in page
    assert "http" not in page
    assert ".css" not in page


def test_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [_run(tmp_path / name, rate=rate) for name, rate in (("one", 0.5), ("two", 0.25))]
    main([*map(str, runs), "--output", str(tmp_path / "both.html")])
    page = (tmp_path / "both.html").read_text()
    _check(page)
    page = page.replace("<wbr>", "")
    assert capsys.readouterr().out == f"{tmp_path / 'both.html'}\n"
    differing = page[page.index("Settings that differ") : page.index("one: ")]
    assert re.search(r"optimizer\.learning_rate</td><td>0\.5</td><td>0\.25</td>", differing)
    assert "<td>steps</td>" not in differing


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no metrics\.jsonl; expected a run folder"):
        read_run(tmp_path)
    with pytest.raises(SystemExit):
        main([str(tmp_path)])


@pytest.mark.parametrize(
    "curve",
    [
        [(1, 2.0)],
        [(1, 0.0), (2, 0.0)],
        [(1, -1.0), (9, 1e9)],
        [(step, 1 / step) for step in range(1, 20_000)],
        [(1, 3e38), (2, 3e38)],  # one half more is the same number
        [(1, -3e38)],
        [(1, 0.1234567890123456), (2, 0.1234567890123457)],
        [(1, -1.7e308), (2, 1.7e308)],  # their difference is infinite
        [(1, 0.0), (2, 1e-320)],
    ],
)
def test_charts_stay_inside_their_frame(curve: list[tuple[int, float]]) -> None:
    chart = ElementTree.fromstring(line_chart({"a < b": curve}, title="x & y"))  # noqa: S314 - our own text
    drawn = [each for each in chart.iter() if each.tag == "polyline"]
    points = [tuple(map(float, point.split(","))) for point in drawn[0].attrib["points"].split()]
    assert all(64 <= x <= 628 and 11.9 <= y <= 228.1 for x, y in points)
    assert len(points) <= 700
    assert points == sorted(points)
    assert all(11.9 <= float(each.attrib["y1"]) <= 228.1 for each in chart.iter() if each.tag == "line")


def test_labels_of_small_values_are_these_values() -> None:
    chart = ElementTree.fromstring(line_chart({"lr": [(1, 1e-13), (2, 5e-13)]}, title="lr"))  # noqa: S314 - our own text
    labels = [each.text for each in chart.iter("text") if each.attrib["text-anchor"] == "end"]
    assert labels == ["1e-13", "2e-13", "3e-13", "4e-13", "5e-13"]


def test_a_huge_learning_rate_has_a_report(tmp_path: Path) -> None:
    page = write_report(_run(tmp_path / "run", rate=3e38)).read_text()
    assert re.search(r"learning_<wbr>rate</td><td[^>]*>3e\+38<", page)


def test_an_empty_chart_is_omitted() -> None:
    assert line_chart({"loss": []}, title="loss") == ""


def test_damaged_files_of_a_run_do_not_prevent_a_report(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run", rate=0.1)
    (folder / "config.json").write_text("{")
    (folder / "environment.json").write_text("[]")
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(
            json.dumps({"step": 3, "more": {"text": "a\u2028b"}}, ensure_ascii=False) + '\n{"step": 4, "t": {"text"'
        )
    run = read_run(folder)
    assert run.config == {"config.json": "damaged"}
    assert run.environment == {"environment.json": "damaged"}
    assert run.samples[-1] == (3, "more", "a\u2028b")


def test_a_journal_that_cannot_be_read_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _run(tmp_path / "run", rate=0.1)
    (folder / "journal.jsonl").mkdir()
    with pytest.raises(SystemExit, match="2"):
        main([str(folder), "--output", str(tmp_path / "report.html")])
    assert "cannot be read: Is a directory; expected a file." in capsys.readouterr().err
