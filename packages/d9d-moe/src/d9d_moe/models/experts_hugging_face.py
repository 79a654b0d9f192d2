"""Experts in the two Hugging Face layouts: one matrix per expert, or one fused parameter for all experts of a layer."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

from d9d_dist.errors import UserError
from d9d_modules.models import hugging_face_family as hf
from d9d_modules.models.hugging_face_config import HuggingFaceConfig, config_value
from d9d_moe.router_losses import RouterLosses
from d9d_state import JsonValue, StateMapper, parallel, rename, split, stack

ExpertsLayout: TypeAlias = Literal["per_expert", "fused"]
"""Layout of the expert weights.

`per_expert`: one tensor per expert, `experts.3.gate_proj.weight`, as in checkpoint files. `fused`:
`experts.gate_up_proj` [E, 2 F, D] and `experts.down_proj` [E, D, F], as in the models of `transformers` 5.
"""


def expert_entries(num_experts: str) -> tuple[hf.Entry, ...]:
    """Return the entries about experts. `num_experts` is the name of the entry with the number of experts."""
    return (
        hf.Entry("num_experts", num_experts, alias="num_local_experts"),
        hf.Entry("top_k", "num_experts_per_tok"),
        hf.Entry("expert_intermediate_size", "moe_intermediate_size"),
    )


def read_router_losses(config: HuggingFaceConfig) -> Mapping[str, RouterLosses]:
    """Read the balance loss that `transformers` adds to the loss if `output_router_logits` is set."""
    if not config_value(config, "output_router_logits", bool, default=False):
        return {}
    factor = config_value(config, "router_aux_loss_coef", float, default=0.001, minimum=0.0)
    return {"router_losses": RouterLosses(balance=factor, definition="transformers", scope="batch")} if factor else {}


def written_router_losses(losses: RouterLosses) -> Mapping[str, JsonValue]:
    """Return the entries of a balance loss as in `transformers`; none for other losses, which it does not have."""
    if not losses.are_joint:
        return {}
    return {"output_router_logits": True, "router_aux_loss_coef": losses.balance}


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
