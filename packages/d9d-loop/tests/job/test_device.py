import torch

from d9d_loop.job.device import to_device


def test_brings_tensors_of_a_pytree_to_a_device() -> None:
    batch = {"x": torch.ones(2), "rest": [torch.zeros(1), "name", 3]}
    moved = to_device(batch, torch.device("meta"))
    assert (moved["x"].device.type, moved["rest"][0].device.type) == ("meta", "meta")
    assert moved["rest"][1:] == ["name", 3]


def test_the_cpu_is_where_batches_are() -> None:
    batch = {"x": torch.ones(2)}
    assert to_device(batch, torch.device("cpu")) is batch
