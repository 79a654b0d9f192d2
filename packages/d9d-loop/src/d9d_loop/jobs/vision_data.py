"""Data of the job `vision`: conversations with images, which the model's own processor converts to tokens and pixels.

B: samples, L: padded length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import torch
from pydantic import JsonValue
from torch import Tensor

from d9d_dist import UserError
from d9d_dist.install_hint import install_hint
from d9d_loop.data import ChatTokenizer, DatasetProvider
from d9d_loop.data.chat_tokenizer import Span
from d9d_loop.data.contents import contents_of, sampled_digest
from d9d_loop.data.conversation import Conversation, TooLong
from d9d_loop.data.image_chat import ImageChat, check_image, decode_image, read_image_chat
from d9d_loop.data.packed_stream import IGNORED_LABEL
from d9d_loop.data.sample_files import DataFiles
from d9d_loop.data.text_tokenizer import normalize_tokenizer
from d9d_loop.jobs.job_config import OnBroken, TextJobConfig
from d9d_loop.jobs.text_data import Note, chat_tokenizer, dataset_of, note_template, samples_of
from d9d_loop.jobs.text_tasks import PER_TOKEN

_NUM_CHECKED, _BYTES_CHECKED = 50_000, 1 << 28
"""Largest number of samples whose files are looked up before training, and of bytes of images that are read for it."""
_NUM_TRIED = 64
_STAND_IN = Conversation(
    [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "."}]}], first_trained=1
)


def image_chats(config: TextJobConfig, note: Note) -> DatasetProvider:
    """Return the conversations of a job with their images, which are decoded when a batch is read.

    A batch has the inputs of the model, `labels` [B, L], which are shifted, and -100 outside of the assistant's turns
    and on all tokens of an image, and `num_skipped`. A batch without an image gets a row with a small one, without a
    label: all ranks must run the tower, because it takes part in their collectives.
    """
    processor, tokenizer, data = _read_processor(config), chat_tokenizer(config), config.dataset
    wrap = partial(ImageChats, tokenizer=tokenizer, mark=processor.image_token, broken=data.broken_images)
    training, evaluation = samples_of(config, wrap=wrap)
    note_template(config, tokenizer, note)
    collate = ImageCollator(processor, tokenizer, length=data.length, too_long=data.too_long)
    num_tried = min(len(training), _NUM_TRIED)
    if all(int(collate([training[index]])["num_skipped"]) for index in range(num_tried)):
        raise UserError(
            f"the first {num_tried} samples are skipped, because their images or their first label do not fit into "
            f"dataset.length = {data.length} tokens, or because of dataset.broken_images; expected samples to train "
            "on. Increase the length, or make images smaller in the files of the processor."
        )
    return dataset_of(training, evaluation, config, collate=collate)


@final
@dataclass(frozen=True, slots=True)
class ImageRow:
    """Rendered conversation with its decoded images.

    Attributes:
        text: Text with one placeholder for each image.
        spans: Characters of `text` that contribute to the loss.
        place: Function that returns the file and position of the sample.
    """

    text: str
    spans: Sequence[Span]
    images: list[Any]
    place: Any = None


@final
class ImageChats:
    """Conversations of files as `ImageRow`; `None` for a sample with a broken image, if such samples are dropped."""

    def __init__(self, samples: DataFiles, *, tokenizer: ChatTokenizer, mark: str, broken: OnBroken) -> None:
        self._samples, self._tokenizer, self._mark, self._broken = samples, tokenizer, mark, broken
        num_bytes = 0
        for index in range(min(len(samples), _NUM_CHECKED)):
            chat = self._chat(index)
            num_bytes += sum(len(each) for each in chat.images if isinstance(each, bytes))
            if num_bytes > _BYTES_CHECKED:
                break

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> ImageRow | None:
        chat = self._chat(index)
        try:
            images = [decode_image(each, self._folder(index)) for each in chat.images]
        except UserError as error:
            if self._broken == "drop":
                return None
            raise self._placed(error, index) from error
        try:
            found = self._tokenizer(chat.conversation)
            if (count := found.text.count(self._mark)) != len(images):
                raise UserError(
                    f"its text has {count} placeholders {self._mark!r} for {len(images)} images; expected one for each "
                    f"image. Remove {self._mark!r} from the texts, or correct the chat template."
                )
        except UserError as error:
            raise self._placed(error, index) from None
        return ImageRow(found.text, found.spans, images, partial(self._samples.place, index))

    def contents_digest(self) -> JsonValue:
        """Return the tokenizer and the contents of the files, and the digest of some samples with their images."""
        return [self._tokenizer.identity(), contents_of(self._samples), sampled_digest(self)]

    def _chat(self, index: int) -> ImageChat:
        """Return a conversation; its images that are files exist, unless broken ones are dropped."""
        try:
            chat = read_image_chat(self._samples[index])
            for each in chat.images if self._broken == "refuse" else ():
                check_image(each, self._folder(index))
        except UserError as error:
            raise self._placed(error, index) from None
        return chat

    def _folder(self, index: int) -> Path:
        path = self._samples.path(index)
        return path if path.is_dir() else path.parent

    def _placed(self, error: UserError, index: int) -> UserError:
        return UserError(f"{self._samples.place(index)}: {error}")


@final
class ImageCollator:
    """Collator of `ImageRow`: one call of the processor for the texts and images of a batch.

    Args:
        length: Largest number of tokens of a row.
        too_long: Treatment of longer rows: `truncate` cuts text after the last image. A row whose images or first
            label do not fit is skipped.
    """

    def __init__(self, processor: Any, tokenizer: ChatTokenizer, *, length: int, too_long: TooLong) -> None:
        from PIL import Image  # noqa: PLC0415 - an extra

        self._processor, self._length, self._too_long = processor, length, too_long
        white = Image.new("RGB", (64, 64), (255, 255, 255))
        self._stand_in = ImageRow(tokenizer.render(_STAND_IN), (), [white])

    def __call__(self, samples: list[ImageRow | None]) -> dict[str, Tensor]:
        """Return the batch of samples."""
        rows = [row for row in samples if row is not None]
        while True:
            num_own = len(rows)
            if not any(row.images for row in rows):
                rows = [*rows, self._stand_in]
            batch, ends = self._process(rows)
            kept = [row for number, row in enumerate(rows[:num_own]) if self._fits(row, batch, number, ends[number])]
            if len(kept) == num_own:
                break
            rows = kept
        width = max(self._length, *ends[num_own:], 0)
        batch = {name: each[:, :width] if name in PER_TOKEN else each for name, each in batch.items()}
        labels = batch["labels"].clone()
        labels[:, self._length :] = IGNORED_LABEL
        batch["labels"] = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], IGNORED_LABEL)), dim=1)
        batch["num_skipped"] = torch.tensor(len(samples) - num_own)
        return batch

    def _process(self, rows: Sequence[ImageRow]) -> tuple[dict[str, Tensor], list[int]]:
        """Return the inputs of the model with labels [B, L] that are not shifted, and the end of each row's images."""
        batch = dict(
            self._processor(
                text=[row.text for row in rows],
                images=[row.images for row in rows],
                padding=True,
                padding_side="right",
                truncation=False,
                add_special_tokens=False,  # the template has written them
                return_tensors="pt",
                return_offsets_mapping=True,
            )
        )
        offsets, replaced = batch.pop("offset_mapping").tolist(), self._processor.get_text_with_replacements.found
        batch["labels"], ends = torch.full_like(batch["input_ids"], IGNORED_LABEL), list[int]()
        for number, row in enumerate(rows):
            labels, ids, end = batch["labels"][number], batch["input_ids"][number], 0
            inside = list(map(tuple, offsets[number]))
            for span in row.spans:
                first, stop = _tokens_of(_moved(span, replaced[number]), inside)
                labels[first:stop] = ids[first:stop]
            for each in replaced[number]:
                first, stop = _tokens_of(each["new_span"], inside)
                labels[first:stop] = IGNORED_LABEL
                end = max(end, stop)
            ends.append(end)
        return batch, ends

    def _fits(self, row: ImageRow, batch: dict[str, Tensor], number: int, end: int) -> bool:
        """Return True if a row is used. Raise `UserError` if it is too long, and such rows are errors."""
        num_tokens = int(batch["attention_mask"][number].sum())
        if num_tokens <= self._length:
            return True
        if self._too_long == "refuse":
            raise UserError(
                f"{row.place()}: the sample has {num_tokens} tokens; expected at most dataset.length = {self._length}. "
                'Increase the length, or set dataset.too_long = "drop".'
            )
        has_label = bool((batch["labels"][number, : self._length] != IGNORED_LABEL).any())
        return self._too_long == "truncate" and end <= self._length and has_label


