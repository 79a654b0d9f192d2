"""What a job hands back when it is done."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What came of a job.

    Attributes:
        steps: Steps done, those before a resume included.
        train_loss: Loss of the last step.
        evaluation: Values of the last evaluation: the loss and the task's metrics.
        weight_per_second: Throughput, in units of the loss's weight, e.g. tokens.
        run_dir: Folder of the run.
        export_dir: Folder of the exported model, if it was exported.
    """

    steps: int
    train_loss: float
    evaluation: Mapping[str, float]
    weight_per_second: float
    run_dir: Path
    export_dir: Path | None
