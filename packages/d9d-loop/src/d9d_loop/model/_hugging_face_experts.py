"""Expert parallelism of a `transformers` model. Requires d9d-moe."""

from collections.abc import Collection

from torch import nn

from d9d_dist import DistributedContext, UserError
from d9d_dist.install_hint import install_hint


def check_experts(model: nn.Module, ctx: DistributedContext) -> Collection[str]:
    """Return the names of the experts to shard in a model, of which this rank may have a stage; none for a degree of 1.

    Raises:
        UserError: If d9d-moe is not installed, or the model has no experts that can be sharded.
    """
    degree = ctx.size("expert", "ep_shard")
    if degree == 1:
        return ()
    try:
        from d9d_moe.fused_experts import find_fused_experts  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise UserError(
            f"mesh.expert_parallel = {degree} needs the package d9d-moe, which is not installed. Set the degree to 1, "
            f"or install it: {install_hint('d9d-moe')}"
        ) from None
    if found := find_fused_experts(model):
        return found.keys()
    kinds = sorted({type(each).__name__ for each in model.modules() if "Experts" in type(each).__name__})
    got = f"experts of another kind ({', '.join(kinds)})" if kinds else "no experts"
    raise UserError(
        f"mesh.expert_parallel = {degree}, but {type(model).__name__} has {got}; expected fused experts with "
        "the decorator use_experts_implementation of transformers. Set the degree to 1, and shard with "
        "mesh.data_parallel_shard."
    )
