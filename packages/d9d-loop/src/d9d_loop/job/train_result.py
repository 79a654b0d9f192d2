"""Result of a training job."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Result of a training job, equal on every rank.

    Attributes:
        steps: Number of completed steps, including those before a resume.
        train_loss: Loss of the last step.
        evaluation: Loss and task metrics of the last evaluation, by name; empty without evaluation.
        weight_per_second: Mean training throughput since the last start or resume, in units of the loss weight, e.g.
            tokens.
        run_dir: The run folder.
        export_dir: Folder of the exported model; `None` if it was not exported.
    """

    steps: int
    train_loss: float
    evaluation: Mapping[str, float]
    weight_per_second: float
    run_dir: Path
    export_dir: Path | None
