"""Conversations with images: their messages in parts, and the files or bytes of their images."""

import base64
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, final

from d9d_dist import UserError
from d9d_loop.data.contents import digest_of
from d9d_loop.data.conversation import Conversation, Message, read_conversation, read_pair, with_parts

ImageSource: TypeAlias = Any
"""Path of an image as text, its encoded bytes, or a decoded Pillow image."""

_KEYS = ("image", "image_url", "url", "base64", "bytes", "path")
_MARK = "<image>"
_MEDIA = re.compile("((input|chosen|rejected)_)?(image|img|video|audio)s?(_?(path|url|file)s?)?")
"""Keys of samples and messages, and types of parts, that usually hold an image, a video or sounds."""
_LIMITS = ("min_pixels", "max_pixels", "resized_height", "resized_width", "detail")
_T = TypeVar("_T")
_ORIENTATION, _FIRST_TURNED = 0x0112, 5
"""Key of the orientation in EXIF, and the first of its values that exchange width and height."""


@final
@dataclass(frozen=True, slots=True)
class ImageChat:
    """Conversation whose messages are lists of parts, and its images in their order.

    Attributes:
        conversation: Its parts are `{"type": "image"}` and `{"type": "text", "text": ...}`.
    """

    conversation: Conversation
    images: list[ImageSource]


def read_image_chat(sample: Mapping[str, Any]) -> ImageChat:
    """Convert a sample to a conversation with images.

    The sample has a format of `read_conversation`. Its images are in one of these places:

    - Parts of messages: `{"type": "image", "image": ...}`, or `image_url` in the form of OpenAI.
    - The key `images`, a list, or `image`. Parts `{"type": "image"}` without a value take them in order; without such
      parts, each `<image>` in a text that is not an answer takes one; without any, the images come first in the first
      message of the user.

    An image is a path, bytes, a data URL, or an object with `bytes` or `path`, as tables of `datasets` store it.

    Raises:
        UserError: If a part is neither a text nor an image, or the numbers of images and of their places differ.
    """
    return _with_images(read_conversation(sample), sample)


def read_image_pair(sample: Mapping[str, Any]) -> tuple[ImageChat, ImageChat]:
    """Convert a preference sample, see `read_pair`, to its chosen and rejected conversations with images.

    Both have the images of the sample, which are as for `read_image_chat`, at the same places of the prompt.
    """
    chosen, rejected = (_with_images(each, sample) for each in read_pair(sample))
    first = chosen.conversation.first_trained
    if chosen.conversation.messages[:first] != rejected.conversation.messages[:first]:
        raise UserError(
            "a pair has images in the prompt of one answer, and after the prompt of the other; expected equal prompts. "
            "Move the places of the images to the prompt."
        )
    return chosen, rejected


def has_media(sample: Mapping[str, Any]) -> bool:
    """Return True if a sample or a message of it has an image, a video or sounds, as a part or by a common key."""
    messages = _messages_of(sample)
    parts = [part for each in messages if isinstance(each.get("content"), list) for part in each["content"]]
    types = [str(part.get("type")) for part in parts if isinstance(part, Mapping)]
    names = ("image", "video", "audio", "chosen_image", "rejected_image")
    own = {name: sample.get(f"{name}s") or sample.get(name) for name in names}
    return any(map(_MEDIA.fullmatch, types)) or any(map(_media_keys, (own, *messages)))


