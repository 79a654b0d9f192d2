"""Generate the page of benchmarks from the committed records while the documentation is built."""

import json
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
FLAGGED = 0.05
INTRODUCTION = """# Benchmarks

Each table is generated from the records committed beside a benchmark. A record has figures, machine and date.
`uv run python .ci/benchmark_records.py packages/d9d-x/benchmarks/NAME.py` adds one.

The last column compares with the record before it on an equal machine; a change of more than 5 % is **bold**. Without
such a record it is empty. Benchmarks that compare with another library do so in the same run, and print the ratio.
Most of these records were made on a machine that other work kept busy: read the ratios, not the seconds.
"""


def change(new: float, old: float | None) -> str:
    """Return a change in percent, bold if it is flagged."""
    if old is None or old == 0:
        return ""
    relative = new / old - 1
    text = f"{relative:+.1%}"
    return f"**{text}**" if abs(relative) > FLAGGED else text


def table(entries: list[dict[str, Any]]) -> list[str]:
    """Return the table of the last record."""
    last = entries[-1]
    keys = ("machine", "arguments")
    before: dict[str, Any] = next(
        (each for each in reversed(entries[:-1]) if all(each[key] == last[key] for key in keys)), {"figures": {}}
    )
    note = f" {last['note']}" if last["note"] else ""
    lines = [
        f"{last['date']}, {last['machine']}, torch {last['torch']}, Python {last['python']}.{note}",
        "",
        "| Figure | Value | Change |",
        "| --- | --- | --- |",
    ]
    for name, value in last["figures"].items():
        label = name.replace("|", "&#124;")
        lines.append(f"| {label} | {value:,.4g} | {change(value, before['figures'].get(name))} |")
    return lines


def page() -> str:
    """Return the page."""
    lines = [INTRODUCTION]
    for path in sorted(ROOT.glob("packages/*/benchmarks/records/*.json")):
        package = path.parents[2].name
        entries = json.loads(path.read_text(encoding="utf-8"))
        lines += [f"\n## {package}: {path.stem.replace('_', ' ')}\n", *table(entries)]
    recorded = {(path.parents[2].name, path.stem) for path in ROOT.glob("packages/*/benchmarks/records/*.json")}
    others = [
        f"`{path.relative_to(ROOT)}`"
        for path in sorted(ROOT.glob("packages/*/benchmarks/*.py"))
        if (path.parents[1].name, path.stem) not in recorded
    ]
    lines += ["\n## Without a record\n", "Their figures, if any, are in the README of the package.\n"]
    lines += [f"- {other}" for other in others]
    return "\n".join(lines) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the page; mkdocs calls this hook before it reads pages."""
    files.append(File.generated(config, "benchmarks.md", content=page()))
    return files
