from typing import Any

import pytest
import torch
from PIL import Image
from vision_cases import FAMILIES

from d9d_loop.data.image_processor import pixels_of, pixels_tensor, reads_tensors


def test_pixels_are_normalized_once_and_their_bytes_kept() -> None:
    scale = torch.tensor([[[2.0], [4.0]], [[0.5], [8.0]]])  # mean and standard deviation of two channels
    frames = torch.tensor([[3, 12]], dtype=torch.uint8)
    expected = torch.tensor([[2.0, 1.0]])
    assert pixels_of(frames, scale).equal(expected)
    floats = frames.float()
    assert pixels_of(floats, scale).equal(expected)
    assert pixels_of(floats, scale).equal(expected)


@pytest.mark.parametrize("height", [1, 32, 71])
def test_pixels_are_copied_in_parts_and_keep_their_memory_format(height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels_HWC = torch.randint(256, (height, 20, 3), dtype=torch.uint8)
    image = Image.fromarray(pixels_HWC.numpy())
    to_bytes, rows = Image.Image.tobytes, list[int]()

    def counted(self: Any, *args: Any) -> bytes:
        rows.append(self.height)
        return to_bytes(self, *args)

    monkeypatch.setattr(Image.Image, "tobytes", counted)
    found = pixels_tensor(image)
    assert sum(rows) == height
    assert max(rows) <= 32
    assert found.contiguous().equal(pixels_HWC.permute(2, 0, 1))
    assert found.contiguous().data_ptr() == found.data_ptr()


@pytest.mark.parametrize("family", FAMILIES)
def test_processors_read_tensors(family: str) -> None:
    processor, _ = FAMILIES[family]()
    assert reads_tensors(processor)


@pytest.mark.parametrize("is_error", [False, True])
def test_tensors_are_not_read_if_they_are_converted_to_other_pixels(
    is_error: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor, _ = FAMILIES["qwen2_5_vl"]()
    kind: Any = type(processor.image_processor)
    convert = kind.process_image

    def process_image(self: Any, image: Any, **options: Any) -> Any:
        if not isinstance(image, torch.Tensor):
            return convert(self, image, **options)
        if is_error:
            raise TypeError("expected an image")
        return convert(self, image ^ (torch.arange(image.shape[2]) == 0), **options)

    monkeypatch.setattr(kind, "process_image", process_image)
    assert not reads_tensors(processor)
