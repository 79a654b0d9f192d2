from typing import Any

import torch

from d9d_dist import MeshConfig, UserError, all_gather_trees
from d9d_dist.testing import run_ranks


def _gather() -> tuple[list[Any], str]:
    with MeshConfig(data_parallel_replicate=2).build() as ctx:
        trees = [[{"x": torch.arange(3), "name": "a"}], []]
        found = all_gather_trees(trees[ctx.rank], None)
        try:
            all_gather_trees([object()] if ctx.rank else [], None)
        except UserError as error:
            return found, str(error)
    return found, ""


def test_trees_of_different_structure_arrive_on_every_rank() -> None:
    for (first, second), message in run_ranks(_gather, world_size=2):
        assert torch.equal(first[0]["x"], torch.arange(3))
        assert (first[0]["name"], second) == ("a", [])
        assert "is not JSON" in message or "JSON" in message
