"""Inverse of a provider's state mapper, to export weights or to send them to another program."""

import torch
from torch import nn

from d9d_dist import UserError, canonical_name
from d9d_loop.model.model_provider import ModelProvider
from d9d_state import StateMapper, TensorInfo, cast, identity, identity_of, model_tensors, parallel, sequential


def export_mapper(provider: ModelProvider, model: nn.Module, *, base_only: bool = False) -> StateMapper | None:
    """Return the mapper from the weights of the whole model to the exported files; `None` if they are equal.

    Tensors have the dtypes of `provider.export_dtype`. For `base_only` and errors see `disk_mapper`.
    """
    mapper = disk_mapper(provider.state_mapper(model), model, base_only=base_only)
    given = identity_of(model) if mapper is None else mapper
    tensors = {canonical_name(name): TensorInfo.of(each) for name, each in model.state_dict(keep_vars=True).items()}
    exported: dict[str, TensorInfo] = {}
    for group in given.groups:
        exported |= given.infer({name: tensors[name] for name in group.inputs})
    dtypes: dict[str, torch.dtype] = {}
    for name, info in exported.items():
        dtype = provider.export_dtype(name) if info.dtype.is_floating_point else None
        if dtype is not None and dtype != info.dtype:
            dtypes[name] = dtype
    if not dtypes:
        return mapper
    casts = [cast(name, dtype=dtype, back=exported[name].dtype) for name, dtype in dtypes.items()]
    return sequential(given, parallel(*casts, identity(*(name for name in exported if name not in dtypes))))


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