def _messages_of(sample: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    turns = (sample.get(key) for key in ("messages", "conversations", "prompt", "completion", "chosen", "rejected"))
    return [each for turn in turns if isinstance(turn, list) for each in turn if isinstance(each, Mapping)]


def _media_keys(values: Mapping[str, Any]) -> list[str]:
    """Return the keys of a sample or a message that usually hold images, videos or sounds, and are not empty."""
    flags = None | bool | int | float  # such as an id
    given = {key: each for key, each in values.items() if _MEDIA.fullmatch(key) and not isinstance(each, flags)}
    return [key for key, each in given.items() if not isinstance(each, Sized) or len(each)]


def _with_images(conversation: Conversation, sample: Mapping[str, Any]) -> ImageChat:
    given = _given_images(sample)
    messages = [with_parts(message) for message in conversation.messages]
    if given and not any(part.get("type") in ("image", "image_url") for part in _parts(messages)):
        messages = _with_places(messages, len(given))
    images, rest = [_value_of(part) for part in _parts(messages) if part.get("type") != "text"], iter(given)
    if images.count(None) != len(given):
        raise UserError(
            f"a sample has {len(given)} images in images or image, and {images.count(None)} places for them; expected "
            'equal numbers. Add parts {"type": "image"}, or images.'
        )
    images = [next(rest) if image is None else image for image in images]
    others = "video|audio|chosen|rejected" if "chosen" in sample else "video|audio"
    unread = {key for key in set(_media_keys(sample)) - {"image", "images"} if not images or re.match(others, key)}
    if unread := sorted(unread.union(*map(_media_keys, _messages_of(sample)))):
        raise UserError(
            f"a sample or a message has the key {', '.join(unread)}, which is not read; expected images in parts of "
            "messages, or in the key images of the sample. Rename or remove it."
        )
    for message in messages:
        message["content"] = [part if part.get("type") == "text" else {"type": "image"} for part in message["content"]]
    return ImageChat(replace(conversation, messages=messages), [_source(image) for image in images])


@final
@dataclass(frozen=True, slots=True, eq=False)
class StoredImage:
    """Image of a sample that is not decoded yet."""

    source: ImageSource
    folder: Path

    def __call__(self) -> Any:
        """Decode the image, see `decode_image`."""
        return decode_image(self.source, self.folder)

    def contents_digest(self) -> str:
        """Return the digest of its size and pixels, or of the error, which is raised where the image is used."""
        try:
            image = self()
        except UserError as error:
            return type(error).__name__
        return digest_of([image.size, image])


def decode_image(source: ImageSource, folder: Path) -> Any:
    """Decode an image to RGB, with the orientation that it stores. Paths are relative to `folder`. Requires Pillow.

    Transparent pixels are over white. Values of 16 bits keep their upper 8.

    Raises:
        UserError: If the file is missing or not an image, or has values of 32 bits, or of 16 with a transparent color.
    """
    from PIL import Image, ImageOps  # noqa: PLC0415 - an extra

    def rgb(found: Any) -> Any:
        found.load()
        turned = found if found.getexif().get(_ORIENTATION, 1) == 1 else ImageOps.exif_transpose(found)  # a copy
        if turned.has_transparency_data:
            turned = Image.alpha_composite(Image.new("RGBA", turned.size, "white"), turned.convert("RGBA"))
        elif turned.mode.startswith("I;16"):
            turned = turned.convert("I").point(lambda value: value * (1 / 256)).convert("L")
        return turned if turned.mode == "RGB" else turned.convert("RGB")

    return _read(source, folder, rgb)


def image_size(source: ImageSource, folder: Path) -> tuple[int, int]:
    """Return the width and height of the image that `decode_image` returns, from its header. Errors are the same."""
    from PIL import Image  # noqa: PLC0415 - an extra

    def size(found: Any) -> tuple[int, int]:
        if found.format == "TIFF":  # Pillow turns it
            return found.size
        is_turned = Image.Image.getexif(found).get(_ORIENTATION, 1) >= _FIRST_TURNED  # PNG's own decodes the image
        return found.size[::-1] if is_turned else found.size

    return _read(source, folder, size)


def image_stamp(source: ImageSource, folder: Path) -> str:
    """Return a text that changes with an image: the path, size and time of a file, or the digest of bytes."""
    match source:
        case str():
            found = _status(folder / source)
            return f"{source} {found and (found.st_size, found.st_mtime_ns)}"
        case bytes():
            return hashlib.sha256(source).hexdigest()
        case _:
            return str(source.size)


def _read(source: ImageSource, folder: Path, read: Callable[[Any], _T]) -> _T:
    """Return the result of `read` for an opened image, which is not decoded yet."""
    from PIL import Image  # noqa: PLC0415 - an extra

    name = check_image(source, folder)
    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else folder / source if isinstance(source, str) else None
        with nullcontext(source) if file is None else Image.open(file) as found:
            color = found.info.get("transparency")  # a tuple, a number or bytes
            is_wide = found.has_transparency_data if found.mode.startswith("I;16") else found.mode in ("I", "F")
            if is_wide or (isinstance(color, tuple) and max(color) > 255):
                raise ValueError("its values have more than 8 bits in a form that Pillow converts to other pixels")
            return read(found)
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{name} cannot be decoded: {error}. Expected a whole image that Pillow reads. Replace or remove it, or "
            'set dataset.broken_images = "drop".'
        ) from error


