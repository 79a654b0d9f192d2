"""Keeps a run's values in event files, which TensorBoard shows."""

import json
import struct
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal, final

from pydantic import BaseModel, ConfigDict, JsonValue

from d9d_metrics.trackers._extras import check_extra
from d9d_metrics.trackers._files import make_folder, sync
from d9d_metrics.trackers.background import BackgroundTracker
from d9d_metrics.trackers.redaction import redact_secrets
from d9d_metrics.trackers.values import Histogram, Picture, Text, Tracked

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@final
class TensorBoardTracker:
    """Writes event files into a folder; a resumed run gets another file that takes back the steps taken again."""

    def __init__(self, folder: Path) -> None:
        """Choose the folder.

        Args:
            folder: Where the event files are; one folder is one run.
        """
        self._folder = folder
        self._purge_step: int | None = None
        self._writer: SummaryWriter | None = None

    def resume(self, step: int, state: Mapping[str, JsonValue] = {}) -> None:
        """Let TensorBoard forget later steps."""
        self.close()
        self._purge_step = step + 1

    def log_config(self, config: Mapping[str, JsonValue]) -> None:
        """Keep the configuration as text, shown under `config`."""
        text = json.dumps(redact_secrets(config), indent=2, ensure_ascii=False)
        self._opened().add_text("config", f"```json\n{text}\n```")

    def log(self, step: int, values: Mapping[str, Tracked]) -> None:
        """Write the values."""
        writer = self._opened()
        for name, value in values.items():
            match value:
                case Histogram():
                    _add_histogram(writer, name, value, step)
                case Text():
                    writer.add_text(name, value.text, step)
                case Picture():
                    _add_picture(writer, name, value, step)
                case _:
                    writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Bring what the writer gathers to the disk."""
        if self._writer is not None:
            self._writer.flush()
            self._sync_files()

    def state_dict(self) -> dict[str, JsonValue]:
        """Return nothing: the folder is found by its name."""
        return {}

    def close(self) -> None:
        """Bring what the writer gathers to the disk, and close the file."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()
            self._sync_files()

    def _sync_files(self) -> None:
        for path in (*self._folder.glob("events.out.tfevents.*"), self._folder):
            sync(path)

    def _opened(self) -> "SummaryWriter":
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra

            make_folder(self._folder)
            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        return self._writer


def _add_histogram(writer: "SummaryWriter", name: str, value: Histogram, step: int) -> None:
    edges, num = value.edges, sum(value.counts)
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    weighted = list(zip(middles, value.counts, strict=True))
    writer.add_histogram_raw(
        name,
        min=value.low,
        max=value.high,
        num=num,
        sum=sum(middle * count for middle, count in weighted),
        sum_squares=sum(middle**2 * count for middle, count in weighted),
        bucket_limits=list(edges[1:]),
        bucket_counts=list(value.counts),
        global_step=step,
    )


def _add_picture(writer: "SummaryWriter", name: str, value: Picture, step: int) -> None:
    """Write the PNG as it is, which the writer's own method would decode and encode again."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415  # ty: ignore[import-not-found] - made by protobuf

    width, height = struct.unpack(">II", value.png[16:24])  # from the header, which every PNG starts with
    image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=value.png)
    assert writer.file_writer is not None
    writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)


@final
class TensorBoardTrackerConfig(BaseModel):
    """Chooses TensorBoard; needs the extra `tensorboard`.

    Attributes:
        kind: The word that chooses this tracker.
        folder: Folder of the event files, relative to the run's folder.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["tensorboard"] = "tensorboard"
    folder: str = "tensorboard"

    def check(self) -> None:
        """Refuse it if the package is missing.

        Raises:
            UserError: With the command that installs it.
        """
        check_extra("tensorboard", extra=self.kind)

    def build(self, run_dir: Path) -> BackgroundTracker:
        """Make the tracker.

        Raises:
            UserError: If the package is missing.
        """
        self.check()
        folder = run_dir / self.folder
        return BackgroundTracker(
            lambda: TensorBoardTracker(folder), name=self.kind, spool=run_dir / "trackers" / self.kind
        )
