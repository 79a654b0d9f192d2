"""Reader of the samples of a batch. Errors name the sample."""

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils import _pytree as pytree

from d9d_dist import UserError
from d9d_loop.data.sample_stream import Collate, Entry, SampleStream
from d9d_loop.data_error import DataError
from d9d_loop.isolation import seed_generators

_LONGEST = 120


@final
@dataclass(frozen=True, slots=True)
class ReadJob:
    """Batch to read.

    Attributes:
        position: Position of the first sample in the global order.
        entries: Entries of the samples, which are consecutive in the global order.
    """

    position: int
    entries: list[Entry]

    def describe(self, number: int) -> str:
        """Describe the sample at index `number` of the batch for error messages."""
        entry = repr(self.entries[number])
        entry = entry if len(entry) <= _LONGEST else f"{entry[:_LONGEST]}..."
        return f"sample {entry} (position {self.position + number} of the global order)"


@final
class SampleReader:
    """Reader and collator of batches, in this process or in a worker."""

    def __init__(self, stream: SampleStream, collate: Collate) -> None:
        self._stream, self._collate = stream, collate

    def __call__(
        self, job: ReadJob, on_sample: Callable[[int], object] = lambda number: None, *, seed: int | None = None
    ) -> Any:
        """Read the samples of a job and collate them. Failures of a sample or of `collate` raise `DataError`.

        `on_sample` is called with the index of each sample in the batch before the sample is read, and with their
        number before `collate`, which may decode them. With `seed`, the generators are seeded for each sample by its
        position, and for `collate` by the first position.
        """
        samples: list[Any] = []
        for number, entry in enumerate(job.entries):
            on_sample(number)
            if seed is not None:
                seed_sample(seed, job.position + number)
            try:
                samples.append(self._stream.read(entry))
            except Exception as error:
                raise DataError(f"{job.describe(number)} could not be read: {_describe(error)}") from error
        on_sample(len(samples))
        if seed is not None:
            seed_generators(seed, "collate at", job.position)
        try:
            return self._collate(samples)
        except Exception as error:
            names = list(map(job.describe, range(len(samples))))
            raise DataError(
                f"the {len(samples)} samples from {names[0]} on could not be collated: {_describe(error)}"
                + describe_none(samples, names)
            ) from error


def describe_none(samples: Sequence[Any], names: Sequence[str]) -> str:
    """Return a sentence about the first `None` in samples that `collate` does not accept; empty without one."""
    for sample, name in zip(samples, names, strict=True):
        for path, leaf in pytree.tree_flatten_with_path(sample)[0]:
            if leaf is None:
                place = f"{pytree.keystr(path)} of {name}" if path else name
                return f". {place} is None; expected a value (is a return missing in the dataset?)."
    return ""


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def seed_sample(seed: int, position: int) -> None:
    """Seed `random`, torch's CPU generator and, if imported, NumPy for the sample at a position in the global order.

    Pipeline-, tensor- and context-parallel ranks read the same samples, so they must draw the same numbers.
    """
    seed_generators(seed, "data at", position)


def check_draws_nothing(read: Callable[[], object]) -> None:
    """Check that `read`, which reads a batch, draws no random numbers, else raise `UserError`.

    If the random states changed, `read` is called again, because another thread, such as a tracker's, may have drawn.
    """
    drawn = _drawn_by(read) and _drawn_by(read)
    if drawn:
        raise UserError(
            f"reading a batch drew random numbers from {' and '.join(drawn)}; expected none, because the data provider "
            "has draws = False. Set draws = True, so that random numbers are seeded by the position of the sample."
        )


def _drawn_by(read: Callable[[], object]) -> list[str]:
    before = _states()
    read()
    after = _states()
    return [name for name, state in before.items() if _text(state) != _text(after[name])]


def _text(state: Any) -> str:
    return json.dumps(state, default=lambda array: array.tolist())


def _states() -> dict[str, Any]:
    states = {"Python": random.getstate(), "torch": torch.default_generator.get_state()}
    numpy = sys.modules.get("numpy")
    return states if numpy is None else {"NumPy": numpy.random.get_state(), **states}