def check_image(source: ImageSource, folder: Path) -> str:
    """Return the name of an image for messages; raise `UserError` if its file does not exist."""
    if not isinstance(source, str):
        return "an image"
    if _status(folder / source) is None:
        raise UserError(
            f"the image {folder / source} does not exist; expected a file, with a path relative to the file of the "
            "samples. Correct the path, or add the file."
        )
    return f"the image {folder / source}"


def _status(path: Path) -> os.stat_result | None:
    """Return the size and times of a file; `None` if it does not exist, or the system rejects the path."""
    try:
        return path.stat() if path.is_file() else None
    except OSError:
        return None


def _given_images(sample: Mapping[str, Any]) -> list[Any]:
    given, single = sample.get("images"), sample.get("image")
    single = None if isinstance(single, str) and not single else single
    if given and single is not None:
        raise UserError("a sample has the keys image and images; expected one of them. Remove the other.")
    if isinstance(given, str | bytes) or not isinstance(given, Sequence | None):
        raise UserError(f"a sample has images of the type {type(given).__name__}; expected a list. Use the key image.")
    if given is not None and None in given:
        raise UserError("a sample has a null in images; expected a path, bytes or a data URL. Remove it and its place.")
    return list(given or (single if isinstance(single, list) else [] if single is None else [single]))


def _parts(messages: Sequence[Message]) -> Iterator[Mapping[str, Any]]:
    for number, message in enumerate(messages):
        for part in message["content"]:
            if not isinstance(part, Mapping) or part.get("type") not in ("text", "image", "image_url"):
                found = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise UserError(
                    f"message {number} has a part of the type {found}; expected text or image. Remove the part, or "
                    'write {"type": "text", "text": ...} or {"type": "image", "image": ...}.'
                )
            yield part


def _with_places(messages: list[Message], count: int) -> list[Message]:
    """Return messages with a part for each `<image>` outside of answers, or `count` before the first user's text."""
    split = [each if each["role"] == "assistant" else {**each, "content": _split(each["content"])} for each in messages]
    if any(part["type"] == "image" for part in _parts(split)):
        return split
    first = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise UserError("a sample has images, but no message of a user; expected one. Add the message.")
    content = [*({"type": "image"} for _ in range(count)), *messages[first]["content"]]
    return [*messages[:first], {**messages[first], "content": content}, *messages[first + 1 :]]


def _split(parts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    texts = (text for part in parts for text in re.split(f"({_MARK})", part["text"]) if text)
    return [{"type": "image"} if text == _MARK else {"type": "text", "text": text} for text in texts]


def _value_of(part: Mapping[str, Any]) -> Any:
    if limits := [key for key in _LIMITS if part.get(key) not in (None, "auto")]:
        raise UserError(
            f"an image has {', '.join(limits)}, which is not read; expected a size for all images in the files of "
            "the processor. Set it there, and remove the key."
        )
    return next((part[key] for key in _KEYS if part.get(key) is not None), None)


def _source(image: Any) -> ImageSource:
    """Return the bytes or the path of an image; a decoded image is returned unchanged."""
    if isinstance(image, Mapping):
        inner = _value_of({key: image.get(key) for key in ("bytes", "path", "url", *_LIMITS)})
        if inner is None:
            raise UserError(
                f"an image has the keys {', '.join(map(str, image))}, without bytes or path; expected one of them."
            )
        return _source(inner)
    if isinstance(image, bytes) or hasattr(image, "convert"):
        return image
    if not isinstance(image, str):
        raise UserError(f"an image has the type {type(image).__name__}; expected a path, a data URL or bytes.")
    if image.startswith(("http://", "https://")):
        raise UserError(f"the image {image:.80} is a URL; expected a file, because nothing is downloaded. Download it.")
    if not image.startswith("data:"):
        return image.removeprefix("file://")
    try:
        return base64.b64decode(image.partition(",")[2], validate=True)
    except ValueError as error:
        raise UserError(f"the data URL {image:.40} is not base64: {error}. Correct it.") from None
