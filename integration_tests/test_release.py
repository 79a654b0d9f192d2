"""Releases of separately versioned packages, planned on a workspace of stubs."""

import datetime
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / ".ci"))
from release_plan import Plan, ReleaseError, plan_release, read_packages  # noqa: E402

TODAY = datetime.date(2026, 12, 24)
PROJECTS = {
    "d9d-dist": ("0.1.0", []),
    "d9d-state": ("0.1.0", ['"d9d-dist>=0.1,<0.2"']),
    "d9d-loop": ("0.1.0", ['"d9d-dist>=0.1,<0.2"', '"d9d-state>=0.1,<0.2"']),
    "d9d-all": ("2026.11.0", ['"d9d-dist>=0.1,<0.2"', '"d9d-loop>=0.1,<0.2"', '"d9d-state>=0.1,<0.2"']),
}


def _git(root: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.invalid", *words], cwd=root, check=True)


@pytest.fixture
def unreleased(tmp_path: Path) -> Path:
    """Create four packages that were never released."""
    for name, (version, requirements) in PROJECTS.items():
        folder = tmp_path / "packages" / name
        folder.mkdir(parents=True)
        lines = ["[project]", f'name = "{name}"', f'version = "{version}"', "dependencies = ["]
        lines += [f"    {each}," for each in requirements] + ["]"]
        if name == "d9d-all":
            lines += ["[project.optional-dependencies]", 'plot = ["d9d-state[plot]>=0.1,<0.2"]']
        (folder / "pyproject.toml").write_text("\n".join(lines) + "\n")
        (folder / "CHANGELOG.md").write_text(f"# Changelog of {name}\n\n## {version} (unreleased)\n\n- First.\n")
    _git(tmp_path, "init", "--quiet")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


@pytest.fixture
def released(unreleased: Path) -> Path:
    """Create the same packages after their first release."""
    _write(plan_release(unreleased, ["all"], TODAY), unreleased)
    return unreleased


def _write(plan: Plan, root: Path) -> None:
    for path, text in plan.texts.items():
        path.write_text(text)
    _git(root, "commit", "--quiet", "--all", "--message", "release")
    for tag in plan.tags:
        _git(root, "tag", tag)


def _change(root: Path, name: str, entry: str) -> None:
    path = root / "packages" / name / "CHANGELOG.md"
    path.write_text(path.read_text().replace("\n## ", f"\n## Unreleased\n\n- {entry}\n\n## ", 1))


def _project(root: Path, name: str) -> str:
    return (root / "packages" / name / "pyproject.toml").read_text()


def _changelog(root: Path, name: str) -> str:
    return (root / "packages" / name / "CHANGELOG.md").read_text()


def test_the_first_release_dates_each_changelog_and_keeps_versions(released: Path) -> None:
    assert _changelog(released, "d9d-dist") == "# Changelog of d9d-dist\n\n## 0.1.0 (2026-12-24)\n\n- First.\n"
    assert 'version = "0.1.0"' in _project(released, "d9d-dist")
    assert plan_release(released, ["all"], TODAY).versions == {}


def test_a_patch_release_needs_no_other_package(released: Path) -> None:
    _change(released, "d9d-dist", "Fixed.")
    plan = plan_release(released, ["d9d-dist=patch"], TODAY)
    assert plan.tags == ["d9d-dist-v0.1.1"]
    assert "d9d-loop 0.1.0 accepts d9d-dist 0.1.1: no release needed." in plan.notes
    _write(plan, released)
    assert _changelog(released, "d9d-dist") == (
        "# Changelog of d9d-dist\n\n## 0.1.1 (2026-12-24)\n\n- Fixed.\n\n## 0.1.0 (2026-12-24)\n\n- First.\n"
    )


def test_a_release_outside_of_the_ranges_names_packages_to_release_with_it(released: Path) -> None:
    _change(released, "d9d-state", "New.")
    with pytest.raises(ReleaseError) as refused:
        plan_release(released, ["d9d-state=minor"], TODAY)
    assert str(refused.value).splitlines() == [
        "d9d-loop requires d9d-state>=0.1,<0.2, which excludes 0.2.0. Release it together, with a new range.",
        "d9d-all requires d9d-state>=0.1,<0.2, which excludes 0.2.0. Release it together, with a new range.",
        "Try: python .ci/release.py d9d-state=minor d9d-loop=patch d9d-all=patch",
    ]
    words = str(refused.value).splitlines()[-1].split()[3:]
    plan = plan_release(released, words, TODAY)
    assert plan.tags == ["d9d-state-v0.2.0", "d9d-loop-v0.1.1", "d9d-all-v2026.12.0"]
    _write(plan, released)
    assert '"d9d-state>=0.2,<0.3"' in _project(released, "d9d-loop")
    assert '"d9d-dist>=0.1,<0.2"' in _project(released, "d9d-loop")
    assert 'plot = ["d9d-state[plot]>=0.2,<0.3"]' in _project(released, "d9d-all")
    assert _changelog(released, "d9d-loop") == (
        "# Changelog of d9d-loop\n\n## 0.1.1 (2026-12-24)\n\n- Requires `d9d-state>=0.2,<0.3`.\n\n"
        "## 0.1.0 (2026-12-24)\n\n- First.\n"
    )


def test_a_new_dependency_range_is_listed_in_the_changelog(released: Path) -> None:
    _change(released, "d9d-state", "New.")
    _change(released, "d9d-loop", "Fixed.")
    _write(plan_release(released, ["d9d-state=minor", "d9d-loop=minor", "d9d-all=patch"], TODAY), released)
    assert "## 0.2.0 (2026-12-24)\n\n- Requires `d9d-state>=0.2,<0.3`.\n- Fixed.\n\n" in _changelog(
        released, "d9d-loop"
    )


def test_dependency_ranges_of_test_groups_are_updated_without_a_release(released: Path) -> None:
    path = released / "packages" / "d9d-dist" / "pyproject.toml"
    path.write_text(f'{path.read_text()}[dependency-groups]\ntest = ["d9d-loop>=0.1,<0.2"]\n')
    _change(released, "d9d-loop", "New.")
    plan = plan_release(released, ["d9d-loop=minor", "d9d-all=patch"], TODAY)
    assert list(plan.versions) == ["d9d-loop", "d9d-all"]
    assert 'test = ["d9d-loop>=0.2,<0.3"]' in plan.texts[path]


def test_requirements_of_a_release_must_be_installable(released: Path) -> None:
    path = released / "packages" / "d9d-loop" / "pyproject.toml"
    path.write_text(path.read_text().replace("d9d-state>=0.1,<0.2", "d9d-state>=0.1.1,<0.2"))
    _change(released, "d9d-loop", "Uses a new function of d9d-state.")
    with pytest.raises(
        ReleaseError, match=r"d9d-loop requires .*, but its last release is 0\.1\.0\. Release d9d-state"
    ):
        plan_release(released, ["d9d-loop=patch"], TODAY)
    _change(released, "d9d-state", "A new function.")
    plan = plan_release(released, ["d9d-loop=patch", "d9d-state=patch"], TODAY)
    assert plan.tags == ["d9d-state-v0.1.1", "d9d-loop-v0.1.1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["d9d-dist=patch"], "d9d-dist: its CHANGELOG.md has no section '## Unreleased' with entries"),
        (["d9d-dist=current"], "d9d-dist 0.1.0 does not follow 0.1.0, which was released; name a bump"),
        (
            ["d9d-dst=patch"],
            "'d9d-dst' is not a package; expected one of d9d-dist, d9d-state, d9d-loop, d9d-all, or all alone",
        ),
        (["d9d-dist=big"], "d9d-dist=big: expected d9d-dist= and one of current, patch, minor, major"),
        (["d9d-dist"], "d9d-dist=: expected d9d-dist= and one of"),
    ],
)
def test_a_wrong_release_is_refused(released: Path, words: list[str], message: str) -> None:
    with pytest.raises(ReleaseError, match=message):
        plan_release(released, words, TODAY)


def test_a_package_starts_with_its_current_version(unreleased: Path) -> None:
    with pytest.raises(ReleaseError, match=r"d9d-dist 0\.1\.0 was never released; release it first: d9d-dist=current"):
        plan_release(unreleased, ["d9d-dist=minor"], TODAY)


def test_each_package_accepts_all_others_of_this_checkout() -> None:
    packages = read_packages(ROOT)
    assert len(packages) == 9
    for package in packages.values():
        for requirement in package.requirements:
            if requirement.name in packages:
                assert requirement.specifier.contains(packages[requirement.name].version), (package.name, requirement)
