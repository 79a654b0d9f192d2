"""Measure d9d on one accelerator, in slices of less than nine minutes; write one JSON per slice and a Markdown page.

    python benchmarks/device_day.py --wheels wheels --fetch        # download the wheels that the device lacks
    python benchmarks/device_day.py --wheels wheels --out results  # on the device: run every slice without a result
    python benchmarks/device_day.py --out results --tiny           # on a CPU: show that every slice runs

Each slice is a process of its own with a time limit. Run the command again after an interruption: slices with a result
are skipped. `--only steps,moe` runs the named slices.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("dist", "state", "modules", "moe", "pipeline", "peft", "metrics", "loop")
GPU_TESTS = {"dist": ("",), "modules": ("",), "moe": ("",), "metrics": ("",), "loop": ("data", "optimizers")}
"""Test folders with tests marked `gpu`, by package. Other tests of d9d-loop import packages that are not carried."""
WHEELS = ("pydantic", "safetensors", "tqdm", "pytest", "pytest-xdist", "hypothesis", "numpy")
"""Wheels to carry, with their dependencies: d9d needs the first three, its tests the others."""


@dataclass(frozen=True)
class Slice:
    """A part of the day: a command that writes its result to the path that it gets as `--output`.

    Attributes:
        command: Arguments after `python`.
        minutes: Time limit.
        takes_tiny: True if the command knows `--tiny`; the tests do not.
    """

    command: tuple[str, ...]
    minutes: float = 8.5
    takes_tiny: bool = True


def _slices() -> dict[str, Slice]:
    steps = "benchmarks/device_steps.py"
    kernels = {
        f"kernels of {name}": Slice((f"packages/d9d-{name}/benchmarks/gpu.py",)) for name in ("modules", "moe", "loop")
    }
    tests = {
        f"tests of {name}": Slice(
            ("-m", "pytest", *(f"packages/d9d-{name}/tests/{folder}" for folder in folders), "-m", "gpu", "-q", "-n0"),
            takes_tiny=False,
        )
        for name, folders in GPU_TESTS.items()
    }
    return {
        "environment": Slice((steps, "environment")),
        "agreement": Slice((steps, "agreement")),
        **{f"step of {name}": Slice((steps, "step", name)) for name in ("0.6B", "1.7B", "4B", "8B", "30B-A3B")},
        **kernels,
        "checkpoint": Slice((steps, "checkpoint")),
        "profile": Slice((steps, "profile")),
        **tests,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing slices and write the page; return 1 if a slice failed."""
    parser = argparse.ArgumentParser(description="Measure d9d on one accelerator.")
    parser.add_argument("--out", type=Path, default=Path("device_day"), help="folder of the results")
    parser.add_argument("--wheels", type=Path, help="folder of the carried wheels")
    parser.add_argument("--fetch", action="store_true", help="download the wheels for Python 3.12, and end")
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of slices, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that every slice runs")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no slice that may end after these minutes")
    options = parser.parse_args(arguments)
    if options.fetch:
        return _fetch(options.wheels)
    slices = _slices()
    unknown = set(options.only or ()) - set(slices)
    if unknown:
        parser.error(f"unknown slice {min(unknown)!r}; expected some of: {', '.join(slices)}")
    options.out.mkdir(parents=True, exist_ok=True)
    environment = _environment(options.wheels, options.out)
    began = time.monotonic()
    for name, part in slices.items():
        if options.only is not None and name not in options.only:
            continue
        result = options.out / f"{name.replace(' ', '_')}.json"
        if result.exists() and json.loads(result.read_text())["status"] == "done":
            continue
        if (time.monotonic() - began) / 60 + part.minutes > options.minutes:
            print(f"{name}: not started, {part.minutes:g} minutes do not fit", flush=True)
            continue
        print(f"{name} ...", flush=True)
        found = _run(part, result.with_suffix(".part"), environment, tiny=options.tiny)
        result.write_text(json.dumps(found, indent=1))
        print(f"{name}: {found['status']}, {found['seconds']:.0f} s", flush=True)
    results = {path.stem: json.loads(path.read_text()) for path in sorted(options.out.glob("*.json"))}
    (options.out / "page.md").write_text(page(results))
    return int(any(result["status"] != "done" for result in results.values()))


def _fetch(folder: Path) -> int:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--python-version", "3.12"]
    return subprocess.run([*command, "--dest", str(folder), *WHEELS], check=False).returncode  # noqa: S603


def _environment(wheels: Path | None, out: Path) -> dict[str, str]:
    """Return the environment of a slice: the packages' sources and the unpacked wheels on the path."""
    paths = [str(ROOT / f"packages/d9d-{name}/src") for name in PACKAGES]
    if wheels is not None:
        unpacked = out / "site"
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
        paths.append(str(unpacked.resolve()))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}


def _run(part: Slice, output: Path, environment: dict[str, str], *, tiny: bool) -> dict[str, Any]:
    command = [sys.executable, *part.command]
    if part.takes_tiny:
        command += ["--output", str(output.resolve()), *(["--tiny", "--device", "cpu"] if tiny else [])]
    began = time.monotonic()
    try:
        done = subprocess.run(  # noqa: S603 - the commands of this file
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60 * part.minutes, check=False
        )
        code, text = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        code, text = None, f"stopped after {part.minutes:g} minutes\n{error.stdout or ''}"
    is_done = code == 0 or (code == 5 and not part.takes_tiny)  # pytest: no test of this package was selected
    measured = json.loads(output.read_text()) if output.exists() else None
    output.unlink(missing_ok=True)
    return {
        "status": "done" if is_done else "failed",
        "tiny": tiny,
        "seconds": time.monotonic() - began,
        "command": list(part.command),
        "measured": measured,
        "text": text[-4000:],
    }


def page(results: dict[str, dict[str, Any]]) -> str:
    """Return the results as a Markdown page."""
    environment = (results.get("environment") or {}).get("measured") or {}
    lines = ["# A day on one accelerator", ""]
    lines += [f"- {key}: {value}" for key, value in {"host": platform.machine(), **environment}.items()]
    if any(result["tiny"] for result in results.values()):
        lines += ["", "**Tiny sizes: these numbers only show that the script runs.**"]
    lines += ["", "| part | status | seconds |", "|---|---|---|"]
    lines += [f"| {name} | {result['status']} | {result['seconds']:.0f} |" for name, result in results.items()]
    steps = [row for name, result in results.items() if name.startswith("step_of") for row in result["measured"] or []]
    if steps:
        keys = list(steps[0])
        lines += ["", "## Training steps", "", f"| {' | '.join(keys)} |", f"|{'---|' * len(keys)}"]
        lines += [f"| {' | '.join(_cell(row.get(key)) for key in keys)} |" for row in steps]
    for name, result in results.items():
        if result["measured"] is not None and not name.startswith(("step_of", "environment")):
            text = json.dumps(result["measured"], indent=1)
            lines += ["", f"## {name.replace('_', ' ')}", "", "```json", text, "```"]
        if result["status"] != "done":
            lines += ["", f"## {name.replace('_', ' ')} failed", "", "```", result["text"], "```"]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