@final
class _Replacements:
    """Recorder of the placeholders that a processor replaces in each text, as it reports them.

    It stands in for the method of the processor. The option `return_text_replacement_offsets` of the processor's call
    would do, but some processors of transformers 5.23 fail to convert its result.
    """

    def __init__(self, processor: Any) -> None:
        self._processor, self.found = processor, list[Any]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        texts, self.found = type(self._processor).get_text_with_replacements(self._processor, *args, **kwargs)
        return texts, self.found


def _moved(span: Span, replaced: Sequence[dict[str, Any]]) -> Span:
    """Return characters of a text in the text whose placeholders are replaced."""
    added = [(each["span"][1], each["new_span"][1] - each["span"][1]) for each in replaced]
    start, stop = (char + max((more for end, more in added if end <= char), default=0) for char in span)
    return start, stop


def _tokens_of(span: Span, offsets: Sequence[Span]) -> Span:
    """Return the indices [first, stop) of the tokens inside of characters of a text."""
    start, stop = span
    found = [index for index, (begin, end) in enumerate(offsets) if start <= begin < end <= stop]
    return (found[0], found[-1] + 1) if found else (0, 0)


def _read_processor(config: TextJobConfig) -> Any:
    """Return the processor of the model's folder."""
    if any(find_spec(name) is None for name in ("PIL", "torchvision")):
        raise UserError(
            "job = vision needs the packages pillow and torchvision, which are not installed. Install them: "
            f"{install_hint('d9d-loop', 'vision')}"
        )
    from transformers import AutoProcessor, ProcessorMixin

    folder = config.model.tokenizer or config.model.folder
    expected = (
        "Expected the files of a processor of images, such as preprocessor_config.json. Copy them from the released "
        "model, or save them with AutoProcessor.from_pretrained(...).save_pretrained(...)."
    )
    try:
        processor: Any = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises exceptions of many libraries
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"{folder}: transformers cannot read its processor: {why} {expected}") from error
    if not isinstance(processor, ProcessorMixin) or not hasattr(processor, "image_processor"):
        raise UserError(f"{folder} has a {type(processor).__name__} and no processor of images. {expected}")
    if getattr(processor, "image_token", None) is None or not hasattr(processor, "get_text_with_replacements"):
        raise UserError(
            f"{type(processor).__name__} does not tell which tokens belong to an image (image_token and "
            "get_text_with_replacements); expected a processor that does, and transformers >= 5.18. Update "
            "transformers, or choose another model."
        )
    if processor.tokenizer.pad_token is None:
        raise UserError(
            f"the tokenizer of {folder} has no padding token; expected one. Set pad_token in tokenizer_config.json."
        )
    normalize_tokenizer(processor.tokenizer.backend_tokenizer)
    processor.get_text_with_replacements = _Replacements(processor)
    return processor
