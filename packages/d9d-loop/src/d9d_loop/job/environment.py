"""Description of the software and hardware of a job, written as `environment.json` for users and the report."""

import json
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from d9d_dist import DistributedContext
from d9d_loop.report.run_history import read_history
from d9d_metrics import peak_bytes

_PACKAGES = ("d9d-loop", "d9d-dist", "d9d-modules", "d9d-moe", "d9d-peft", "transformers", "numpy")


def write_environment(folder: Path, ctx: DistributedContext, *, started: datetime) -> None:
    """Write versions, device, number of ranks, times and the peak memory of this process to a run folder."""
    is_accelerator = ctx.device.type != "cpu"
    described: dict[str, Any] = {
        "started": started.isoformat(timespec="seconds"),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "ranks": ctx.world_size,
        "device": torch.get_device_module().get_device_name() if is_accelerator else "CPU",
        "threads": torch.get_num_threads(),
        "peak_memory_gib": round(peak_bytes(ctx.device) / 2**30, 3),
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": torch.__version__,
        **{name: found for name in _PACKAGES if (found := _version(name)) is not None},
    }
    if (history := read_history(folder)) is not None:
        described["history"] = asdict(history)
    (folder / "environment.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


@cache
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
