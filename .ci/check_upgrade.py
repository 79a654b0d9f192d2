"""Upgrade one package alone against the released others, to prove that their ranges are honest.

    python .ci/check_upgrade.py d9d-dist              # this checkout's d9d-dist with released dependents
    python .ci/check_upgrade.py --tests d9d-dist      # and the tests of those releases, not only their READMEs

The others are built from their last tags. A release whose range excludes the new version is not installed: `release.py`
says that it must be released together. Each other one must import, and its README must run. Before the first release
there are no tags; `--from-head` takes HEAD as the release of all packages, which shows that this check itself works.
"""

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from check_packages import ROOT, Choice, environment, install, run
from packaging.version import Version
from release_plan import META, Package, last_released, read_packages, tag


def extract(reference: str, name: str, folder: Path) -> Package:
    """Write a package of a commit or tag to a folder."""
    packed = subprocess.run(
        ["git", "archive", reference, "LICENSE", f"packages/{name}"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return Package.read(folder / "packages" / name)


def upgraded(name: str, released: Version, folder: Path) -> Package:
    """Copy this checkout's package; if its version is the released one, as the next patch release."""
    files = run("git", "ls-files", "-z", "LICENSE", f"packages/{name}").rstrip("\0").split("\0")
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes((ROOT / file).read_bytes())
    package = Package.read(folder / "packages" / name)
    if package.version > released:
        return package
    path = package.folder / "pyproject.toml"
    following = f"{released.major}.{released.minor}.{released.micro + 1}"
    text = path.read_text(encoding="utf-8").replace(f'version = "{package.version}"', f'version = "{following}"', 1)
    path.write_text(text, encoding="utf-8")
    return Package.read(package.folder)


def check(name: str, *, from_head: bool, tests: bool, folder: Path) -> int:
    """Check the dependents of one package; return the number that it breaks."""
    packages, wheels = read_packages(ROOT), folder / "wheels"
    released = {each: packages[each].version if from_head else last_released(ROOT, each) for each in packages}
    if missing := [each for each, version in released.items() if version is None and each != META]:
        raise SystemExit(f"{', '.join(missing)} has no tag; release it first, or add --from-head.")
    sources: dict[str, Package] = {}
    for each, version in released.items():
        if each not in (name, META) and version is not None:
            sources[each] = extract("HEAD" if from_head else tag(each, version), each, folder / "released")
    before = released[name]
    assert before is not None
    new = upgraded(name, before, folder / "new")
    for package in [new, *sources.values()]:
        run("uv", "build", "-q", "--wheel", "--no-sources", "--out-dir", wheels, package.folder)
    broken = 0
    for each, package in sources.items():
        ranges = [needed.specifier for needed in package.requirements if needed.name == name]
        if not ranges:
            continue
        what = f"{each} {package.version} with {name} {new.version}"
        if not all(accepted.contains(new.version) for accepted in ranges):
            print(f"{what}: refused by its range; release it together")
            continue
        done = _try(package, wheels, folder / f"for-{each}", tests=tests)
        print(f"{what}: {'works' if done is None else 'BROKEN'}", flush=True)
        if done is not None:
            broken += 1
            print(done)
    return broken


def _try(package: Package, wheels: Path, folder: Path, *, tests: bool) -> str | None:
    """Install a released package with the upgraded one, and run its README; return the output if that fails."""
    choice = Choice(sys.executable, lowest=False, readme_only=not tests)
    python = environment(folder, wheels, package.name, choice)
    commands: list[list[str | Path]] = [
        [python, ROOT / "integration_tests" / "snippets.py", package.folder / "README.md"],
    ]
    if tests:
        install(python, wheels, choice, "pytest", "pytest-randomly", "pytest-xdist", "hypothesis", "numpy")
        commands.append([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", package.folder / "tests"])
    for command in commands:
        done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{done.stdout}\n{done.stderr}"
    return None


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=[name for name in read_packages(ROOT) if name != META])
    parser.add_argument("--from-head", action="store_true", help="take HEAD as the release of all packages")
    parser.add_argument("--tests", action="store_true", help="run the tests of each release too")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        broken = check(options.package, from_head=options.from_head, tests=options.tests, folder=Path(folder))
    if broken:
        print(f"{broken} releases accept this {options.package} and break: make it compatible, or bump its minor.")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
