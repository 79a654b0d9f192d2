"""Data of the job `vision`: the samples of files as rendered conversations with their images.

B: samples, L: padded length, P: pairs, R: rows.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, final

from pydantic import JsonValue

from d9d_dist import UserError
from d9d_loop.config.config_source import validate_config
from d9d_loop.data import ChatTokenizer, DatasetProvider
from d9d_loop.data.contents import contents_of, digest_of, sampled_digest
from d9d_loop.data.image_chat import (
    ImageChat,
    ImageSource,
    StoredImage,
    check_image,
    has_media,
    image_size,
    image_stamp,
    read_image_chat,
    read_image_pair,
)
from d9d_loop.data.image_processor import byte_scale, read_processor
from d9d_loop.data.sample_files import DataFiles, open_samples
from d9d_loop.data.sample_stream import Samples
from d9d_loop.jobs.job_config import OnBroken, TextDataConfig, TextJobConfig
from d9d_loop.jobs.text_data import Note, chat_tokenizer, dataset_of, note_template, samples_of
from d9d_loop.jobs.vision_collator import ImageCollator, ImageRow
from d9d_loop.jobs.vision_packing import PackedImages, RowPacker, check_family, image_lengths
from d9d_loop.model.hugging_face_model import read_config

_logger = logging.getLogger(__name__)

_NUM_CHECKED, _BYTES_CHECKED = 50_000, 1 << 28
"""Largest number of samples whose files are looked up before training, and of bytes of images that are read for it."""
_NUM_TRIED = 64


def for_images(config: TextJobConfig) -> TextJobConfig:
    """Return the configuration of the job `vision` for a job `dpo` on pairs with images; other ones are unchanged.

    Raises:
        UserError: If the configuration does not fit images.
    """
    folder, data = config.model.folder, config.dataset
    if config.job != "dpo" or data.packing or folder is None:
        return config
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig

    if type(read_config(folder, AutoConfig, {})) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return config
    samples = open_samples([*data.files, *data.evaluation_files], key="dataset.files", text_field=data.text_field)
    if not any(map(has_media, islice(samples, _NUM_CHECKED))):
        return config
    values = config.model_dump(exclude_unset=True)
    return validate_config(TextJobConfig, {**values, "job": "vision", "preference": None})


def image_chats(
    config: TextJobConfig, note: Note = _logger.info, *, pairs: bool = False, in_bytes: bool = False
) -> DatasetProvider:
    """Return the conversations of a job with their images, which are decoded when a batch is read.

    With `pairs`, the samples are preference pairs, and tensors with a value per token are [P, 2, L], the chosen answer
    first.

    A batch has the inputs of the model, `labels` [B, L], which are shifted, and -100 outside of the assistant's turns
    and on all tokens of an image, `num_skipped`, and `kept` [R]: the index of the sample of each row. A batch without
    an image gets one more row with a small one, without a label: all ranks must run the tower, because it takes part in
    their collectives. With `in_bytes`, it may have bytes instead of `pixel_values`, see `image_processor.byte_scale`:
    the tasks of this package convert them.
    """
    if config.dataset.packing:
        raise UserError(
            "image_chats: got dataset.packing = true; expected false. The job vision packs, with d9d-train."
        )
    training, evaluation, collate = _chats(config, note, num_each=2 if pairs else 1, in_bytes=in_bytes)
    data, num_tried = config.dataset, min(len(training), _NUM_TRIED)
    if all(int(collate([training[index]])["num_skipped"]) for index in range(num_tried)):
        raise _skipped(f"the first {num_tried} samples", data)
    return dataset_of(training, evaluation, config, collate=collate)


def packed_image_chats(config: TextJobConfig, note: Note = _logger.info) -> PackedImages:
    """Return the conversations of `image_chats`, packed into rows of at most `dataset.length` tokens.

    The numbers of tokens are determined once, without the pixels, and cached in `run.folder`. See `RowPacker` for the
    entries of a batch. An image that makes a batch run the tower has no row of its own.
    """
    packer = RowPacker.of(config)
    training, evaluation, collate = _chats(config, note, packer=packer, in_bytes=True)
    lengths = []
    both = (("training", training), ("held-out", evaluation))
    for kind, samples in ((kind, each) for kind, each in both if each is not None):
        lengths.append(image_lengths(samples, collate, config))
        if not any(lengths[-1]):
            raise _skipped(f"all {len(samples)} {kind} samples", config.dataset)
        if num_skipped := lengths[-1].count(0):
            note(
                f"of {len(samples)} conversations, {num_skipped} are skipped, see dataset.too_long and "
                "dataset.broken_images."
            )
    return PackedImages(config, training, evaluation, lengths, collate=collate)


def _chats(
    config: TextJobConfig, note: Note, *, in_bytes: bool, num_each: int = 1, packer: RowPacker | None = None
) -> tuple[Samples, Samples | None, ImageCollator]:
    """Return the training and the held-out samples of a job, and their collator."""
    for axis in ("context_parallel_shard", "context_parallel_replicate"):
        if getattr(config.mesh, axis) > 1:
            check_family(config, f"mesh.{axis}")
    processor = read_processor(config.model.tokenizer or config.model.folder)
    tokenizer, data = chat_tokenizer(config), config.dataset
    options = {"tokenizer": tokenizer, "processor": processor, "broken": data.broken_images}
    training, evaluation = samples_of(config, wrap=partial(ImageChats, are_pairs=num_each == 2, **options))
    note_template(config, tokenizer, note)
    scale = byte_scale(processor) if in_bytes else None
    collate = ImageCollator(processor, tokenizer, data, num_each=num_each, packer=packer, scale=scale)
    return training, evaluation, collate


def _skipped(what: str, data: TextDataConfig) -> UserError:
    return UserError(
        f"{what} are skipped, because their images or their first label do not fit into "
        f"dataset.length = {data.length} tokens, or because of dataset.broken_images; expected samples to train "
        "on. Increase the length, or make images smaller in the files of the processor."
    )


@final
class ImageChats:
    """Samples of files, or pairs, as one `ImageRow` for each conversation, with images that are not decoded."""

    def __init__(
        self, samples: DataFiles, *, are_pairs: bool, tokenizer: ChatTokenizer, processor: Any, broken: OnBroken
    ) -> None:
        self._samples, self._are_pairs, self._tokenizer = samples, are_pairs, tokenizer
        self._mark: str = processor.image_token
        self._settings = digest_of([tokenizer.identity(), processor.to_json_string()])
        self._broken = broken
        num_bytes = 0
        for index in range(min(len(samples), _NUM_CHECKED)):
            images = chain.from_iterable(chat.images for chat in self._chats(index))
            num_bytes += sum(len(each) for each in images if isinstance(each, bytes))
            if num_bytes > _BYTES_CHECKED:
                break

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sequence[ImageRow] | None:
        return self._rows(index, StoredImage)

    def sized(self, index: int) -> Sequence[ImageRow] | None:
        """Return a sample with the sizes of its images instead of their pixels."""
        return self._rows(index, image_size)

    def stamp(self, index: int) -> str:
        """Return a text that differs if the sample or one of its images does; files by size and time."""
        chats, folder = self._chats(index), self._folder(index)
        return str(
            [(chat.conversation.to_json(), [image_stamp(each, folder) for each in chat.images]) for chat in chats]
        )

    def _rows(self, index: int, read: Callable[[ImageSource, Path], Any]) -> Sequence[ImageRow] | None:
        chats, folder = self._chats(index), self._folder(index)
        sources = {id(each): each for chat in chats for each in chat.images}  # a pair has the same images twice
        try:
            images = {key: read(each, folder) for key, each in sources.items()}
        except UserError as error:
            if self._broken == "drop":
                return None
            raise self._placed(error, index) from error
        try:
            return [self._row(chat, [images[id(each)] for each in chat.images], index) for chat in chats]
        except UserError as error:
            raise self._placed(error, index) from None

    def _row(self, chat: ImageChat, images: list[Any], index: int) -> ImageRow:
        found = self._tokenizer(chat.conversation)
        if (count := found.text.count(self._mark)) != len(images):
            raise UserError(
                f"its text has {count} placeholders {self._mark!r} for {len(images)} images; expected one for each "
                f"image. Remove {self._mark!r} from the texts, or correct the chat template."
            )
        return ImageRow(found.text, found.spans, images, partial(self._samples.place, index), self._settings)

    def contents_digest(self) -> JsonValue:
        """Return the contents of the files, and the digest of some samples with their images."""
        return [contents_of(self._samples), sampled_digest(self)]

    def _chats(self, index: int) -> Sequence[ImageChat]:
        """Return the conversations of a sample; images that are files exist, unless broken ones are dropped."""
        try:
            sample = self._samples[index]
            chats = read_image_pair(sample) if self._are_pairs else (read_image_chat(sample),)
            paths = (each for chat in chats for each in chat.images if isinstance(each, str))
            for each in dict.fromkeys(paths) if self._broken == "refuse" else ():
                check_image(each, self._folder(index))
        except UserError as error:
            raise self._placed(error, index) from None
        return chats

    def _folder(self, index: int) -> Path:
        path = self._samples.path(index)
        return path if path.is_dir() else path.parent

    def _placed(self, error: UserError, index: int) -> UserError:
        return UserError(f"{self._samples.place(index)}: {error}")
