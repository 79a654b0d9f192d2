"""Collator of conversations with images: the model's own processor converts them to tokens and pixels.

B: samples, L: padded length.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from math import prod
from multiprocessing import current_process
from typing import Any, final

import torch
from torch import Tensor

from d9d_dist import UserError
from d9d_loop.data import ChatTokenizer
from d9d_loop.data.chat_tokenizer import Span
from d9d_loop.data.conversation import Conversation
from d9d_loop.data.image_processor import BYTES_OF_ONE_FRAME, IMAGE_BYTES, pixels_tensor, reads_tensors
from d9d_loop.data.packed_stream import IGNORED_LABEL
from d9d_loop.data.worker_pool import WORKER_NAME
from d9d_loop.jobs.job_config import TextDataConfig
from d9d_loop.jobs.text_tasks import PER_TOKEN, POSITIONS, label_positions
from d9d_loop.jobs.vision_packing import RowPacker

_BYTES_AT_ONCE = 1 << 18
"""Bytes of decoded images after which the processor converts them; the conversion needs many times as much."""
_STAND_IN = Conversation(
    [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "."}]}], first_trained=1
)


@final
@dataclass(frozen=True, slots=True)
class ImageRow:
    """Rendered conversation with its images.

    Attributes:
        text: Text with one placeholder for each image.
        spans: Characters of `text` that contribute to the loss.
        images: Its images, each a `StoredImage`; or decoded, or their sizes.
        place: Function that returns the file and position of the sample.
        settings: Digest of the tokenizer and the processor, a part of the identity of the data.
    """

    text: str
    spans: Sequence[Span]
    images: list[Any]
    place: Any = None
    settings: str = ""


@final
class ImageCollator:
    """Collator of samples of `num_each` rows each; it decodes and converts them in portions of limited image size.

    A row of more than `data.length` tokens is cut after its last image, if `data.too_long` is `truncate`; a sample with
    a row whose images or first label do not fit is skipped. With a packer, it collates lists of samples, one per row.
    """

    def __init__(
        self,
        processor: Any,
        tokenizer: ChatTokenizer,
        data: TextDataConfig,
        *,
        num_each: int,
        packer: RowPacker | None = None,
        scale: Tensor | None = None,
    ) -> None:
        from PIL import Image  # noqa: PLC0415 - an extra

        self._processor, self._length, self._num_each, self._packer = processor, data.length, num_each, packer
        self._too_long, self._broken = data.too_long, data.broken_images
        self._tokenizer_identity = tokenizer.identity()
        self._scale, self._options = scale, {} if scale is None else BYTES_OF_ONE_FRAME
        self._reads_tensors = reads_tensors(processor, **self._options)
        self._stand_in = ImageRow(tokenizer.render(_STAND_IN), (), [Image.new("RGB", (64, 64), (255, 255, 255))])
        self._check_text()

    def __call__(self, samples: list[Any]) -> dict[str, Tensor]:
        """Return the batch of samples."""
        groups = [[each] for each in samples] if self._packer is None else samples
        group_of = [number for number, group in enumerate(groups) for _ in group]
        given = {index: rows for index, rows in enumerate(chain.from_iterable(groups)) if rows is not None}
        kept, parts, ends = list[int](), list[dict[str, Tensor]](), list[int]()
        for part in self._portions(given):
            if (found := self._process_kept(part)) is not None:
                kept += part
                parts.append(found[0])
                ends += found[1]
            part.clear()  # free its images before others are decoded
        num_rows, num_own = len(ends), len(kept)
        if not any(part.keys() & {"pixel_values", IMAGE_BYTES} for part in parts):
            stand_ins, more = self._process([self._stand_in] * self._num_each)
            parts.append(stand_ins)
            ends += more
        values = {"input_ids": self._processor.tokenizer.pad_token_id, "labels": IGNORED_LABEL}
        batch = join_batches(parts, {name: values.get(name, 0) for name in PER_TOKEN})
        lengths = batch["attention_mask"].sum(1).tolist()
        width = max(self._length, *ends[num_rows:], 0)
        batch = {name: each[:, :width] if name in PER_TOKEN else each for name, each in batch.items()}
        labels = batch["labels"].clone()
        labels[:, self._length :] = IGNORED_LABEL
        batch["labels"] = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], IGNORED_LABEL)), dim=1)
        if self._num_each > 1:
            split = (-1, self._num_each)
            batch = {name: each.unflatten(0, split) if name in PER_TOKEN else each for name, each in batch.items()}
        if self._scale is not None:
            batch["image_scale"] = self._scale
        batch["num_skipped"] = torch.tensor(len(group_of) - num_own)
        if self._packer is None:
            return {**batch, "kept": torch.tensor(kept, dtype=torch.int64), POSITIONS: label_positions(batch["labels"])}
        cut = [min(each, self._length) for each in lengths[:num_own]] + lengths[num_own:]
        packed = [[s for s, index in enumerate(kept) if group_of[index] == group] for group in range(len(groups))]
        min(packed, key=lambda row: sum(cut[s] for s in row)).extend(range(num_own, len(cut)))
        rows = self._packer(batch, cut, packed)
        return {**rows, POSITIONS: label_positions(rows["labels"])}

    def identity(self) -> str:
        """Return everything that determines the number of tokens of a row, and whether it is skipped."""
        settings = [self._length, self._too_long, self._broken]
        return f"{self._tokenizer_identity} {self._processor.to_json_string()} {settings}"

    def replacements(self, sizes: Sequence[tuple[int, int]]) -> list[str]:
        """Return the texts that replace the image placeholders of a row, whose images have these (width, height)."""
        from PIL import Image  # noqa: PLC0415 - an extra

        images = [Image.new("RGB", each) for each in sizes]
        self._process([ImageRow(self._processor.image_token * len(sizes), (), images)])
        return [each["replacement"] for each in self._processor.get_text_with_replacements.found[0]]

    def num_tokens(self, sample: Sequence[ImageRow], replacements: Callable[[tuple[Any, ...]], list[str]]) -> int:
        """Return the number of tokens of a one-row sample with sizes in place of its images; 0 if it is skipped."""
        (row,) = sample
        try:
            texts = replacements(tuple(row.images)) if row.images else []
        except Exception as error:
            self._reject(row, error)
            return 0
        (text,), (replaced,) = self._processor.get_text_with_replacements([row.text], texts)
        found = self._processor.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = torch.tensor(found["input_ids"])
        labels, end = _labels(row, ids, torch.tensor(found["offset_mapping"]).view(-1, 2), replaced)
        return min(len(ids), self._length) if self._fits(row, labels, end) else 0

    def _check_text(self) -> None:
        """Raise `UserError` if the processor changes a text outside of placeholders, which would shift the labels."""
        found, text = self._process([self._stand_in])[0]["input_ids"][0].tolist(), self._stand_in.text
        for each in reversed(self._processor.get_text_with_replacements.found[0]):
            text = text[: each["span"][0]] + each["replacement"] + text[each["span"][1] :]
        tokenizer = self._processor.tokenizer
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        if found != expected:
            both = enumerate(zip(found, expected, strict=False))
            start = next((n for n, pair in both if pair[0] != pair[1]), min(len(found), len(expected)))
            got, kept = (tokenizer.decode(ids[start : start + 9]) for ids in (found, expected))
            raise UserError(
                f"{type(self._processor).__name__} changes the text of chats outside of images: got {got!r}, expected "
                f"{kept!r} as the chat template writes it, where the job finds the answers. If it adds a token at "
                "the start or the end, write it in the template; otherwise choose another model."
            )

    def _portions(self, samples: dict[int, Sequence[ImageRow]]) -> Iterator[dict[int, Sequence[ImageRow]]]:
        """Yield samples with decoded images, in portions that end when they reach `_BYTES_AT_ONCE` bytes."""
        portion, num_bytes = dict[int, Sequence[ImageRow]](), 0
        for index, rows in samples.items():
            if (decoded := self._decoded(rows)) is None:
                continue
            portion[index] = decoded
            images = chain.from_iterable(row.images for row in decoded)
            num_bytes += sum(i.nbytes if isinstance(i, Tensor) else 3 * i.width * i.height for i in images)
            if num_bytes >= _BYTES_AT_ONCE:
                yield portion
                portion, num_bytes, decoded = dict[int, Sequence[ImageRow]](), 0, None
        yield portion

    def _decoded(self, rows: Sequence[ImageRow]) -> Sequence[ImageRow] | None:
        """Return a sample with decoded images; `None` if an image is broken and such samples are dropped."""
        decode = cache(lambda i: pixels_tensor(i()) if self._reads_tensors else i())  # a pair has the same images
        try:
            return [replace(row, images=[decode(i) if callable(i) else i for i in row.images]) for row in rows]
        except UserError as error:
            if self._broken == "drop":
                return None
            raise UserError(f"{rows[0].place()}: {error}") from error

    def _process_kept(self, samples: dict[int, Sequence[ImageRow]]) -> tuple[dict[str, Tensor], list[int]] | None:
        """Remove skipped samples from `samples`; return `_process` of the rest, or `None` if all are skipped."""
        while samples:
            rows = [row for of_sample in samples.values() for row in of_sample]
            try:
                batch, ends = self._process(rows)
            except Exception:  # a processor does not say which image it cannot convert
                skipped = [index for index, each in samples.items() if not all(map(self._is_accepted, each))]
                if not skipped:
                    raise
            else:
                lengths = batch["attention_mask"].sum(1).tolist()
                fits = [
                    self._fits(row, labels[:length], end)
                    for row, labels, length, end in zip(rows, batch["labels"], lengths, ends, strict=True)
                ]
                pairs = zip(range(0, len(rows), self._num_each), samples, strict=True)
                skipped = [index for start, index in pairs if not all(fits[start : start + self._num_each])]
                if not skipped:
                    return batch, ends
            for index in skipped:
                del samples[index]
        return None

    def _process(self, rows: Sequence[ImageRow]) -> tuple[dict[str, Tensor], list[int]]:
        """Return the model's inputs with unshifted labels [B, L], and the end of each row's last image, in tokens."""
        self._processor.get_text_with_replacements.found = [[] for _ in rows]
        batch = dict(
            self._processor(
                text=[row.text for row in rows],
                images=[row.images for row in rows] if any(row.images for row in rows) else None,
                padding=True,
                padding_side="right",
                truncation=False,
                add_special_tokens=False,  # the template has written them
                return_tensors="pt",
                return_offsets_mapping=True,
                **self._options,
            )
        )
        if self._scale is not None and "pixel_values" in batch:
            batch[IMAGE_BYTES] = batch.pop("pixel_values")
        offsets, replaced = batch.pop("offset_mapping"), self._processor.get_text_with_replacements.found
        lengths = batch["attention_mask"].sum(1).tolist()
        found = [
            _labels(row, batch["input_ids"][number], offsets[number, : lengths[number]], replaced[number])
            for number, row in enumerate(rows)
        ]
        batch["labels"] = torch.stack([labels for labels, _ in found])
        return batch, [end for _, end in found]

    def _is_accepted(self, row: ImageRow) -> bool:
        """Return True if the processor can convert a row; if not, raise `UserError` unless such rows are dropped."""
        try:
            self._process([row])
        except Exception as error:
            self._reject(row, error)
            return False
        return True

    def _reject(self, row: ImageRow, error: Exception) -> None:
        """Raise `UserError` for a row that the processor cannot convert, unless such rows are dropped."""
        if self._broken == "refuse":
            raise UserError(
                f"{row.place()}: the processor cannot convert the images: {error} Replace or remove them, or set "
                'dataset.broken_images = "drop".'
            ) from error

    def _fits(self, row: ImageRow, labels: Tensor, end: int) -> bool:
        """Return True if a row is used. Raise `UserError` if it is too long and such rows are errors."""
        if len(labels) <= self._length:
            return True
        if self._too_long == "refuse":
            raise UserError(
                f"{row.place()}: the sample has {len(labels)} tokens; expected at most dataset.length = "
                f'{self._length}. Increase the length, or set dataset.too_long = "drop".'
            )
        has_label = bool((labels[: self._length] != IGNORED_LABEL).any())
        return self._too_long == "truncate" and end <= self._length and has_label


def _labels(row: ImageRow, ids: Tensor, offsets_L2: Tensor, replaced: Sequence[dict[str, Any]]) -> tuple[Tensor, int]:
    """Return the labels [L] of the tokens of a row, and the end of its last image. `offsets_L2` has no padding."""
    labels, end = torch.full_like(ids, IGNORED_LABEL), 0
    starts, stops = offsets_L2.T.numpy()

    def tokens_of(span: Span) -> slice:
        """Return the range of tokens inside a span of characters, without empty tokens at both ends."""
        first, stop = bisect_left(starts, span[0]), bisect_right(stops, span[1])
        while first < stop and starts[first] == stops[first]:
            first += 1
        while first < stop and starts[stop - 1] == stops[stop - 1]:
            stop -= 1
        return slice(first, max(first, stop))

    for span in row.spans:
        place = tokens_of(_moved(span, replaced))
        labels[place] = ids[place]
    for each in replaced:
        place = tokens_of(each["new_span"])
        labels[place] = IGNORED_LABEL
        end = max(end, place.stop)
    return labels, end


def _moved(span: Span, replaced: Sequence[dict[str, Any]]) -> Span:
    """Return the position of a span after the replacement of the placeholders before it."""
    added = [(each["span"][1], each["new_span"][1] - each["span"][1]) for each in replaced]
    start, stop = (char + max((more for end, more in added if end <= char), default=0) for char in span)
    return start, stop


def join_batches(parts: list[dict[str, Tensor]], row_values: Mapping[str, float]) -> dict[str, Tensor]:
    """Join batches along their first dim, and pad the others to equal sizes. Frees the tensors of several `parts`.

    A part may lack a tensor; one of `row_values`, the padding values of tensors [B, L], is then padding. Others are
    padded with 0. In a worker process, the results are in shared memory: sending them copies nothing.
    """
    if len(parts) == 1:
        return parts[0]
    joined: dict[str, Tensor] = {}
    names = dict.fromkeys(name for part in parts for name in part)
    for part in parts:
        for name in names.keys() & row_values.keys():
            part.setdefault(name, torch.full_like(part["input_ids"], row_values[name]))
    for name in names:
        found = [part.pop(name) for part in parts if name in part]
        sizes = [max(each) for each in zip(*(each.shape[1:] for each in found), strict=True)]
        out = _new_tensor((sum(map(len, found)), *sizes), found[0].dtype)
        if any(list(each.shape[1:]) != sizes for each in found):
            out.fill_(row_values.get(name, 0))
        start = 0
        while found:
            part = found.pop(0)
            out[(slice(start, start + len(part)), *map(slice, part.shape[1:]))] = part
            start += len(part)
        joined[name] = out
    return joined


def _new_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a new tensor without values, in a worker process in shared memory."""
    if not current_process().name.startswith(WORKER_NAME) or not prod(shape):
        return torch.empty(shape, dtype=dtype)
    storage = torch.UntypedStorage._new_shared(prod(shape) * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage, 0, torch.Size(shape))  # ty: ignore[no-matching-overload]
