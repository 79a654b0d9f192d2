import pytest
import torch
from torch import Tensor

from d9d_dist import MeshConfig, UserError, gather_from_axis, reduce_scatter_to_axis
from d9d_dist.testing import run_ranks


def _gather_and_scatter(dims: list[int]) -> list[tuple[Tensor, ...]]:
    """Return results and gradients of eager and of compiled collectives, for each dim."""
    found = []
    with MeshConfig(tensor_parallel=2).build() as ctx:
        mesh = ctx.mesh_for("dense")["tp"]

        def run(x: Tensor, dim: int) -> tuple[Tensor, ...]:
            whole = gather_from_axis(2 * x, mesh, dim=dim, gradient="partial")
            y = reduce_scatter_to_axis(whole.sin() * (ctx.rank + 1), mesh, dim=dim)
            return whole, y, *torch.autograd.grad(y.square().sum(), x)

        for dim in dims:
            torch._dynamo.reset()
            draws = torch.Generator().manual_seed(ctx.rank)
            x = torch.randn(6, 4, 2, dtype=torch.float64, generator=draws).transpose(0, 1).requires_grad_()
            compiled = torch.compile(run, backend="aot_eager", fullgraph=True)(x, dim)
            found.append((*run(x, dim), *compiled))
        with pytest.raises(UserError, match="to split over 2 ranks on dim 0, whose size is 3"):
            torch.compile(reduce_scatter_to_axis, backend="eager")(torch.zeros(3), mesh, dim=0)
    return found


@pytest.mark.full
def test_compiled_collectives_equal_eager_ones() -> None:
    for found in run_ranks(_gather_and_scatter, [0, 1, -1], timeout=300):
        for eager_and_compiled in found:
            half = len(eager_and_compiled) // 2
            torch.testing.assert_close(eager_and_compiled[:half], eager_and_compiled[half:], rtol=0, atol=0)
