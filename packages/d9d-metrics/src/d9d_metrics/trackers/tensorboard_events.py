"""TensorBoard tracker, for event files."""

import json
import struct
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal, final

from pydantic import JsonValue

from d9d_dist.durable_files import sync
from d9d_metrics.trackers._extras import ExtraTrackerConfig, require_package
from d9d_metrics.trackers._files import make_folder
from d9d_metrics.trackers.redaction import redact_secrets
from d9d_metrics.trackers.tracker import Tracker
from d9d_metrics.trackers.values import Histogram, Html, Image, Text, Tracked

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


_FILES = "events.out.tfevents.*"


@final
class TensorBoardTracker(Tracker):
    """Tracker that writes event files to a folder. `resume` removes the values of later steps from them."""

    def __init__(self, folder: Path) -> None:
        """Set the folder of the event files of this run; no file is opened yet.

        Raises `UserError` if the package tensorboard is missing.
        """
        require_package("tensorboard")
        self._folder = folder
        self._first_step = 0
        self._writer: SummaryWriter | None = None

    def resume(self, step: int, state: Mapping[str, JsonValue] = {}) -> None:
        """Close the event file, and remove the values of later steps from all event files of the folder.

        A TensorBoard that shows the run at that time may show its old values until it is started again.
        """
        self.close()
        self._first_step = step + 1
        for path in sorted(self._folder.glob(_FILES)):
            _drop_later_steps(path, step)

    def log_config(self, config: Mapping[str, JsonValue]) -> None:
        """Write the configuration as text, named `config`."""
        text = json.dumps(redact_secrets(config), indent=2, ensure_ascii=False)
        self._get_writer().add_text("config", f"```json\n{text}\n```")

    def log(self, step: int, values: Mapping[str, Tracked]) -> None:
        """Write the values of a step."""
        writer = self._get_writer()
        for name, value in values.items():
            match value:
                case Histogram():
                    _add_histogram(writer, name, value, step)
                case Text():
                    writer.add_text(name, value.text, step)
                case Image():
                    _add_picture(writer, name, value, step)
                case Html():
                    pass
                case _:
                    writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Flush the writer and fsync its files."""
        if self._writer is not None:
            self._writer.flush()
            self._sync_files()

    def close(self) -> None:
        """Close the writer and fsync its files."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()
            self._sync_files()

    def _sync_files(self) -> None:
        for path in (*self._folder.glob(_FILES), self._folder):
            sync(path)

    def _get_writer(self) -> "SummaryWriter":
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra

            make_folder(self._folder)
            # Every file starts a session at its first step: TensorBoard's Python server, if it shows the run already,
            # then discards later steps that it has read. It ignores the first session that it reads.
            self._writer = SummaryWriter(str(self._folder), purge_step=self._first_step)
        return self._writer


def _drop_later_steps(path: Path, step: int) -> None:
    """Rewrite an event file without the values of steps after `step`, and without a record that is cut off."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event  # ty: ignore[import-not-found] - made by protobuf
    from tensorboard.summary.writer.record_writer import RecordWriter

    records = list(RawEventFileLoader(str(path)).Load())
    events = [Event.FromString(record) for record in records]
    if all(event.step <= step for event in events):
        return
    kept = [record for record, event in zip(records, events, strict=True) if event.step <= step]
    copy = path.with_name(f"partial.{path.name}")
    with copy.open("wb") as file:
        writer = RecordWriter(file)
        for record in kept:
            writer.write(record)
    sync(copy)
    copy.replace(path)


def _add_histogram(writer: "SummaryWriter", name: str, value: Histogram, step: int) -> None:
    edges, num = value.edges, sum(value.counts)
    centers = [(low + high) / 2 for low, high in pairwise(edges)]
    weighted = list(zip(centers, value.counts, strict=True))
    writer.add_histogram_raw(
        name,
        min=value.low,
        max=value.high,
        num=num,
        sum=sum(center * count for center, count in weighted),
        sum_squares=sum(center**2 * count for center, count in weighted),
        bucket_limits=list(edges[1:]),
        bucket_counts=list(value.counts),
        global_step=step,
    )


def _add_picture(writer: "SummaryWriter", name: str, value: Image, step: int) -> None:
    """Write the PNG bytes unchanged; the writer's own `add_image` would decode and encode them again."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # ty: ignore[import-not-found] - made by protobuf

    width, height = struct.unpack(">II", value.png[16:24])  # from the PNG header
    image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=value.png)
    assert writer.file_writer is not None
    writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)


@final
class TensorBoardTrackerConfig(ExtraTrackerConfig):
    """Configuration of TensorBoard event files; needs the extra `tensorboard`.

    Attributes:
        folder: Folder of the event files, relative to the run folder.
    """

    kind: Literal["tensorboard"] = "tensorboard"
    folder: str = "tensorboard"

    def _opener(self, run_dir: Path) -> Callable[[], TensorBoardTracker]:
        return lambda: TensorBoardTracker(run_dir / self.folder)
