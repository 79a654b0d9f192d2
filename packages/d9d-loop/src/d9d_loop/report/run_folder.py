"""Contents of a run folder, as the report shows them."""

import base64
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from d9d_dist import UserError
from d9d_loop.report.run_history import RunHistory, read_history
from d9d_metrics import read_metrics

_PICTURES = ("schedule.png", "schedule_measured.png", "lr_schedule.png")


@final
@dataclass(frozen=True, slots=True)
class RunFolder:
    """Files that a run has written.

    Attributes:
        curves: Finite values by step, for each metric.
        samples: Tracked texts, each with its step and name.
        config: The resolved configuration; empty if there is none.
        environment: Versions, devices and times; empty if there are none.
        pictures: PNG pictures as data URLs, by file name.
        profile: Text of the profile's summary; empty without a profile.
        history: Interruptions and the effective training time ratio; `None` without a journal.
    """

    name: str
    curves: Mapping[str, list[tuple[int, float]]]
    samples: list[tuple[int, str, str]] = field(default_factory=list)
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    pictures: Mapping[str, str] = field(default_factory=dict)
    profile: str = ""
    history: RunHistory | None = None


def read_run(folder: Path) -> RunFolder:
    """Read a run folder. Raise `UserError` if it has no `metrics.jsonl`, or a file of figures cannot be read."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise UserError(
            f"{folder} has no metrics.jsonl; expected a run folder of a job with the jsonl tracker. Check the path."
        )
    try:
        history = read_history(folder)
    except OSError as error:
        raise UserError(
            f"the journal in {folder} cannot be read: {error.strerror}; expected a file. Check its permissions, or "
            "rename it."
        ) from None
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in read_metrics(metrics):
        for name, value in record.items():
            if name not in {"step", "time"} and math.isfinite(value):
                curves.setdefault(name, []).append((int(record["step"]), value))
    return RunFolder(
        name=folder.resolve().name,
        curves=curves,
        samples=_texts(metrics),
        config=_json(folder / "config.json"),
        environment=_json(folder / "environment.json"),
        pictures={name: _data_url(folder / name) for name in _PICTURES if (folder / name).is_file()},
        profile="\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("profile/*/summary.md"))),
        history=history,
    )


def _texts(metrics: Path) -> list[tuple[int, str, str]]:
    texts: list[tuple[int, str, str]] = []
    *lines, _incomplete = metrics.read_text(encoding="utf-8").split("\n")  # a text may contain "\u2028"
    for line in lines:
        if '"text"' in line:
            record = json.loads(line)
            texts += [
                (int(record["step"]), name, value["text"])
                for name, value in record.items()
                if isinstance(value, dict) and set(value) == {"text"}
            ]
    return texts


def _json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty without a file. A damaged file does not prevent a report."""
    if not path.is_file():
        return {}
    with suppress(OSError, ValueError):
        values = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return values
    return {path.name: "damaged"}


def _data_url(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
