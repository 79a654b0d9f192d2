"""Selection of a model's active adapters: the adapters of one name, or none for the reference model."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from d9d_dist import UserError, canonical_name, local_tensor
from d9d_dist.data_parallel.gathered_parameters import free_all_gathered
from d9d_dist.errors import shorten
from d9d_peft.adapter import adapter_parameters, all_adapters, child_name


@contextmanager
def adapters_off(model: nn.Module, originals: Mapping[str, Tensor] | None = None) -> Generator[None]:
    """Compute without any adapter inside the context: the frozen base model, such as the reference of DPO.

    Adapters are not merged, so there is no rounding. Only the parameters in `originals` are copied. No collectives.
    Each compiled layer is compiled once more. Run the backward pass of a forward pass in the same context as the
    forward pass.

    Buffers of frozen modules have their current values, as in peft. Running statistics of frozen batch norms change in
    training mode: call their `eval()` before training to keep the base model.

    Args:
        model: The model, or this rank's pipeline stages of it, in any layout.
        originals: Original values of the trained parameters that no adapter owns (`FullTune`) and of the buffers of
            their modules, from `original_weights`. The model has these values inside the context, and its own again
            after it.

    Raises:
        UserError: If `originals` does not hold exactly the trained parameters that no adapter owns: the model without
            adapters would then still differ from the original model.
    """
    tuned = _tuned(model)
    originals = {} if originals is None else originals
    if tuned.keys() != originals.keys():
        raise UserError(
            f"adapters_off got originals of {shorten(list(originals))}; expected originals of the parameters that are "
            f"trained without an adapter: {shorten(list(tuned))}. Pass originals=original_weights(model), called "
            "before training."
        )
    with _only(model, None), _values(model, originals) if originals else nullcontext():
        yield


@contextmanager
def use_adapter(model: nn.Module, adapter: str) -> Generator[None]:
    """Compute with the named adapters inside the context, instead of the active adapters.

    A layer without an adapter of this name computes without adapter. For costs and the backward pass, see
    `adapters_off`.

    Args:
        model: The model, or this rank's pipeline stages of it, in any layout.
        adapter: Name of the adapters, as passed to `inject`.

    Raises:
        UserError: If the model has adapters, but none of this name.
    """
    names = {child for child, _ in all_adapters(model)}
    if names and child_name(adapter) not in names:
        raise UserError(
            f"use_adapter got the name {adapter!r}; the adapters of this model are the child modules "
            f"{shorten(sorted(names))}. Call inject(method, model, adapter={adapter!r}) where the model is built."
        )
    with _only(model, child_name(adapter)):
        yield


def original_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copy this rank's parts of the trained parameters that no adapter owns, for `adapters_off`. No collectives.

    The buffers of their modules, such as running statistics, are copied too. Call this function before training, with
    the original weights loaded. The result is empty if all trained parameters are in adapters.
    """
    return {name: local_tensor(each.detach()).clone() for name, each in _tuned(model).items()}


def _tuned(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters that no adapter owns, and the buffers of their modules that checkpoints contain."""
    owned = adapter_parameters(model)
    tuned = {
        canonical_name(name): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in owned
    }
    ids = set(map(id, tuned.values()))
    holders = [each for each in model.modules() if ids & set(map(id, each._parameters.values()))]
    saved = {
        id(each._buffers[key]) for each in holders for key in each._buffers.keys() - each._non_persistent_buffers_set
    }
    return {**tuned, **{canonical_name(name): each for name, each in model.named_buffers() if id(each) in saved}}


@contextmanager
def _only(model: nn.Module, child: str | None) -> Generator[None]:
    """Activate only the adapters in child modules of this name; None for no adapter."""
    before = [(adapter, adapter.is_active) for _, adapter in all_adapters(model)]
    for name, adapter in all_adapters(model):
        adapter.is_active = name == child
    try:
        yield
    finally:
        for adapter, was_active in before:
            adapter.is_active = was_active


@contextmanager
def _values(model: nn.Module, values: Mapping[str, Tensor]) -> Generator[None]:
    """Replace the values of parameters and buffers inside the context, in place."""
    free_all_gathered(model)
    parameters = _tuned(model)  # the sharded parameters, which FSDP replaces by gathered ones during forward
    own = {name: local_tensor(parameter.detach()).clone() for name, parameter in parameters.items()}
    try:
        _copy(parameters, values)
        yield
    finally:
        free_all_gathered(model)
        _copy(parameters, own)


@torch.no_grad()
def _copy(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        local_tensor(parameter).copy_(values[name])
