"""Build every package as a wheel, and import and test each in an environment with only its declared dependencies."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str | Path, **environment: str) -> str:
    """Run a command from the root; if it fails, print its output and exit."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise SystemExit(f"failed: {' '.join(map(str, command))}")
    return done.stdout


def project(name: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text(encoding="utf-8"))


def wheel_of(name: str, wheels: Path) -> Path:
    (wheel,) = wheels.glob(f"{name.replace('-', '_')}-[0-9]*.whl")
    return wheel


def environment(folder: Path, wheels: Path, name: str, *extra: str) -> Path:
    """Create an environment with a package's wheel, its dependencies and `extra`, at the versions of the lock."""
    constraints = folder / "constraints.txt"
    locked = run("uv", "export", "-q", "--locked", "--all-packages", "--no-emit-workspace", "--no-hashes")
    constraints.write_text(locked, encoding="utf-8")
    run("uv", "venv", "-q", "--relocatable", "--python", sys.executable, folder / "venv")
    python = folder / "venv" / "bin" / "python"
    run(
        *("uv", "pip", "install", "-q", "--python", python, "--find-links", wheels, "--constraints", constraints),
        *(wheel_of(name, wheels), *extra),
        VIRTUAL_ENV=str(folder / "venv"),
    )
    return python


def prepare(name: str, wheels: Path) -> Path:
    """Return the folder of an environment that tests one package alone."""
    folder = wheels / f"for-{name}"
    folder.mkdir()
    environment(folder, wheels, name, *project(name)["dependency-groups"]["test"])
    return folder


def check_package(name: str, wheels: Path, prepared: Path) -> str:
    """Import a package and run its tests; return the last line of pytest's output."""
    # One folder for all environments, so that shared bytecode is compiled once.
    folder, bytecode = prepared.rename(wheels / "alone"), wheels / "bytecode"
    python = folder / "venv" / "bin" / "python"
    run(python, "-I", "-X", f"pycache_prefix={bytecode}", "-c", f"import {name.replace('-', '_')}")
    output = run(
        *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"packages/{name}/tests"),
        PYTHONDONTWRITEBYTECODE="",
        PYTHONPYCACHEPREFIX=str(bytecode),
    )
    shutil.rmtree(folder)
    (summary,) = re.findall(r"^\d+ passed.*$", output, flags=re.MULTILINE)
    return summary


def check_meta(names: list[str], wheels: Path) -> str:
    """Install the meta package from the wheels, and import all of its packages."""
    with tempfile.TemporaryDirectory() as folder:
        python = environment(Path(folder), wheels, "d9d")
        run(python, "-I", "-c", "".join(f"import {name.replace('-', '_')}\n" for name in names))
    return f"installs and imports {len(names)} packages"


def main() -> None:
    names = sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))
    names.remove("d9d")
    with tempfile.TemporaryDirectory() as folder:
        wheels = Path(folder)
        run("uv", "build", "-q", "--all-packages", "--wheel", "--no-sources", "--out-dir", wheels)
        with ThreadPoolExecutor(1) as pool:  # creates the next environment while a package is tested
            following = pool.submit(prepare, names[0], wheels)
            for name, after in zip(names, [*names[1:], None], strict=True):
                prepared = following.result()
                if after is not None:
                    following = pool.submit(prepare, after, wheels)
                start = time.monotonic()
                summary = check_package(name, wheels, prepared)
                print(f"{name}: {summary}; {time.monotonic() - start:.0f} s", flush=True)
        print(f"d9d: {check_meta(names, wheels)}", flush=True)


if __name__ == "__main__":
    main()
