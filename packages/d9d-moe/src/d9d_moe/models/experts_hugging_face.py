"""Experts in the two Hugging Face layouts: a matrix for each, as checkpoints have them, or all of a layer in one."""

from typing import Literal, TypeAlias

from d9d_dist.errors import UserError
from d9d_modules import HuggingFaceConfig, config_value
from d9d_moe.router_losses import RouterLosses
from d9d_state import StateMapper, keep, parallel, rename, split, stack

ExpertsLayout: TypeAlias = Literal["per_expert", "fused"]
"""`per_expert`: `experts.3.gate_proj.weight`, what is on disk. `fused`: `experts.gate_up_proj` [E, 2 F, D] and
`experts.down_proj` [E, D, F], what `transformers` has in memory since its fifth version."""


def experts_from_hugging_face(num_experts: int, intermediate_size: int, *, layout: ExpertsLayout) -> StateMapper:
    """Mapper of the routed experts of one layer, names starting at `experts.`; its `inverse()` exports.

    Args:
        num_experts: E.
        intermediate_size: F, size of the gated space of each expert.
        layout: Which of the two.

    Raises:
        UserError: If there is no such layout.
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


def router_losses_state(losses: RouterLosses) -> list[StateMapper]:
    """What a block keeps for its losses, which the layout has no place for; names of one layer."""
    return [keep("global_load")] if losses.follow_global_batch else []


def num_experts_key(config: HuggingFaceConfig, key: str) -> str:
    """Find the entry with the number of experts, which `transformers` 5 may name `num_local_experts`.

    Raises:
        UserError: If it is missing or no number, or both names are there with different ones.
    """
    alias = "num_local_experts"
    found = {name: config_value(config, name, int) for name in (key, alias) if name in config}
    if not found:
        raise UserError(f"config.json has no {key!r} or {alias!r}; expected the number of experts.")
    if len(set(found.values())) > 1:
        raise UserError(f"config.json has {key} = {config[key]} and {alias} = {config[alias]}; expected one number.")
    return alias if alias in config else key
