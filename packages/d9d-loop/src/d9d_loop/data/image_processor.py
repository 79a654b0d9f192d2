"""Processor of images of a model folder: renders placeholders of images as tokens, and images as pixels.

N: patches, C: channels, F: frames, P: pixels of a patch.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from d9d_dist import UserError
from d9d_dist.install_hint import install_hint
from d9d_loop.data.text_tokenizer import normalize_tokenizer

IMAGE_BYTES = "image_bytes"
"""Entry of a batch with the patches of images as bytes [N, C P], beside their `image_scale`; see `byte_scale`."""


def read_processor(folder: Path | None) -> Any:
    """Read the processor of a model folder. Its attribute `get_text_with_replacements.found` has what it replaced.

    Raises:
        UserError: If a package is missing, or the folder has no image processor that reports what it replaces.
    """
    if any(find_spec(name) is None for name in ("PIL", "torchvision")):
        raise UserError(
            "images need the packages pillow and torchvision, which are not installed. Install them: "
            f"{install_hint('d9d-loop', 'vision')}"
        )
    from transformers import AutoProcessor, ProcessorMixin

    expected = (
        "Expected the files of an image processor, such as preprocessor_config.json. Copy them from the released "
        "model, or save them with AutoProcessor.from_pretrained(...).save_pretrained(...)."
    )
    try:
        processor: Any = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises exceptions of many libraries
        why = next(iter(str(error).splitlines()), type(error).__name__)
        expected = "" if isinstance(error, ImportError) else f" {expected}"  # it names the package to install
        raise UserError(f"{folder}: transformers cannot read its processor: {why}{expected}") from error
    if not isinstance(processor, ProcessorMixin) or not hasattr(processor, "image_processor"):
        raise UserError(f"{folder} has a {type(processor).__name__} and no image processor. {expected}")
    if getattr(processor, "image_token", None) is None or not hasattr(processor, "get_text_with_replacements"):
        raise UserError(
            f"{type(processor).__name__} does not report which tokens belong to an image (image_token and "
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


@final
class _ChannelsLast(Tensor):
    """Pixels [C, height, width] that stay channels-last when a processor resizes them, so torch needs less memory."""

    def contiguous(self, memory_format: Any = None) -> Tensor:
        return self.as_subclass(Tensor)


def pixels_tensor(image: Any) -> Tensor:
    """Return the bytes [C, height, width] of a Pillow RGB image, with channels last in memory."""
    width, height = image.size
    pixels = torch.empty((height, width, 3), dtype=torch.uint8)
    for top in range(0, height, 32):  # Pillow makes several copies
        pixels.numpy()[top : top + 32] = image.crop((0, top, width, min(top + 32, height)))
    return pixels.permute(2, 0, 1).as_subclass(_ChannelsLast)


def reads_tensors(processor: Any, **options: Any) -> bool:
    """Return True if a processor's outputs for images and for their `pixels_tensor` are bitwise equal."""
    try:
        expected, found = _of_noise(processor, **options), _of_noise(processor, pixels_tensor, **options)
        return all(torch.equal(each, found[name]) for name, each in expected.items())
    except Exception:  # it reads no tensors
        return False


def _of_noise(processor: Any, convert: Callable[[Any], Any] = lambda image: image, **options: Any) -> Any:
    """Return a processor's outputs for three Pillow images of noise, converted by `convert`."""
    from PIL import Image  # noqa: PLC0415 - an extra

    noise = torch.randint(256, (96, 128, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy()
    images = [[convert(Image.fromarray(each))] for each in (noise, noise[:64, :64], noise[:, :40])]
    return processor(images, [processor.image_token] * len(images), padding=True, return_tensors="pt", **options)


BYTES_OF_ONE_FRAME: dict[str, Any] = {"do_rescale": False, "do_normalize": False, "temporal_patch_size": 1}
"""Options of a processor with which its patches are bytes of one frame."""


def byte_scale(processor: Any) -> Tensor | None:
    """Return the mean and standard deviation [2, C, F] with which a processor normalizes the bytes of its patches.

    `None` if its pixels are not patches of F equal frames, or not bitwise equal to those of `pixels_of`. Bytes of one
    frame need 1 / (4 F) of the memory.
    """
    made = processor.image_processor
    try:
        of_channels = torch.tensor([made.image_mean, made.image_std]) * (1 / made.rescale_factor)
        scale = of_channels[..., None].repeat(1, 1, made.temporal_patch_size)
        expected, found = (_of_noise(processor, **each)["pixel_values"] for each in ({}, BYTES_OF_ONE_FRAME))
        is_equal = found.dtype == torch.uint8 and pixels_of(found, scale).equal(expected)
    except Exception:  # the processor has other settings
        return None
    return scale if is_equal else None


def pixels_of(frames: Tensor, scale: Tensor) -> Tensor:
    """Return normalized patches [N, C F P] in float32, of the bytes [N, C P] of one frame and their `byte_scale`."""
    mean, std = scale[:, :, :1]
    frame = frames.unflatten(1, (len(mean), -1)).to(torch.float32, copy=True).sub_(mean).div_(std)
    return frame[:, :, None].expand(-1, -1, scale.shape[-1], -1).flatten(1)
