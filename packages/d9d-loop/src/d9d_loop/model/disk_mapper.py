"""Inverse of a provider's state mapper, to export weights or to send them to another program."""

from torch import nn

from d9d_dist import UserError
from d9d_state import StateMapper, model_tensors


def disk_mapper(mapper: StateMapper | None, model: nn.Module, *, base_only: bool = False) -> StateMapper | None:
    """Return the mapper from the weights of a model, or of a part of it, to the weights on disk.

    `mapper` is the mapper from the weights on disk to the whole model's weights; `None` if the names are equal. With
    `base_only`, the weights on disk may omit trained parameters.

    Raises:
        UserError: If the mapper has no inverse, or omits trained parameters, such as adapters.
    """
    if mapper is None:
        return None
    if not base_only:
        _refuse_omissions(mapper, model)
    try:
        return mapper.inverse()
    except ValueError as error:
        raise UserError(f"the provider's state mapper has no inverse: {error} Add an inverse.") from None


def _refuse_omissions(mapper: StateMapper, model: nn.Module) -> None:
    """Raise `UserError` if the mapper does not load a trained parameter from disk."""
    kept = {name for group in mapper.groups if not group.inputs for name in group.outputs}
    trained = {name.removeprefix("model.") for name in model_tensors(model, trainable_only=True)}
    omitted = sorted(kept & trained)
    if omitted:
        raise UserError(
            f"the weights on disk omit {len(omitted)} trained parameters, such as {omitted[0]}, so these would be "
            "lost; expected all trained parameters. Save adapters with save_adapters, or merge them first. "
            "With an engine, weights(base_only=True) yields the others."
        )
