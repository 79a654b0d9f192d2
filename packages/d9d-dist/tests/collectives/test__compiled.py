import pytest
import torch
from torch import Tensor

from d9d_dist import MeshConfig, UserError, gather_from_axis, reduce_scatter_to_axis
from d9d_dist.testing import run_ranks


def _gather_and_scatter(dims: list[int]) -> list[tuple[Tensor, ...]]:
    """Return results and gradients of eager and of compiled collectives in turn, for each dim."""
    found = []
    with MeshConfig(tensor_parallel=2).build() as ctx:
        mesh = ctx.mesh_for("dense")["tp"]

        def forward(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
            whole = gather_from_axis(2 * x, mesh, dim=dim, gradient="partial")
            return whole, reduce_scatter_to_axis(whole.sin() * (ctx.rank + 1), mesh, dim=dim)

        compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
        for dim in dims:
            draws = torch.Generator().manual_seed(ctx.rank)
            x = torch.randn(6, 4, 2, dtype=torch.float64, generator=draws).transpose(0, 1).requires_grad_()
            for run in (forward, compiled):
                whole, y = run(x, dim)
                found.append((whole, y, *torch.autograd.grad(y.square().sum(), x)))
        with pytest.raises(UserError, match="to split over 2 ranks on dim 0, whose size is 3"):
            torch.compile(reduce_scatter_to_axis, backend="eager")(torch.zeros(3), mesh, dim=0)
    return found


@pytest.mark.full
def test_compiled_collectives_equal_eager_ones() -> None:
    for found in run_ranks(_gather_and_scatter, [0, 1, -1], timeout=300):
        for eager, compiled in zip(found[::2], found[1::2], strict=True):
            torch.testing.assert_close(compiled, eager, rtol=0, atol=0)
