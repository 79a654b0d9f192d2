"""Every kind of thing that a configuration can name is public, has rows in the tests, and stands in a page.

The grids of optimizers, phases and schedules have a row of each kind by themselves. Here is what is left, so that an
addition that lacks a part is an error.
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import test_config_entries
import test_peft_rows
import torch
from family_rows import DENSE, SPARSE
from torch import nn

import d9d_loop.lr
import d9d_loop.optimizers
import d9d_metrics
import d9d_modules
import d9d_moe
import d9d_peft
from d9d_loop.config._config_keys import kinds_of
from d9d_loop.config.schedule_config import KINDS, ScheduleConfig
from d9d_loop.jobs import STARTERS
from d9d_loop.jobs.job_config import AdapterConfig, JobKind
from d9d_loop.lr.lr_schedule import LrScheduleConfig
from d9d_loop.lr.phase import Phase, PhaseSettings
from d9d_loop.optimizers.optimizer import OptimizerConfig, OptimizerSettings
from d9d_metrics import Metric, TrackerConfig
from d9d_modules import HuggingFaceFamily
from d9d_modules.models.pretrained import known_families
from d9d_moe.moe_parallel import DispatchName

ROOT = Path(__file__).resolve().parents[1]


def _texts(pattern: str) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob(pattern)))


PAGES, CHANGELOGS = _texts("docs/*.md"), _texts("packages/*/CHANGELOG.md")
ADAPTERS: tuple[str, ...] = get_args(AdapterConfig.model_fields["kind"].annotation)
METRICS = [
    name
    for name in dir(d9d_metrics)
    if inspect.isclass(each := getattr(d9d_metrics, name)) and issubclass(each, Metric) and each is not Metric
]
FAMILIES: Mapping[str, HuggingFaceFamily[Any]] = {
    name: family
    for package in (d9d_modules, d9d_moe)
    for name in dir(package)
    if isinstance(family := getattr(package, name), HuggingFaceFamily)
}
NAMED: Mapping[str, Iterable[str]] = {
    "optimizers": kinds_of(OptimizerConfig),
    "learning-rate schedules": kinds_of(LrScheduleConfig),
    "phases of a schedule": kinds_of(Phase),
    "trackers": kinds_of(TrackerConfig),
    "pipeline schedules": {kind: type(ScheduleConfig.model_validate({"kind": kind}).build()) for kind in KINDS},
    "jobs without code": get_args(JobKind),
    "adapters": ADAPTERS,
    "dispatchers": get_args(DispatchName),
    "metrics": METRICS,
    "families": FAMILIES,
}


TESTS: Mapping[str, str] = {
    "optimizers": "d9d-loop/tests/optimizers/*.py",
    "learning-rate schedules": "d9d-loop/tests/lr/*.py",
    "phases of a schedule": "d9d-loop/tests/lr/test_phase.py",
    "trackers": "d9d-metrics/tests/trackers/*.py",
    "pipeline schedules": "d9d-pipeline/tests/**/*.py",
    "jobs without code": "d9d-loop/tests/jobs/*.py",
    "adapters": "d9d-peft/tests/*.py",
    "dispatchers": "d9d-moe/tests/*.py",
    "metrics": "d9d-metrics/tests/*.py",
}
"""Tests of each kind in its own package; those of families have a row of each by themselves."""


@pytest.mark.parametrize("kind", NAMED)
def test_every_kind_stands_in_a_page(kind: str) -> None:
    missing = [name for name in NAMED[kind] if re.search(rf'`{name}`|(=|= |or )"{name}"', PAGES) is None]
    assert not missing, f"{kind} that no page of docs/ names in backticks or as a value"


@pytest.mark.parametrize("kind", NAMED)
def test_every_kind_stands_in_a_changelog(kind: str) -> None:
    missing = [name for name in NAMED[kind] if re.search(rf'`{name}`|="{name}"', CHANGELOGS) is None]
    assert not missing, f"{kind} that no CHANGELOG of a package names in backticks or as a value"


@pytest.mark.parametrize("kind", TESTS)
def test_every_kind_stands_in_a_test_of_its_package(kind: str) -> None:
    text, names = _texts(f"packages/{TESTS[kind]}"), NAMED[kind]
    known = {name: each.__name__.removesuffix("Config") for name, each in _classes(names).items()}
    missing = [name for name in names if not re.search(rf"\b{known.get(name, name)}", text, re.IGNORECASE)]
    assert not missing, f"{kind} that no test in packages/{TESTS[kind]} names"


def _classes(names: Iterable[str]) -> dict[str, type]:
    return (
        {name: each for name, each in dict(names).items() if isinstance(each, type)} if isinstance(names, dict) else {}
    )


def _subclasses(base: type) -> Iterator[type]:
    for each in base.__subclasses__():
        yield each
        yield from _subclasses(each)


@pytest.mark.parametrize(("base", "union"), [(OptimizerSettings, OptimizerConfig), (PhaseSettings, Phase)])
def test_every_section_is_in_its_union(base: type, union: Any) -> None:
    sections = {
        each for each in _subclasses(base) if each.__module__.startswith("d9d_") and not inspect.isabstract(each)
    }
    assert sections == {*kinds_of(union).values()}


def _not_public(package: ModuleType, names: Iterable[str]) -> set[str]:
    return {*names} - {*dir(package)}


def test_what_a_configuration_names_is_public() -> None:
    trackers = [config.__name__ for config in kinds_of(TrackerConfig).values()]
    built = []
    for config in kinds_of(OptimizerConfig).values():
        assert issubclass(config, OptimizerSettings)
        weight = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
        built.append(type(config().build(weight)).__name__)  # ty: ignore[missing-argument] - all have defaults
    missing = _not_public(d9d_loop.lr, (phase.__name__ for phase in kinds_of(Phase).values()))
    missing |= _not_public(d9d_metrics, [*trackers, *(name.removesuffix("Config") for name in trackers)])
    assert not missing | _not_public(d9d_loop.optimizers, built)


@pytest.mark.parametrize(
    ("package", "ending", "union"),
    [(d9d_metrics, "TrackerConfig", TrackerConfig), (d9d_loop.lr, "Config", LrScheduleConfig)],
)
def test_every_public_section_is_in_its_union(package: ModuleType, ending: str, union: Any) -> None:
    public = [getattr(package, name) for name in dir(package) if name.endswith(ending)]
    assert {each for each in public if isinstance(each, type)} == {*kinds_of(union).values()}


def test_every_tracker_that_keeps_values_has_a_row_of_what_it_keeps() -> None:
    """The rows are those that `test_conformance.py` of d9d-metrics compares; two trackers keep nothing."""
    _, _, text = _texts("docs/metrics.md").partition("| Tracker | A step logged twice |")
    rows = re.findall(r"^\| `(\w+)` \|", text.partition("\n\n")[0], re.MULTILINE)
    assert {*rows} == kinds_of(TrackerConfig).keys() - {"console", "prometheus"}


def test_every_adapter_has_a_public_method() -> None:
    assert {*ADAPTERS} <= {name.lower() for name in dir(d9d_peft)}


def test_every_job_without_code_has_a_starter_file() -> None:
    assert STARTERS.keys() == {*get_args(JobKind)}


def test_every_adapter_has_rows_of_layouts() -> None:
    assert {*ADAPTERS} <= {method for method, _ in test_peft_rows.ROWS}


def test_every_family_has_rows_of_layouts() -> None:
    assert {family.params for family in known_families().values()} <= DENSE.keys() | SPARSE.keys()


def test_every_place_of_the_table_exists() -> None:
    """The table of `find_your_way.md` says where each kind is added."""
    _, _, text = (
        (ROOT / "docs" / "find_your_way.md").read_text(encoding="utf-8").partition("## Adding one more of a kind")
    )
    places = re.findall(r"`((?:d9d_|packages/|integration_tests/)[\w/.-]+)`", text)
    assert len(places) >= 20
    roots = [ROOT, *ROOT.glob("packages/*/src")]
    assert not [place for place in places if not any((root / place).exists() for root in roots)]


def test_every_family_is_recognized_public_and_compared_entry_by_entry() -> None:
    recognized = {family.model_type for family in known_families().values()}
    assert {family.model_type for family in FAMILIES.values()} == recognized
    # transformers has no class of Kimi K2; d9d-moe compares it with DeepSeek-V3.
    assert recognized - {"kimi_k2"} == test_config_entries.FAMILIES.keys()
