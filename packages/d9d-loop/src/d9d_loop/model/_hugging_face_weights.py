"""Derivation of the `StateMapper` between a checkpoint folder and a `transformers` model.

`from_pretrained` renames, fuses and ties tensors by the rules of each architecture. Here it receives
`RecordedTensor`s, which have shapes and dtypes but no values. The result is a model without weights, and the recorded
operations become a `StateMapper`. New parameters and non-persistent buffers get the values that `from_pretrained`
computes.
"""

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from d9d_dist import UserError, canonical_name
from d9d_dist.errors import refuse_listed
from d9d_loop.model._hugging_face_heads import Accepted
from d9d_loop.model.recorded_tensor import RecordedTensor, recorded_mapper
from d9d_state import ModelFolder, StateMapper, TensorInfo, drop, keep, narrow, parallel, read_model_state
from d9d_state.module_tensors import aliases

_BLOCK_BYTES = 64 << 20


@final
@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Model without values, the mapper that loads them from the folder, and the parameters that it does not load."""

    model: nn.Module
    mapper: StateMapper
    new_parameters: frozenset[str]


def build_without_weights(
    model_class: Any, config: Any, folder: Path, *, dtype: Any, accepted: Accepted
) -> LoadedModel:
    """Build a model without reading its weights, and the mapper that loads them from the folder.

    Tensors that the mapper fills are on `meta`. Other parameters and buffers are on the CPU, with the values that
    `from_pretrained` computes.

    Raises:
        UserError: If tensors that are not `accepted` are missing, unused or of another shape; the message lists them.
            Also if the architecture's weight conversion computes values instead of only moving them.
    """
    stored = ModelFolder.open(folder).tensors
    load = partial(_load_recorded, model_class, config, folder, dtype=dtype)
    model, report = load(stored)
    if duplicates := _stored_ties(model, folder, stored):
        model, report = load({name: info for name, info in stored.items() if name not in duplicates})
    _refuse_differences(model, config, report, folder, accepted)
    tensors = _unique_tensors(model)
    targets = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, RecordedTensor)}
    kept = [name for name in tensors if name not in targets]
    mapper = parallel(recorded_mapper(stored, targets), keep(*kept))
    _forget_records(model)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return LoadedModel(model, mapper, frozenset(name for name in kept if name in parameters))


def released_mapper(model: Any) -> StateMapper:
    """Return the mapper from a `transformers` model on any device to the tensors that `save_pretrained` writes."""
    from transformers.core_model_loading import revert_weight_conversion

    ties: Collection[str] = model.all_tied_weights_keys
    ignored = set(model._keys_to_ignore_on_save or ())
    tensors = _unique_tensors(model, last=ties)
    recorded = {
        name: RecordedTensor.named(name, TensorInfo.of(tensor))
        for name, tensor in tensors.items()
        if name not in ignored
    }
    mapper = recorded_mapper(recorded, revert_weight_conversion(model, dict(recorded)))
    return parallel(mapper, drop(*(name for name in tensors if name in ignored)))


def _load_recorded(
    model_class: Any, config: Any, folder: Path, stored: Mapping[str, TensorInfo], *, dtype: Any
) -> tuple[Any, dict[str, Any]]:
    from transformers import GenerationConfig

    has_generation = (folder / "generation_config.json").is_file()
    recorded = {name: RecordedTensor.named(name, info) for name, info in stored.items()}
    try:
        with _quiet():
            return model_class.from_pretrained(
                None,
                config=config,
                state_dict=recorded,
                dtype=dtype,
                generation_config=GenerationConfig.from_pretrained(folder) if has_generation else None,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except RuntimeError as error:
        raise UserError(
            f"the weights in {folder} cannot be converted to those of {model_class.__name__}; expected a folder that "
            f"from_pretrained loads. {model_class.__name__}.from_pretrained(folder) reports why. ({error})"
        ) from error


def _unique_tensors(model: nn.Module, *, last: Collection[str] = ()) -> dict[str, Tensor]:
    """Return each parameter and persistent buffer once, by canonical name.

    A tied tensor gets its first name that is not in `last`, or else its first name.
    """
    tensors = {canonical_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    chosen = set(aliases({name: tensors[name] for name in sorted(tensors, key=lambda name: name in last)}).values())
    return {name: tensor for name, tensor in tensors.items() if name in chosen}


def _forget_records(model: nn.Module) -> None:
    """Replace recorded tensors with plain tensors on `meta`; tied tensors stay tied."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if isinstance(tensor, RecordedTensor):
                    plain = TensorInfo.of(tensor).to_meta()
                    if isinstance(tensor, nn.Parameter):
                        plain = nn.Parameter(plain, requires_grad=tensor.requires_grad)
                    slots[name] = made.setdefault(id(tensor), plain)  # ty: ignore[invalid-assignment]


def _stored_ties(model: Any, folder: Path, stored: Mapping[str, TensorInfo]) -> list[str]:
    """Return the names of stored tensors that equal the tensor to which the model ties them.

    Without these tensors in the folder, `from_pretrained` ties the parameters. Pairs of stored tensors that differ are
    removed from the model's `all_tied_weights_keys`.
    """
    duplicates: list[str] = []
    for target, source in list(model.all_tied_weights_keys.items()):
        one, other = attrgetter(target)(model), attrgetter(source)(model)
        both = isinstance(one, RecordedTensor) and isinstance(other, RecordedTensor)
        if not both or one is other or one.move is not None or other.move is not None:
            continue
        if _are_equal(folder, one.value_name, other.value_name, stored):
            duplicates.append(one.value_name)
        else:
            model.all_tied_weights_keys.pop(target)
    return duplicates


def _are_equal(folder: Path, one: str, other: str, stored: Mapping[str, TensorInfo]) -> bool:
    """Return True if two stored tensors are equal. Reads blocks of rows, about `_BLOCK_BYTES` at a time."""
    info = stored[one]
    if info != stored[other]:
        return False
    num_rows = info.shape[0]
    rows = max(_BLOCK_BYTES * num_rows // max(info.num_bytes, 1), 1)
    for start in range(0, num_rows, rows):
        length = min(rows, num_rows - start)
        block = parallel(*(narrow(name, start=start, length=length) for name in (one, other)))
        (_, a), (_, b) = read_model_state(folder, block, unused="ignore", progress=False)
        if not torch.equal(a, b):
            return False
    return True


def _refuse_differences(model: Any, config: Any, report: Mapping[str, Any], folder: Path, accepted: Accepted) -> None:
    shapes = {
        name: f"{name}: got {list(got)}; expected {list(wanted)}" for name, got, wanted in report["mismatched_keys"]
    }
    missing, unused = report["missing_keys"] - shapes.keys(), report["unexpected_keys"]
    is_new, is_unused = accepted.checks(model, config)
    sections = {
        'in the model, but not in the files; list them in new=["..."] to initialize them': [
            name for name in sorted(missing) if not is_new(name)
        ],
        'in the files, but not in the model; list them in unused=["..."] to ignore them': [
            name for name in sorted(unused) if not is_unused(name)
        ],
        'of another shape in the files; list them in new=["..."] to initialize them': [
            shapes[name] for name in sorted(shapes) if not is_new(name)
        ],
    }
    refuse_listed(f"{folder} does not hold the weights of {type(model).__name__}", sections)


@contextmanager
def _quiet() -> Generator[None]:
    """Silence the progress bars and logs of `transformers`; `_refuse_differences` reports the differences instead."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
