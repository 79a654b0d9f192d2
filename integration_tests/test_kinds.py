"""Every kind of thing that a configuration can name is public, has rows in the tests, and stands in a page.

The grids of optimizers, phases and schedules have a row of each kind by themselves. Here is what is left, so that an
addition that lacks a part is an error.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import test_config_entries
import test_peft_rows
import torch
from torch import nn

import d9d_loop.lr
import d9d_loop.optimizers
import d9d_metrics
import d9d_modules
import d9d_moe
from d9d_loop.config._config_keys import kinds_of
from d9d_loop.config.schedule_config import KINDS
from d9d_loop.jobs import STARTERS
from d9d_loop.jobs.job_config import AdapterConfig, JobKind
from d9d_loop.lr.lr_schedule import LrScheduleConfig
from d9d_loop.lr.phase import Phase
from d9d_loop.optimizers.optimizer import OptimizerConfig, OptimizerSettings
from d9d_metrics import Metric, TrackerConfig
from d9d_modules import HuggingFaceFamily
from d9d_modules.models.pretrained import known_families
from d9d_moe.moe_parallel import DispatchName

ROOT = Path(__file__).resolve().parents[1]
PAGES = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
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
    "pipeline schedules": KINDS,
    "jobs without code": get_args(JobKind),
    "adapters": ADAPTERS,
    "dispatchers": get_args(DispatchName),
    "metrics": METRICS,
    "families": FAMILIES,
}


@pytest.mark.parametrize("kind", NAMED)
def test_every_kind_stands_in_a_page(kind: str) -> None:
    missing = [name for name in NAMED[kind] if re.search(rf'`{name}`|(=|= |or )"{name}"', PAGES) is None]
    assert not missing, f"{kind} that no page of docs/ names in backticks or as a value"


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


def test_every_job_without_code_has_a_starter_file() -> None:
    assert STARTERS.keys() == {*get_args(JobKind)}


def test_every_adapter_has_rows_of_layouts() -> None:
    assert {*ADAPTERS} <= {method for method, _ in test_peft_rows.ROWS}


def test_every_family_is_recognized_public_and_compared_entry_by_entry() -> None:
    recognized = {family.model_type for family in known_families().values()}
    assert {family.model_type for family in FAMILIES.values()} == recognized
    # transformers has no class of Kimi K2; d9d-moe compares it with DeepSeek-V3.
    assert recognized - {"kimi_k2"} == test_config_entries.FAMILIES.keys()
