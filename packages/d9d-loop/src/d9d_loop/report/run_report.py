"""Report page of one or several runs: self-contained HTML that needs no network."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from d9d_loop.report.run_folder import RunFolder, read_run
from d9d_loop.report.run_history import RunHistory
from d9d_loop.report.svg_chart import line_chart, timeline
from d9d_loop.writable import replace_text

_FIRST = ("loss", "learning_rate", "grad_norm")
_STYLE = Path(__file__).with_name("report.css")


def write_report(folder: Path) -> Path:
    """Write `report.html` of a run to its folder, and return the path. Replaces an earlier report."""
    path = folder / "report.html"
    replace_text(path, render_report([read_run(folder)]))
    return path


def render_report(runs: Sequence[RunFolder]) -> str:
    """Return the page of one run, or the comparison of several: curves in common charts, and settings that differ."""
    title = " and ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs"
    body = [f"<h1>{escape(title)}</h1>", _legend(runs), _summary(runs), "<h2>Curves</h2>", _charts(runs)]
    if len(runs) > 1:
        body += [_section("Settings that differ", _differences([run.config for run in runs], runs))]
        body += [_section("Environments that differ", _differences([run.environment for run in runs], runs))]
    for run in runs:
        heading = f"{run.name}: " if len(runs) > 1 else ""
        body += [_pictures(run, heading), _samples(run, heading)]
        body += [_section(f"{heading}Interruptions", _interruptions(run.history))]
        body += [_section(f"{heading}Time breakdown", f"<pre>{escape(run.profile)}</pre>" if run.profile else "")]
        body += [_section(f"{heading}Environment", _settings(run.environment))]
        body += [_section(f"{heading}Configuration", _settings(dict(_flat(run.config))))]
    return html_page(title, body)


def html_page(title: str, body: Sequence[str]) -> str:
    """Return a page with the style of the reports. Empty parts of the body are omitted."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{escape(title)}</title><style>{_STYLE.read_text(encoding='utf-8')}</style>"
    return "\n".join(
        [f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>', *filter(None, body), "</body></html>\n"]
    )


def _legend(runs: Sequence[RunFolder]) -> str:
    if len(runs) == 1:
        return ""
    keys = (f'<span class="key k{number % 8}"></span>{escape(run.name)}' for number, run in enumerate(runs))
    return f"<p>{'&ensp; '.join(keys)}</p>"


def _summary(runs: Sequence[RunFolder]) -> str:
    """Return a table of the last step and the last value of each metric."""
    rows = [["step", *(str(max((curve[-1][0] for curve in run.curves.values()), default=0)) for run in runs)]]
    for name in _names(runs):
        last = (run.curves[name][-1][1] if name in run.curves else None for run in runs)
        texts = ("" if each is None else f"{each:,.0f}" if 1e5 <= abs(each) < 1e15 else f"{each:.5g}" for each in last)
        rows.append([_key(name), *texts])
    return "<h2>Last values</h2>" + _table(rows, ["", *(escape(run.name) for run in runs)], kind=' class="number"')


def _charts(runs: Sequence[RunFolder]) -> str:
    charts = []
    for name in _names(runs):
        held_out = f"evaluation_{name}"
        curves = {run.name if len(runs) > 1 else name: run.curves.get(name, []) for run in runs}
        if len(runs) == 1 and held_out in runs[0].curves:
            curves["held out"] = runs[0].curves[held_out]
        elif name.startswith("evaluation_") and len(runs) == 1 and name.removeprefix("evaluation_") in runs[0].curves:
            continue
        keys = ""
        if len(curves) > 1 and len(runs) == 1:
            keys = " ".join(
                f'<span class="key k{n}"></span><span class="dim">{escape(label)}</span>'
                for n, label in enumerate(curves)
            )
        charts.append(f"<figure><h3>{escape(name)}</h3>{keys}{line_chart(curves, title=name)}</figure>")
    return f'<div class="charts">{"".join(charts)}</div>'


def _names(runs: Sequence[RunFolder]) -> list[str]:
    names = list(dict.fromkeys(name for run in runs for name in run.curves))
    return sorted(names, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), names.index(name)))


def _differences(settings: Sequence[Mapping[str, Any]], runs: Sequence[RunFolder]) -> str:
    flat = [dict(_flat(each)) for each in settings]
    names = list(dict.fromkeys(name for each in flat for name in each))
    rows = [[_key(name), *(escape(_text(each.get(name))) for each in flat)] for name in names]
    return _table([row for row in rows if len(set(row[1:])) > 1], ["", *(escape(run.name) for run in runs)])


def _pictures(run: RunFolder, heading: str) -> str:
    figures = (f'<figure><h3>{name}</h3><img src="{url}" alt="{name}"></figure>' for name, url in run.pictures.items())
    return _section(f"{heading}Schedules", f'<div class="charts">{"".join(figures)}</div>' if run.pictures else "")


def _samples(run: RunFolder, heading: str) -> str:
    shown = (
        f'<h3 class="dim">{escape(name)}, step {step}</h3><pre>{escape(text)}</pre>'
        for step, name, text in run.samples[-8:]
    )
    return _section(f"{heading}Samples of text", "".join(shown))


def _interruptions(history: RunHistory | None) -> str:
    if history is None or not (history.interruptions or history.stragglers):
        return ""
    columns = ("step", "lost_steps", "rank", "host", "cause", "detection_seconds", "recovery_seconds")
    rows = [[escape(_shown(getattr(each, name))) for name in columns] for each in history.interruptions]
    ratio = f"{100 * history.effective_ratio:.1f} % of {history.total_seconds:.0f} s were training that was kept."
    slow = "".join(f"<li>step {step}: {escape(text)}</li>" for step, text in history.stragglers)
    table = _table(rows, [name.replace("_", " ") for name in columns])
    picture = f"<figure>{timeline(history)}</figure>" if history.interruptions else ""
    return f"<p>{ratio}</p>{picture}{table}" + (f"<ul>{slow}</ul>" if slow else "")


def _shown(value: float | str | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>{content}" if content else ""


def _settings(values: Mapping[str, Any]) -> str:
    return _table([[_key(name), escape(_text(value))] for name, value in values.items()])


def _table(rows: Sequence[Sequence[str]], head: Sequence[str] = (), *, kind: str = "") -> str:
    """Return a table of HTML cells, empty without rows. `kind` has attributes of the cells after the first column."""
    if not rows:
        return ""
    lines = [f"<td>{first}</td>" + "".join(f"<td{kind}>{cell}</td>" for cell in rest) for first, *rest in rows]
    if head:
        lines.insert(0, f"<th>{head[0]}</th>" + "".join(f"<th{kind}>{cell}</th>" for cell in head[1:]))
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _key(name: str) -> str:
    """Return a name that may break after a dot or an underscore, not within a word."""
    return escape(name).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in values.items():
        flat += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [(f"{prefix}{name}", value)]
    return flat


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
