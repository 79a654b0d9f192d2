from typing import Any

import torch
from torch import Tensor, nn

from d9d_dist import MeshConfig
from d9d_dist.testing import run_ranks
from d9d_pipeline import PipelinedModel
from d9d_pipeline.schedule import StagePlacement, ranks_of_stages


class _Stage(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0 + index))

    def forward(self, x: Any, *, shift: Tensor) -> dict[str, Any]:
        x = x["x"] if isinstance(x, dict) else x
        return {"x": x * self.weight + shift, "length": torch.tensor(x.shape[0]), "none": None}


def _call(placement: StagePlacement, stages_per_rank: int) -> list[dict[str, Any]]:
    with MeshConfig(pipeline_parallel=-1).build() as ctx:
        holders = ranks_of_stages(placement, num_ranks=ctx.world_size, stages_per_rank=stages_per_rank)
        model = PipelinedModel(
            {index: _Stage(index) for index, holder in enumerate(holders) if holder == ctx.rank},
            group=ctx.group_for("regular", "pp"),
            device=ctx.device,
            stages_per_rank=stages_per_rank,
            placement=placement,
        )
        return [model(torch.ones(length), shift=torch.tensor(1.0)) for length in (3, 1, 3)]


def test_every_rank_returns_the_output_of_the_whole_model() -> None:
    cases: list[tuple[StagePlacement, int]] = [("loop", 1), ("v", 2)]
    for placement, stages_per_rank in cases:
        expected = []
        for length in (3, 1, 3):
            x: Any = torch.ones(length)
            for index in range(3 * stages_per_rank):
                x = _Stage(index)(x, shift=torch.tensor(1.0))
            expected.append(x)
        for found in run_ranks(_call, placement, stages_per_rank, world_size=3):
            torch.testing.assert_close([each["x"] for each in found], [each["x"].detach() for each in expected])
            assert [each["length"].item() for each in found] == [3, 1, 3]
            assert [each["none"] for each in found] == [None] * 3


def test_a_single_rank_calls_the_stage_directly() -> None:
    model = PipelinedModel({0: nn.Identity()}, group=None, device=torch.device("cpu"))
    x = torch.ones(2)
    assert model(x) is x
