"""Decide what a release changes: versions, changelogs, and the ranges by which packages require each other.

Nothing is written here. `plan_release` reads a workspace and returns the new text of each file. If the release would be
wrong, it raises `ReleaseError` with every problem and the command that solves it.
"""

import datetime
import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

META = "d9d-all"
BUMPS = ("current", "patch", "minor", "major")
UNRELEASED = re.compile(r"^## (?:Unreleased|\S+ \(unreleased\))$", re.MULTILINE)


class ReleaseError(Exception):
    """The release would be wrong; the message has one line per problem."""


@dataclass(frozen=True)
class Package:
    """A package of the workspace."""

    name: str
    folder: Path
    version: Version
    requirements: tuple[Requirement, ...]

    @classmethod
    def read(cls, folder: Path) -> "Package":
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        lines = [*project.get("dependencies", [])]
        for extra in project.get("optional-dependencies", {}).values():
            lines += extra
        return cls(project["name"], folder, Version(project["version"]), tuple(map(Requirement, lines)))

    @property
    def changelog(self) -> str:
        return (self.folder / "CHANGELOG.md").read_text(encoding="utf-8")

    @property
    def entries(self) -> str:
        """Text of the changelog's unreleased section; empty if it has none."""
        found = UNRELEASED.search(self.changelog)
        return "" if found is None else self.changelog[found.end() :].partition("\n## ")[0].strip()


@dataclass(frozen=True)
class Plan:
    """A release: new versions, the new text of each file, and what to tell the person who releases."""

    versions: Mapping[str, Version]
    texts: Mapping[Path, str]
    notes: tuple[str, ...] = field(default=())

    @property
    def tags(self) -> list[str]:
        return [tag(name, version) for name, version in self.versions.items()]


def tag(name: str, version: Version) -> str:
    return f"{name}-v{version}"


def read_packages(root: Path) -> dict[str, Package]:
    """Return all packages, in the order of their dependencies."""
    found = {package.name: package for package in map(Package.read, _folders(root))}
    ordered: dict[str, Package] = {}
    while len(ordered) < len(found):
        ordered |= {
            name: package
            for name, package in sorted(found.items())
            if all(each.name not in found or each.name in ordered for each in package.requirements)
        }
    return ordered


def _folders(root: Path) -> Iterator[Path]:
    yield from (path.parent for path in root.glob("packages/*/pyproject.toml"))


