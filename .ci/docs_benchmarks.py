"""Generate the page of benchmarks from the committed records while the documentation is built."""

import json
import re
import tomllib
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
TARGETS = """
## Targets

A target is a ratio of times to a peer in the same run, unless the row says otherwise. A row that does not meet its
target says what bounds it. The figures are those of the last record below; numbers in the last column are measured in
the same run.

| What | Target | Reached | |
| --- | --- | --- | --- |
"""


def change(new: float, old: float | None) -> str:
    """Return a change in percent, bold if it is flagged."""
    if old is None or old == 0:
        return ""
    relative = new / old - 1
    text = f"{relative:+.1%}"
    return f"**{text}**" if abs(relative) > FLAGGED else text


def targets(rows: list[dict[str, Any]], records: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return a line per target; `{name}` in the text of a bound is a figure of the record."""
    lines = []
    for row in rows:
        arguments = row.get("arguments", [])
        entries = [each for each in records[row["benchmark"]] if each["arguments"] == arguments]
        figures = entries[-1]["figures"]
        reached = figures[row["figure"]]
        bound = row.get("bound", "")
        for name in re.findall(r"\{(.+?)\}", bound):
            bound = bound.replace(f"{{{name}}}", f"{figures[name]:,.4g}")
        is_reached = reached >= row["target"] if row.get("at_least") else reached <= row["target"]
        if not is_reached and not bound:
            raise ValueError(
                f"got {reached} for {row['what']!r}, which misses its target, without a bound; say what bounds it."
            )
        sign = "at least " if row.get("at_least") else ""
        lines.append(
            f"| {row['what']} | {sign}{row['target']:g} | {reached:.3g} | {'reached' if is_reached else bound} |"
        )
    return lines


def table(entries: list[dict[str, Any]]) -> list[str]:
    """Return the table of the last record."""
    last = entries[-1]
    keys = ("machine", "arguments")
    before: dict[str, Any] = next(
        (each for each in reversed(entries[:-1]) if all(each[key] == last[key] for key in keys)), {"figures": {}}
    )
    load = f" Load before the run: {last['load']}." if "load" in last else ""
    note = f" {last['note']}" if last["note"] else ""
    lines = [
        f"{last['date']}, {last['machine']}, torch {last['torch']}, Python {last['python']}.{load}{note}",
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
    records: dict[str, list[dict[str, Any]]] = {
        f"{path.parents[2].name}/{path.stem}": json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(ROOT.glob("packages/*/benchmarks/records/*.json"))
    }
    rows = tomllib.loads((ROOT / ".ci" / "benchmark_targets.toml").read_text(encoding="utf-8"))["target"]
    lines = [INTRODUCTION, TARGETS.strip(), *targets(rows, records)]
    for name, entries in records.items():
        package, _, benchmark = name.partition("/")
        lines.append(f"\n## {package}: {benchmark.replace('_', ' ')}\n")
        for arguments in {" ".join(each["arguments"]): each["arguments"] for each in entries}.values():
            lines += [f"\n`{' '.join(arguments)}`: "] if arguments else []
            lines += table([each for each in entries if each["arguments"] == arguments])
    others = [
        f"`{path.relative_to(ROOT)}`"
        for path in sorted(ROOT.glob("packages/*/benchmarks/*.py"))
        if f"{path.parents[1].name}/{path.stem}" not in records
    ]
    lines += ["\n## Without a record\n", "Their figures, if any, are in the README of the package.\n"]
    lines += [f"- {other}" for other in others]
    return "\n".join(lines) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the page; mkdocs calls this hook before it reads pages."""
    files.append(File.generated(config, "benchmarks.md", content=page()))
    return files
