"""Run a benchmark and append its figures, with machine and date, to the records that the site shows.

    uv run python .ci/benchmark_records.py packages/d9d-pipeline/benchmarks/build_program.py
    uv run python .ci/benchmark_records.py packages/d9d-modules/benchmarks/gpu.py --note "one H100"

With `--compare`, print the ratios that are more than 5 % above those of the last record on an equal machine, and end
with code 1 if there are any.

`load` is the load of the machine before the benchmark: ratios of a busy machine are not figures of an idle one.

A record is one entry of `benchmarks/records/<name>.json` beside the benchmark. Commit it with the change that it
measures: the page shows the last record and its change since the one before on an equal machine.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def read_output(text: str) -> dict[str, float]:
    """Return all numbers of a benchmark's output, which is one JSON value or one per line, by dotted name."""
    try:
        values = [json.loads(text)]
    except json.JSONDecodeError:
        values = [json.loads(line) for line in text.splitlines() if line.startswith(("{", "["))]
    rows = [row for value in values for row in (value if isinstance(value, list) else [value])]
    figures: dict[str, float] = {}
    for row in rows:
        label = " ".join(str(value) for value in row.values() if isinstance(value, str)) if len(rows) > 1 else ""
        figures |= _flat(row, label)
    return figures


def _flat(value: Any, name: str) -> dict[str, float]:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return {}
    if isinstance(value, (int, float)):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    figures: dict[str, float] = {}
    for key, each in items:
        figures |= _flat(each, f"{name}{': ' if ' ' in name or '(' in name else '.' if name else ''}{key}")
    return figures


def machine() -> str:
    """Return processor, number of usable cores, and the accelerator if there is one."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    import torch  # noqa: PLC0415 - slow, and only here

    found = f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    device = torch.accelerator.current_accelerator(check_available=True)
    return found if device is None else f"{found}, {torch.get_device_module(device).get_device_name()}"


def slower(entries: list[dict[str, Any]]) -> list[str]:
    """Return the ratios of the last entry that are more than 5 % above those of the one before on an equal machine."""
    *before, last = entries
    same = [each for each in before if all(each[key] == last[key] for key in ("machine", "arguments"))]
    old = same[-1]["figures"] if same else {}
    return [
        f"{name}: {old[name]:g} -> {value:g}"
        for name, value in last["figures"].items()
        if "ratio" in name and "quartiles" not in name and name in old and value > old[name] * 1.05
    ]


def record(benchmark: Path, arguments: list[str], note: str) -> tuple[Path, list[str]]:
    """Run a benchmark and append its record; return the file, and the ratios that got worse."""
    command = [sys.executable, str(benchmark), *arguments]
    load = os.getloadavg()[0]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    import torch  # noqa: PLC0415

    entry = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "arguments": arguments,
        "load": round(load, 1),
        "note": note,
        "figures": read_output(done.stdout),
    }
    path = benchmark.parent / "records" / f"{benchmark.stem}.json"
    path.parent.mkdir(exist_ok=True)
    entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    entries.append(entry)
    path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    return path, slower(entries)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", type=Path)
    parser.add_argument("--note", default="", help="what a reader must know, such as that the machine was busy")
    parser.add_argument("--compare", action="store_true", help="end with code 1 if a ratio got worse by over 5 %%")
    options, arguments = parser.parse_known_args(words)
    path, worse = record(options.benchmark.resolve(), arguments, options.note)
    print("\n".join([str(path.relative_to(ROOT)), *worse]))
    if options.compare and worse:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
