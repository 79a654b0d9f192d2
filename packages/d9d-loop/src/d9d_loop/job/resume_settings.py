"""Settings of a resumed run: the effect of a change of each setting, in one table."""

import json
from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

from d9d_state import JsonValue

Effect: TypeAlias = Literal["error", "reported", "layout", "none"]
"""Effect of a changed setting on a resumed run.

error: The run cannot continue. reported: The rest of the run differs, and the change is printed before the first step.
layout: The result is equal up to rounding, and random numbers are drawn for the new layout. none: The result is equal.
"""

_SETTINGS: Mapping[Effect, str] = {
    "error": "seed data.shuffle optimizer.kind optimizer.averages checkpoint.best_by",
    "reported": (
        "steps epochs batch.global_size precision optimizer average lr_schedule gradients "
        "evaluation.num_samples early_stopping plateau resilience.bad_steps initial_weights freeze "
        "compile"
    ),
    "layout": "batch.microbatch_size mesh pipeline gradients.reduce_each_microbatch activation_checkpointing",
    "none": ("run pipeline.draw data checkpoint evaluation logging host profile resilience trackers rehearsal export"),
}
EFFECTS = {name: effect for effect, names in _SETTINGS.items() for name in names.split()}
"""Effect of each setting or section by dotted name; the longest name that contains a setting applies.

Settings of subclasses of `TrainerConfig`, such as those of a text job, are "reported".
"""

Change: TypeAlias = tuple[str, JsonValue, JsonValue]
"""Dotted name of a value, its value before, and its value now."""


def effect_of(name: str) -> Effect:
    """Return the effect of a setting by its dotted name."""
    while name not in EFFECTS:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return "reported"
    return EFFECTS[name]


def changes(before: JsonValue, now: JsonValue, name: str = "", *, known_only: bool = False) -> Iterator[Change]:
    """Yield each value that differs between two JSON values.

    With `known_only`, keys that only one of the values has are ignored: versions of the configuration differ in keys.
    """
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*before, *now]):
            if not known_only or (key in before and key in now):
                below = f"{name}.{key}".lstrip(".")
                yield from changes(before.get(key), now.get(key), below, known_only=known_only)
    elif before != now:
        yield name, before, now


def describe(change: Change) -> str:
    """Describe a change in a line of a message."""
    name, before, now = change
    return f"  {name} was {json.dumps(before)}, and now is {json.dumps(now)}"
