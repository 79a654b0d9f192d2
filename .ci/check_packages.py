"""Build every package as a wheel; in an environment with only its declared dependencies import, try and test each.

    python .ci/check_packages.py                                          # all packages, at the versions of the lock
    python .ci/check_packages.py --python 3.14 d9d-dist d9d-state         # another Python, two packages
    python .ci/check_packages.py --lowest --readme-only d9d-dist          # the lowest versions of direct dependencies
    python .ci/check_packages.py --names d9d-metrics                      # and every public name must be used

The README of a package runs before the requirements of its tests are installed. `--readme-only` leaves the tests out.
`--names` records which public names README and tests use, and fails with a list of the others (`used_names.py`).
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from used_names import RECORD

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


@dataclass(frozen=True)
class Choice:
    """What to check, from the command line."""

    python: str
    lowest: bool
    readme_only: bool
    names: bool = False


def environment(folder: Path, wheels: Path, name: str, choice: Choice) -> Path:
    """Create an environment with a package's wheel and its dependencies, locked or the lowest; return its python."""
    run("uv", "venv", "-q", "--relocatable", "--python", choice.python, folder / "venv")
    python = folder / "venv" / "bin" / "python"
    # For uv, only what the command names is direct: a wheel's dependencies would be resolved to their newest versions.
    direct = [each for each in project(name)["project"].get("dependencies", ()) if choice.lowest and not is_ours(each)]
    install(python, wheels, choice, wheel_of(name, wheels), *direct)
    return python


def is_ours(requirement: str) -> bool:
    return requirement.startswith("d9d")


def install(python: Path, wheels: Path, choice: Choice, *what: str | Path) -> None:
    versions: tuple[str | Path, ...] = ("--resolution", "lowest-direct")
    if not choice.lowest:
        locked = run("uv", "export", "-q", "--locked", "--all-packages", "--no-emit-workspace", "--no-hashes")
        constraints = python.parent / "constraints.txt"
        constraints.write_text(locked, encoding="utf-8")
        versions = ("--constraints", constraints)
    venv = python.parents[1]
    run(
        "uv",
        "pip",
        "install",
        "-q",
        "--python",
        python,
        "--find-links",
        wheels,
        *versions,
        *what,
        VIRTUAL_ENV=str(venv),
    )


def prepare(name: str, wheels: Path, choice: Choice) -> Path:
    """Return the folder of an environment with one package alone."""
    folder = wheels / f"for-{name}"
    folder.mkdir()
    environment(folder, wheels, name, choice)
    return folder


def check_package(name: str, wheels: Path, prepared: Path, choice: Choice) -> str:
    """Import a package, run its README, then its tests; return a summary."""
    # One folder for all environments, so that shared bytecode is compiled once.
    folder, bytecode = prepared.rename(wheels / "alone"), wheels / "bytecode"
    python = folder / "venv" / "bin" / "python"
    variables = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(bytecode)}
    module = name.replace("-", "_")
    use_all = f"import {module}; [getattr({module}, name) for name in {module}.__all__]"  # each imports its module
    run(python, "-I", "-X", f"pycache_prefix={bytecode}", "-c", use_all)
    if choice.names:
        variables |= record_names(python, folder / "used")
    output = run(python, "integration_tests/snippets.py", f"packages/{name}/README.md", **variables)
    summary = output.strip().splitlines()[-1].rpartition(": ")[2]
    if not choice.readme_only:
        install(python, wheels, choice, *project(name)["dependency-groups"]["test"])
        output = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"packages/{name}/tests", **variables)
        (tests,) = re.findall(r"^\d+ passed.*$", output, flags=re.MULTILINE)
        summary += f"; {tests}"
    if choice.names:
        texts = (f"packages/{name}/tests", f"packages/{name}/README.md")
        summary += "; " + run(python, ".ci/used_names.py", module, folder / "used", *texts).strip()
    shutil.rmtree(folder)
    return summary


def record_names(python: Path, folder: Path) -> dict[str, str]:
    """Let the processes of an environment record the public names that they use; return the environment variable."""
    folder.mkdir()
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    shutil.copy(ROOT / ".ci" / "used_names.py", packages)
    start = f"import os; os.environ.get({RECORD!r}) and __import__('used_names').record(os.environ[{RECORD!r}])\n"
    (packages / "used_names.pth").write_text(start, encoding="utf-8")
    return {RECORD: str(folder)}


def check_meta(names: list[str], wheels: Path, choice: Choice) -> str:
    """Install the meta package from the wheels, import all of its packages, and run its README."""
    with tempfile.TemporaryDirectory() as folder:
        python = environment(Path(folder), wheels, "d9d-all", choice)
        run(python, "-I", "-c", "".join(f"import {name.replace('-', '_')}\n" for name in names))
        run(python, "integration_tests/snippets.py", "packages/d9d-all/README.md")
    return f"installs and imports {len(names)} packages, and its README runs"


def main(arguments: list[str]) -> None:
    names = sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", choices=[*names, []], help="all by default")
    parser.add_argument("--python", default=sys.executable, help="version of Python, such as 3.14")
    parser.add_argument("--lowest", action="store_true", help="lowest versions of direct dependencies")
    parser.add_argument("--readme-only", action="store_true", help="run READMEs, not tests")
    parser.add_argument("--names", action="store_true", help="fail if README and tests do not use a public name")
    options = parser.parse_args(arguments)
    choice = Choice(options.python, options.lowest, options.readme_only, options.names)
    chosen = options.packages or names
    alone = [name for name in chosen if name != "d9d-all"]
    with tempfile.TemporaryDirectory() as folder:
        wheels = Path(folder)
        run("uv", "build", "-q", "--all-packages", "--wheel", "--no-sources", "--out-dir", wheels)
        with ThreadPoolExecutor(1) as pool:  # creates the next environment while a package is tested
            following = pool.submit(prepare, alone[0], wheels, choice) if alone else None
            for name, after in zip(alone, [*alone[1:], None], strict=True):
                assert following is not None
                prepared = following.result()
                if after is not None:
                    following = pool.submit(prepare, after, wheels, choice)
                start = time.monotonic()
                summary = check_package(name, wheels, prepared, choice)
                print(f"{name}: {summary}; {time.monotonic() - start:.0f} s", flush=True)
        if "d9d-all" in chosen:
            print(f"d9d-all: {check_meta([name for name in names if name != 'd9d-all'], wheels, choice)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
