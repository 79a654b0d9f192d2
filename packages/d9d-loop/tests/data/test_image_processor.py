import torch

from d9d_loop.data.image_processor import pixels_of


def test_pixels_are_normalized_once_and_their_bytes_kept() -> None:
    scale = torch.tensor([[[2.0], [4.0]], [[0.5], [8.0]]])  # mean and standard deviation of two channels
    frames = torch.tensor([[3, 12]], dtype=torch.uint8)
    expected = torch.tensor([[2.0, 1.0]])
    assert pixels_of(frames, scale).equal(expected)
    floats = frames.float()
    assert pixels_of(floats, scale).equal(expected)
    assert pixels_of(floats, scale).equal(expected)
