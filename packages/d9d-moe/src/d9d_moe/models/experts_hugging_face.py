"""Experts in the two Hugging Face layouts: one matrix per expert, or one fused parameter for all experts of a layer."""

from typing import Literal, TypeAlias

from d9d_dist.errors import UserError
from d9d_modules import Entry, decoder_from_hugging_face, swiglu_from_hugging_face
from d9d_moe.models.sparse_params import SparseParams
from d9d_state import StateMapper, keep, parallel, rename, split, stack

ExpertsLayout: TypeAlias = Literal["per_expert", "fused"]
"""Layout of the expert weights.

`per_expert`: one tensor per expert, `experts.3.gate_proj.weight`, as in checkpoint files. `fused`:
`experts.gate_up_proj` [E, 2 F, D] and `experts.down_proj` [E, D, F], as in the models of `transformers` 5.
"""


def expert_entries(num_experts: str) -> tuple[Entry, ...]:
    """Return the entries about experts. `num_experts` is the name of the entry with the number of experts."""
    return (
        Entry("num_experts", num_experts, alias="num_local_experts"),
        Entry("top_k", "num_experts_per_tok"),
        Entry("expert_intermediate_size", "moe_intermediate_size"),
    )


def sparse_from_hugging_face(params: SparseParams, *others: StateMapper, layout: ExpertsLayout) -> StateMapper:
    """Build the mapper from a Hugging Face checkpoint to `DecoderForCausalLM`; its `inverse()` exports.

    `others` map the other parts of a sparse layer; their names are relative to `mlp.` and `feed_forward.`.
    """
    sparse = parallel(
        rename("gate.weight", "router.weight"),
        experts_from_hugging_face(params.num_experts, params.expert_intermediate_size, layout=layout),
        *others,
        # The buffer of the router losses is not in the checkpoint.
        *([keep("global_load")] if params.router_losses.follow_global_batch else []),
    )
    dense = swiglu_from_hugging_face()
    return decoder_from_hugging_face(params, feed_forward=lambda index: dense if params.is_dense(index) else sparse)


def experts_from_hugging_face(num_experts: int, intermediate_size: int, *, layout: ExpertsLayout) -> StateMapper:
    """Build the mapper of the routed experts of one layer, whose names start with `experts.`; its `inverse()` exports.

    Raises:
        UserError: If the layout is unknown.
    """
    names = [f"{projection}_proj.weight" for projection in ("gate", "up", "down")]
    match layout:
        case "per_expert":
            experts = range(num_experts)
            return parallel(
                *(stack([f"experts.{expert}.{name}" for expert in experts], f"experts.{name}") for name in names)
            )
        case "fused":
            gate, up, down = (f"experts.{name}" for name in names)
            return parallel(
                split("experts.gate_up_proj", [gate, up], [intermediate_size] * 2, dim=1),
                rename("experts.down_proj", down),
            )
        case _:
            raise UserError(f"layout = {layout!r}; expected 'per_expert' or 'fused'.")
