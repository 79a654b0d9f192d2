"""Packing of conversations with images: their lengths in tokens, the stream of rows, and the positions of a row.

S: samples, B: rows, L: row length, D: dimensions of the model's rotary positions.
"""

import inspect
import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, final

import torch
from pydantic import JsonValue
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Subset

from d9d_dist import UserError
from d9d_loop.data import IndexedStream, PackedStream, SampleStream
from d9d_loop.data.contents import contents_of, digest_of
from d9d_loop.data.packed_provider import PackedProvider
from d9d_loop.data.packed_stream import IGNORED_LABEL
from d9d_loop.data.sample_stream import Samples
from d9d_loop.data.token_file_writer import new_folder, write_once
from d9d_loop.jobs.job_config import TextJobConfig
from d9d_loop.jobs.text_data import cache_folder
from d9d_loop.jobs.text_model import auto_class
from d9d_loop.jobs.text_tasks import PER_TOKEN
from d9d_loop.model._hugging_face_context import IMAGE_MODELS
from d9d_loop.model.hugging_face_model import read_config


def check_family(config: TextJobConfig, key: str) -> Any:
    """Return the model configuration of a job; raise `UserError` if the setting `key` is not tested with its family."""
    folder = config.model.folder
    assert folder is not None
    found = read_config(folder, auto_class(config.job), config.model.entries)
    if found.model_type not in IMAGE_MODELS:
        raise UserError(
            f"{key} is set, but {folder} is a {found.model_type}, for which no test compares it with single whole "
            f"samples; expected {', '.join(sorted(IMAGE_MODELS))}. Remove {key}."
        )
    return found


@final
class RowPacker:
    """Packer of samples into rows: the samples of a batch element follow each other in its row, before the padding.

    A batch has `position_ids` [B, L] instead of `attention_mask`. They start at 0 in each sample, and `transformers`
    derives from them which tokens see each other. A model with positions in several dimensions gets [1 + D, B, L]:
    these, and those that its method `get_rope_index` gives each sample.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model

    @staticmethod
    def of(config: TextJobConfig) -> "RowPacker":
        """Return the packer for the model of a job; raise `UserError` if samples of a row would see each other."""
        found = check_family(config, "dataset.packing")
        used = {found._attn_implementation, found.get_text_config()._attn_implementation} - {None, "sdpa", "eager"}
        if used:
            raise UserError(
                f"dataset.packing is set, but {config.model.folder} has the attention {', '.join(sorted(used))}, which "
                "mixes the samples of a row; expected sdpa or eager. Remove model.attn_implementation."
            )
        with torch.device("meta"):
            whole = auto_class(config.job).from_config(found)
        model = next((each for each in whole.modules() if hasattr(each, "get_rope_index")), None)
        if model is not None:
            model._modules.clear()  # the method reads only the configuration
        return RowPacker(model)

    def __call__(
        self, batch: dict[str, Tensor], lengths: Sequence[int], rows: Sequence[Sequence[int]]
    ) -> dict[str, Tensor]:
        """Return the batch with samples [S, L] cut to `lengths` and packed; a row lists the indices of its samples."""
        names = [name for name in PER_TOKEN & batch.keys() if name != "attention_mask"]
        packed = {name: each for name, each in batch.items() if name not in PER_TOKEN}
        for name in names:
            parts = [torch.cat([batch[name][s, : lengths[s]] for s in row] or [batch[name][0, :0]]) for row in rows]
            value = IGNORED_LABEL if name == "labels" else 0
            packed[name] = pad_sequence(parts, batch_first=True, padding_value=value)
        length = packed["input_ids"].shape[1]
        rotary = None if self._model is None else _rope_index(self._model, batch)
        positions = []
        for row in rows:
            ends = [*(lengths[s] for s in row), length - sum(lengths[s] for s in row)]
            of_row = torch.cat([torch.arange(end) for end in ends])
            if rotary is not None:
                others = [*(rotary[:, s, : lengths[s]] for s in row), torch.arange(ends[-1]).expand(len(rotary), -1)]
                of_row = torch.cat((of_row[None], torch.cat(others, dim=1)))
            positions.append(of_row)
        packed["position_ids"] = torch.stack(positions, dim=-2)
        return packed


def _rope_index(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the rotary positions [D, S, L] of samples by the model's own method."""
    wanted = inspect.signature(model.get_rope_index).parameters.keys() & batch.keys()
    return model.get_rope_index(**{name: batch[name] for name in wanted})[0]


@final
class PackedImages(PackedProvider):
    """Conversations with images, packed into rows. Those of length 0 are skipped.

    Attributes:
        lengths: Number of tokens of each training sample, and of each held-out sample if there are some.
    """

    def __init__(
        self,
        config: TextJobConfig,
        training: Samples,
        evaluation: Samples | None,
        lengths: Sequence[list[int]],
        *,
        collate: Any,
    ) -> None:
        held_out = None if evaluation is None else (evaluation, lengths[1])
        super().__init__((training, lengths[0]), held_out, shuffle=config.data.shuffle, epochs=config.epochs)
        self.lengths, self._collate, self._row_length = lengths, collate, config.dataset.length

    def collate(self, samples: list[Any]) -> Any:
        """Collate rows."""
        return self._collate(samples)

    def _rows(self, samples: tuple[Samples, list[int]], *, seed: int, **options: Any) -> SampleStream:
        kept: Any = _Kept(*samples, self._collate.identity())
        chats = IndexedStream(kept, seed=seed, length=list(filter(None, samples[1])).__getitem__, **options)
        return PackedStream(chats, row_length=self._row_length, seed=seed, pack=list)


@final
class _Kept(Subset[Any]):
    """Samples of a length above 0. The contents include the lengths, which determine the rows, and the processor."""

    def __init__(self, samples: Any, lengths: list[int], settings: str) -> None:
        super().__init__(samples, [index for index, length in enumerate(lengths) if length])
        self._identity: list[JsonValue] = [digest_of(torch.tensor(lengths)), settings]

    def contents_digest(self) -> JsonValue:
        """Return the contents of all samples, their lengths, and what determined them."""
        return [contents_of(self.dataset), *self._identity]


def image_lengths(samples: Samples, collate: Any, config: TextJobConfig) -> list[int]:
    """Return the number of tokens of each conversation of `ImageChats`, with those of its images; 0 if it is skipped.

    The processor gives the placeholders of a blank image of each size. Results are cached in `run.folder`.
    """
    data: Any = samples
    chats, indices = (data.dataset, data.indices) if isinstance(data, Subset) else (data, range(len(data)))
    folder = cache_folder(config, "images", settings=collate.identity(), samples=map(chats.stamp, indices))

    def write() -> None:
        replacements: Callable[[tuple[Any, ...]], list[str]] = cache(collate.replacements)
        sized = map(chats.sized, indices)
        lengths = [0 if sample is None else collate.num_tokens(sample, replacements) for sample in sized]
        with new_folder(folder) as path:
            (path / "lengths.json").write_text(json.dumps(lengths))

    write_once(folder, write)
    return json.loads((folder / "lengths.json").read_text())
