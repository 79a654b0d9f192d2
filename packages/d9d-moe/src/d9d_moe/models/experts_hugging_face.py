"""Experts in the two Hugging Face layouts: one matrix per expert, or one fused parameter for all experts of a layer."""

from typing import Literal, TypeAlias

from d9d_dist.errors import UserError
from d9d_modules import HuggingFaceConfig, config_value
from d9d_moe.router_losses import RouterLosses
from d9d_state import StateMapper, keep, parallel, rename, split, stack

ExpertsLayout: TypeAlias = Literal["per_expert", "fused"]
"""Layout of the expert weights.

`per_expert`: one tensor per expert, `experts.3.gate_proj.weight`, as in checkpoint files. `fused`:
`experts.gate_up_proj` [E, 2 F, D] and `experts.down_proj` [E, D, F], as in the models of `transformers` 5.
"""


def experts_from_hugging_face(num_experts: int, intermediate_size: int, *, layout: ExpertsLayout) -> StateMapper:
    """Return the mapper that loads the routed experts of one layer; its `inverse()` exports them.

    The names of its tensors start with `experts.`.

    Args:
        num_experts: Number of experts E.
        intermediate_size: Intermediate size F of each expert.
        layout: Layout of the expert weights in the checkpoint.

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


def router_losses_state(losses: RouterLosses) -> list[StateMapper]:
    """Return mappers of the buffers of one layer's router losses, which are not in the Hugging Face checkpoint."""
    return [keep("global_load")] if losses.follow_global_batch else []


def num_experts_key(config: HuggingFaceConfig, key: str) -> str:
    """Return the name of the entry with the number of experts: `key`, or `num_local_experts` as in `transformers` 5.

    Raises:
        UserError: If neither entry is present, an entry is not an integer, or the two entries differ.
    """
    alias = "num_local_experts"
    found = {name: config_value(config, name, int) for name in (key, alias) if name in config}
    if not found:
        raise UserError(f"config.json has no {key!r} or {alias!r}; expected the number of experts.")
    if len(set(found.values())) > 1:
        raise UserError(
            f"config.json has {key} = {config[key]} and {alias} = {config[alias]}; expected equal numbers. Correct "
            "one of the entries, or remove it."
        )
    return alias if alias in config else key
