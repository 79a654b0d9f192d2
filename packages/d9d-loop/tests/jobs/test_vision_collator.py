import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch
from torch import Tensor

from d9d_loop.jobs.vision_collator import join_batches


def test_batches_are_joined_and_padded() -> None:
    def part(length: int, images: int, side: int, **more: Tensor) -> dict[str, Tensor]:
        ids, pixels = torch.full((2, length), length), torch.full((images, 3, side), float(side))
        return {"input_ids": ids, **({"pixels": pixels} if images else {}), **more}

    parts = [part(2, 1, 4), part(3, 0, 0, kinds=torch.ones(2, 3, dtype=torch.int64)), part(1, 2, 2)]
    whole = join_batches([dict(part) for part in parts], {"input_ids": 7, "kinds": 0})
    assert whole["input_ids"].tolist() == [[2, 2, 7]] * 2 + [[3, 3, 3]] * 2 + [[1, 7, 7]] * 2
    assert whole["kinds"].tolist() == [[0, 0, 0]] * 2 + [[1, 1, 1]] * 2 + [[0, 0, 0]] * 2
    assert whole["pixels"].shape == (3, 3, 4)
    assert whole["pixels"][:, 0].tolist() == [[4] * 4, [2, 2, 0, 0], [2, 2, 0, 0]]
    alone = join_batches(parts[:1], {"input_ids": 7})
    assert alone is parts[0]


def _send_whether_shared(end: Connection) -> None:
    joined = join_batches([{"x": torch.ones(1)}, {"x": torch.ones(1)}], {})
    end.send(joined["x"].untyped_storage().is_shared())


@pytest.mark.parametrize("name", ["SpawnProcess-1", "d9d-data-0"])
def test_only_data_workers_join_in_shared_memory(name: str) -> None:
    context = multiprocessing.get_context("fork")
    end, theirs = context.Pipe()
    process = context.Process(target=_send_whether_shared, args=(theirs,), name=name)
    process.start()
    assert end.recv() == (name == "d9d-data-0")
    process.join()