def last_released(root: Path, name: str) -> Version | None:
    """Return the version of a package's last tag."""
    listed = subprocess.run(
        ["git", "tag", "--list", f"{name}-v*"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.split()
    return max((Version(each.removeprefix(f"{name}-v")) for each in listed), default=None)


def compatible_range(version: Version) -> SpecifierSet:
    """Return the range in which SemVer allows no incompatible change: `>=0.2,<0.3`, `>=1.4,<2`."""
    upper = f"0.{version.minor + 1}" if version.major == 0 else f"{version.major + 1}"
    return SpecifierSet(f">={version.major}.{version.minor},<{upper}")


def written(range_: SpecifierSet) -> str:
    """Return a range as pyproject.toml writes it: the lower bound first."""
    return ",".join(sorted(map(str, range_), key=lambda bound: not bound.startswith(">")))


def bump(package: Package, how: str, today: datetime.date) -> Version:
    """Return the next version. That of the meta package is a date, whichever bump is named."""
    version = package.version
    if how == "current":
        return version
    if package.name == META:
        same_month = (version.major, version.minor) == (today.year, today.month)
        return Version(f"{today.year}.{today.month}.{version.micro + 1 if same_month else 0}")
    parts = [version.major, version.minor, version.micro]
    place = ("major", "minor", "patch").index(how)
    return Version(".".join(map(str, [*parts[:place], parts[place] + 1, *[0] * (2 - place)])))


def parse_bumps(words: list[str], packages: Mapping[str, Package], root: Path) -> dict[str, str]:
    """Read `d9d-state=minor d9d-moe=patch`; `all` is every package with unreleased entries.

    Raises:
        ReleaseError: If a word is not a package and a bump.
    """
    if words == ["all"]:
        unreleased = [name for name, package in packages.items() if package.entries]
        return {name: "current" if last_released(root, name) is None else "patch" for name in unreleased}
    bumps = dict(word.partition("=")[::2] for word in words)
    for name, how in bumps.items():
        if name not in packages:
            raise ReleaseError(f"{name!r} is not a package; expected one of {', '.join(packages)}, or all alone.")
        if how not in BUMPS:
            raise ReleaseError(f"{name}={how}: expected {name}= and one of {', '.join(BUMPS)}.")
    return {name: bumps[name] for name in packages if name in bumps}


def plan_release(root: Path, words: list[str], today: datetime.date) -> Plan:
    """Return the plan of a release.

    Raises:
        ReleaseError: If a version was released already or never, a changelog has no entries, or a range does not fit.
    """
    packages = read_packages(root)
    bumps = parse_bumps(words, packages, root)
    versions = {name: bump(packages[name], how, today) for name, how in bumps.items()}
    problems = [*_wrong_versions(root, packages, bumps, versions), *_unreleased_requirements(root, packages, versions)]
    behind = {name for name, package in packages.items() for _ in _stale(package, versions)}
    if missing := [name for name in packages if name in behind - versions.keys()]:
        for name in missing:
            problems += [
                f"{name} requires {requirement.name}{written(requirement.specifier)}, which excludes "
                f"{versions[requirement.name]}. "
                "Release it together, with a new range."
                for requirement in _stale(packages[name], versions)
            ]
        both = [f"{name}={bumps.get(name, 'patch')}" for name in packages if name in bumps or name in missing]
        problems.append(f"Try: python .ci/release.py {' '.join(both)}")
    if problems:
        raise ReleaseError("\n".join(problems))
    texts: dict[Path, str] = {}
    for name, package in packages.items():
        if name in versions:
            texts |= _released(package, versions, today)
        else:  # a group of test requirements is part of no release
            project = package.folder / "pyproject.toml"
            before = project.read_text(encoding="utf-8")
            if (after := _with_ranges(before, versions)) != before:
                texts[project] = after
    return Plan(versions, texts, tuple(_notes(packages, versions)))


def _wrong_versions(
    root: Path, packages: Mapping[str, Package], bumps: Mapping[str, str], versions: Mapping[str, Version]
) -> Iterator[str]:
    for name, how in bumps.items():
        released, package = last_released(root, name), packages[name]
        if released is None and how != "current":
            yield f"{name} {package.version} was never released; release it first: {name}=current."
        if released is not None and versions[name] <= released:
            yield f"{name} {versions[name]} does not follow {released}, which was released; name a bump."
        if not package.entries and not any(_stale(package, versions)):
            yield f"{name}: its CHANGELOG.md has no section '## Unreleased' with entries: there is nothing to release."


def _stale(package: Package, versions: Mapping[str, Version]) -> list[Requirement]:
    """Return the requirements of a package that exclude a new version, one for each sibling."""
    stale = [each for each in package.requirements if each.name in versions]
    stale = [each for each in stale if not each.specifier.contains(versions[each.name])]
    return list({each.name: each for each in reversed(stale)}.values())


def _unreleased_requirements(
    root: Path, packages: Mapping[str, Package], versions: Mapping[str, Version]
) -> Iterator[str]:
    """Yield what a release would require although nobody can install it."""
    for name in versions:
        for requirement in {each.name: each for each in packages[name].requirements}.values():
            if requirement.name not in packages or requirement.name in versions:
                continue
            released = last_released(root, requirement.name)
            if released is None or not requirement.specifier.contains(released):
                last = "it was never released" if released is None else f"its last release is {released}"
                needed = f"{requirement.name}{written(requirement.specifier)}"
                yield f"{name} requires {needed}, but {last}. Release {requirement.name} together."


def _released(package: Package, versions: Mapping[str, Version], today: datetime.date) -> dict[Path, str]:
    """Return the files of a package after its release."""
    project, version = package.folder / "pyproject.toml", versions[package.name]
    text = project.read_text(encoding="utf-8").replace(f'version = "{package.version}"', f'version = "{version}"', 1)
    lines = [
        f"- Requires `{each.name}{written(compatible_range(versions[each.name]))}`."
        for each in _stale(package, versions)
    ]
    lines += [package.entries] if package.entries else []
    section = "\n".join([f"## {version} ({today.isoformat()})", "", *lines, ""])
    start = UNRELEASED.search(package.changelog) or re.search(r"^(?=## )", package.changelog, re.MULTILINE)
    assert start is not None
    title, older = package.changelog[: start.start()], package.changelog[start.end() :]
    before = re.search(r"^## .*", older, re.MULTILINE | re.DOTALL)
    changelog = "\n".join([f"{title}{section}", *([before[0]] if before else [])])
    return {project: _with_ranges(text, versions), package.folder / "CHANGELOG.md": changelog}


def _with_ranges(text: str, versions: Mapping[str, Version]) -> str:
    """Move each range in a pyproject.toml that excludes a new version."""

    def moved(found: re.Match[str]) -> str:
        requirement = Requirement(found[1])
        version = versions.get(requirement.name)
        if version is None or requirement.specifier.contains(version):
            return found[0]
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        return f'"{requirement.name}{extras}{written(compatible_range(version))}"'

    return re.sub(r'"(d9d-[\w-]+(?:\[[\w,-]+\])?[<>=~!][^"]*)"', moved, text)


def _notes(packages: Mapping[str, Package], versions: Mapping[str, Version]) -> Iterator[str]:
    for name, package in packages.items():
        fits = [each for each in versions if any(each == needed.name for needed in package.requirements)]
        if fits and name not in versions:
            listed = ", ".join(f"{each} {versions[each]}" for each in fits)
            yield f"{name} {package.version} accepts {listed}: no release needed."
