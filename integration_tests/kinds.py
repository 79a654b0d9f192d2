"""Kinds of sections that a configuration can name, read from the unions, so that tests need no lists by hand."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from d9d_loop.config._config_keys import arms_of
from d9d_loop.optimizers.optimizer import OptimizerConfig


def kinds(union: Any) -> dict[str, type[BaseModel]]:
    """Return the sections of a discriminated union by their `kind`."""
    return {section.model_fields["kind"].default: section for section in arms_of(union)}


def with_every_optimizer(rows: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return rows of optimizer settings, with one more, of default values, for each kind that has no row."""
    named = {row["kind"] for row in rows.values()}
    return {**rows, **{kind: {"kind": kind} for kind in kinds(OptimizerConfig) if kind not in named}}
