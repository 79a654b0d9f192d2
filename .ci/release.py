"""Release packages: set versions, date changelogs, check ranges, build wheels and sdists, commit and tag.

    uv run --group release python .ci/release.py d9d-state=minor             # one package
    uv run --group release python .ci/release.py d9d-state=minor d9d-moe=patch
    uv run --group release python .ci/release.py all --dry-run               # everything unreleased, in a copy

A bump is `patch`, `minor` or `major`; `current` releases the version as it stands, which is how a package starts. The
distributions are in `dist/`. Nothing is uploaded and nothing is pushed: the last line of the output names the command.
"""

import argparse
import datetime
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.version import Version
from release_plan import META, Plan, ReleaseError, plan_release

ROOT = Path(__file__).resolve().parents[1]
RATING = 8
"""Least rating by pyroma. The missing points are those of an e-mail address and a home page."""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command; if it fails, print its output and exit."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise SystemExit(f"failed: {' '.join(map(str, command))}")
    return done.stdout


def build(root: Path, name: str, out: Path) -> tuple[Path, Path]:
    """Build a package without its siblings' sources; return its wheel and its sdist."""
    run("uv", "build", "--quiet", "--package", name, "--no-sources", "--out-dir", out, cwd=root)
    stem = name.replace("-", "_")
    (wheel,), (sdist,) = out.glob(f"{stem}-[0-9]*.whl"), out.glob(f"{stem}-[0-9]*.tar.gz")
    return wheel, sdist


def check_distributions(name: str, version: Version, wheel: Path, sdist: Path) -> list[str]:
    """Return what is wrong with the files of a release."""
    problems = []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (each for each in names if each.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(metadata).decode())
    if (fields["Name"], fields["Version"]) != (name, str(version)):
        problems.append(f"{wheel.name} is {fields['Name']} {fields['Version']}; expected {name} {version}")
    if not any(each.endswith("licenses/LICENSE") for each in names):
        problems.append(f"{wheel.name} has no LICENSE")
    if name != META and not any(each.endswith("/py.typed") for each in names):
        problems.append(f"{wheel.name} has no py.typed")
    with tarfile.open(sdist) as archive:
        packed = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    needed = ("LICENSE", "README.md", "pyproject.toml")
    absent = [file for file in needed if file not in packed or not packed[file].isfile()]
    return problems + [f"{sdist.name} has no {file}" for file in absent]


def release(root: Path, plan: Plan, out: Path) -> None:
    """Write the plan's files, build and check every distribution, then commit and tag."""
    for path, text in plan.texts.items():
        path.write_text(text, encoding="utf-8")
    run("uv", "lock", cwd=root)
    problems = []
    for name, version in plan.versions.items():
        folder = root / "packages" / name
        wheel, sdist = build(root, name, out)
        problems += check_distributions(name, version, wheel, sdist)
        run("check-wheel-contents", "--config", folder / "pyproject.toml", wheel, cwd=root)
        run("pyroma", f"--min={RATING}", folder, cwd=root)
    if problems:
        raise SystemExit("\n".join(problems))
    run("git", "add", "--", "uv.lock", *plan.texts, cwd=root)
    title = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    run("git", "commit", "--quiet", "--message", f"release: {title}", cwd=root)
    for each in plan.tags:
        run("git", "tag", "--annotate", each, "--message", each, cwd=root)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("packages", nargs="+", metavar="PACKAGE=BUMP", help="packages to release, or all")
    parser.add_argument("--dry-run", action="store_true", help="release a copy of HEAD, and keep nothing")
    chosen = parser.parse_args(arguments)
    if run("git", "status", "--porcelain", cwd=ROOT) and not chosen.dry_run:
        raise SystemExit("The working tree has changes; commit them first.")
    with tempfile.TemporaryDirectory() as folder:
        root, out = ROOT, ROOT / "dist"
        if chosen.dry_run:
            root, out = Path(folder) / "copy", Path(folder) / "dist"
            run("git", "clone", "--quiet", "--shared", ROOT, root, cwd=ROOT)
        try:
            plan = plan_release(root, chosen.packages, datetime.datetime.now(datetime.UTC).date())
        except ReleaseError as error:
            print(error, file=sys.stderr)
            return 1
        if not plan.versions:
            print("No changelog has unreleased entries: there is nothing to release.")
            return 0
        print("\n".join(plan.notes))
        release(root, plan, out)
        print(run("git", "show", "--stat", "--format=%s", "HEAD", cwd=root).strip())
        print("\n".join(sorted(path.name for path in out.glob("d9d*"))))
        print(f"tags: {' '.join(plan.tags)}")
    if chosen.dry_run:
        print("A dry run: nothing was kept.")
    else:
        print(f"Next: git push origin HEAD {' '.join(plan.tags)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
