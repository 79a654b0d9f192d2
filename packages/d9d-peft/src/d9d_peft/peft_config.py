"""Configuration of adapters in Hugging Face `peft`, `adapter_config.json`: each entry is used, ignored or an error.

`peft` reads the same entries when it reloads an adapter. An entry that changes the output of `peft`, and has no
counterpart in d9d, raises an error that names the entry.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from d9d_dist import UserError
from d9d_dist.errors import shorten
from d9d_peft.low_rank import LowRank

_TYPES: Mapping[str, tuple[type, ...]] = {
    "peft_type": (str,),
    "r": (int,),
    "lora_alpha": (int, float),
    "rank_pattern": (dict, type(None)),
    "alpha_pattern": (dict, type(None)),
    "use_rslora": (bool,),
    "use_dora": (bool,),
    "target_modules": (list, str, type(None)),
    "target_parameters": (list, type(None)),
    "exclude_modules": (list, str, type(None)),
    "layers_to_transform": (list, int, type(None)),
    "layers_pattern": (list, str, type(None)),
    "modules_to_save": (list, type(None)),
    "init_lora_weights": (bool, str),
}
"""Entries that are used, with their permitted types."""

_IRRELEVANT: Mapping[str, str] = {
    "task_type": "selects the peft class around the model, which does not affect the output",
    "auto_mapping": "names the class of the base model",
    "base_model_name_or_path": "the base weights are loaded separately",
    "revision": "the base weights are loaded separately",
    "peft_version": "is the version that wrote the file",
    "inference_mode": "freezes parameters; `inject` selects the trained parameters",
    "fan_in_fan_out": "is corrected by peft for the type of each layer",
    "lora_dropout": "affects only training, where the dropout of the injected method is used",
    "loftq_config": "configures an initialization; `init_lora_weights` is checked",
    "eva_config": "configures an initialization; `init_lora_weights` is checked",
    "corda_config": "configures an initialization; `init_lora_weights` is checked",
    "lora_ga_config": "configures an initialization; `init_lora_weights` is checked",
    "megatron_core": "has an effect only with `megatron_config`, which is not supported",
    "qalora_group_size": "has an effect only with `use_qalora`, which is not supported",
    "runtime_config": "is ignored in files by peft too",
}
"""Entries that are ignored, each with the reason."""

_ONLY: Mapping[str, object] = {
    "bias": "none",
    "lora_bias": False,
    "megatron_config": None,
    "trainable_token_indices": None,
    "velora_config": None,
    "alora_invocation_tokens": None,
    "use_qalora": False,
    "monteclora_config": None,
    "layer_replication": None,
    "use_bdlora": None,
    "arrow_config": None,
    "kasa_config": None,
    "ensure_weight_tying": False,
}
"""Entries for which only this value is supported; it is the default and disables the entry."""

_INITIALIZATIONS = (True, False, "gaussian", "orthogonal", "eva")
"""Supported values of `init_lora_weights`: they do not change the base weights."""

_DISABLED = (None, False, [], {}, "")


def adapter_config(
    layers: Mapping[str, LowRank],
    parameters: Mapping[str, LowRank],
    modules: Sequence[str],
    *,
    is_dora: bool,
    base_model: str | None = None,
    task_type: str | None = None,
) -> dict[str, object]:
    """Return the `adapter_config.json` of adapters; its `r` and `lora_alpha` are the most common values.

    `layers` and `parameters` ([experts, out, in]) hold rank and scale by name in the base checkpoint. `modules` are the
    fully fine-tuned modules, `base_model` is the name or folder of the base, `task_type` as in `save_adapters`.
    """
    low_ranks = {**layers, **parameters}
    is_stabilized = all(low_rank.rank_stabilized for low_rank in low_ranks.values())
    ranks = {name: low_rank.rank for name, low_rank in low_ranks.items()}
    # A file has one use_rslora for all layers: convert alpha so that each layer keeps its scale.
    alphas = {
        name: low_rank.alpha if low_rank.rank_stabilized == is_stabilized else low_rank.scaling * low_rank.rank
        for name, low_rank in low_ranks.items()
    }
    rank, alpha = _most_common(ranks.values()), _most_common(alphas.values())
    # peft does not support dropout with target_parameters.
    dropout = 0.0 if parameters else _most_common(low_rank.dropout for low_rank in layers.values())
    return {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "target_modules": list(layers),
        "target_parameters": list(parameters) or None,
        # A module is whole in the files, with those inside.
        "modules_to_save": [name for name in modules if not set(owners(name)) & set(modules)] or None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "init_lora_weights": True,
        "bias": "none",
        "fan_in_fan_out": False,
        # Patterns without "^" would also match longer names that end with a dot and this name.
        "rank_pattern": {f"^{re.escape(name)}": value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {f"^{re.escape(name)}": value for name, value in alphas.items() if value != alpha},
        "use_rslora": is_stabilized,
        "use_dora": is_dora,
    }


def read_config(text: str, *, origin: str, is_dora: bool) -> dict[str, Any]:
    """Parse an `adapter_config.json`; `origin` is its path, for messages.

    Raises `UserError` if the text is not valid JSON, not the configuration of LoRA adapters, or has unsupported
    entries.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise UserError(f"{origin} is not valid JSON: {error}. Save or download it again.") from error
    if not isinstance(config, dict) or not {"r", "lora_alpha"} <= config.keys():
        raise UserError(f"{origin} has no r and lora_alpha; expected the configuration of a LoRA adapter.")
    _refuse_types(config, origin)
    expected = {"peft_type": "LORA", "use_dora": is_dora, **_ONLY}
    unsupported = [
        f"{name} = {value!r} (expected {expected[name]!r})"
        for name, value in ({"peft_type": None, "use_dora": False} | config).items()
        if name in expected and value != expected[name]
    ]
    known = expected.keys() | _TYPES.keys() | _IRRELEVANT.keys()
    # Null, false and empty entries are disabled options of newer peft versions.
    unknown = {name: value for name, value in config.items() if name not in known and value not in _DISABLED}
    unsupported += [f"{name} = {value!r} (unknown)" for name, value in unknown.items()]
    if unsupported:
        raise UserError(
            f"{origin} has unsupported entries: {shorten(unsupported)}. Inject the method with which the adapters were "
            "trained; if d9d does not have it, convert the adapters to plain LoRA."
        )
    initialization = config.get("init_lora_weights", True)
    if initialization not in _INITIALIZATIONS:
        raise UserError(
            f"{origin} has init_lora_weights = {initialization!r}, which changes the base weights or the training; "
            f"expected one of {', '.join(map(repr, _INITIALIZATIONS))}. Convert the adapters to plain LoRA: in peft, "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)."
        )
    return config


def refuse_other_scale(config: Mapping[str, Any], name: str, low_rank: LowRank, *, origin: str) -> None:
    """Raise `UserError` if the configuration has another rank or scale for a layer or parameter."""
    stored = config_low_rank(config, name)
    if stored.rank != low_rank.rank or not math.isclose(stored.scaling, low_rank.scaling, rel_tol=1e-9):
        wanted = "rank_stabilized = True and " if stored.rank_stabilized else ""
        raise UserError(
            f"{origin} has rank {stored.rank} and scale {stored.scaling:g} for {name} (r, lora_alpha, rank_pattern, "
            f"alpha_pattern, use_rslora); the model's layer has rank {low_rank.rank} and scale "
            f"{low_rank.scaling:g}. Inject it with {wanted}rank = {stored.rank} and alpha = {stored.alpha!r}."
        )


def config_low_rank(config: Mapping[str, Any], name: str) -> LowRank:
    """Return the rank and scale of a layer or parameter. Raises `UserError` if a value is invalid."""
    rank = _by_pattern(config, "rank_pattern", name, config["r"])
    alpha = _by_pattern(config, "alpha_pattern", name, config["lora_alpha"])
    if not isinstance(alpha, int | float):
        raise UserError(
            f"adapter_config.json has alpha_pattern = {config['alpha_pattern']!r}; expected numbers. Correct the entry."
        )
    low_rank = LowRank(rank=rank, alpha=alpha, rank_stabilized=config.get("use_rslora", False))
    low_rank.check("adapter_config.json (r, rank_pattern, lora_alpha, alpha_pattern)")
    return low_rank


def refuse_untargeted_layer(config: Mapping[str, Any], name: str, *, origin: str) -> None:
    """Raise `UserError` if an entry excludes a layer with an adapter in the files: `peft` would ignore the adapter."""
    entry = _entry_against(config, name)
    if entry is not None and not _is_named(f"{name}.weight", config.get("target_parameters") or []):
        raise UserError(
            f"{origin} has {entry} = {config.get(entry)!r}, with which peft does not adapt {name}, but the files hold "
            "an adapter of it. Correct the entry, or remove the adapter's tensors."
        )


def refuse_other_targets(
    config: Mapping[str, Any], parameters: Collection[str], layers: Collection[str], *, origin: str
) -> None:
    """Raise `UserError` unless `target_parameters` names exactly the parameters [experts, out, in] with adapters.

    Tensor names in `peft` files depend on these parameters. `layers` are the layers with adapters.
    """
    targets = config.get("target_parameters") or []
    adapted = [*parameters, *(f"{name}.weight" for name in layers)]
    unknown = [target for target in targets if not any(_is_named(name, [target]) for name in adapted)]
    missing = [name for name in parameters if not _is_named(name, targets)]
    if unknown or missing:
        raise UserError(
            f"{origin} has target_parameters = {targets!r}; the model has adapters of "
            f"{shorten(list(parameters)) if parameters else 'layers'}. Inject adapters into the target parameters, and "
            "pass a base_mapper with the parameter names of the model on which they were trained, such as "
            "sparse_from_hugging_face(params, layout='fused')."
        )


def refuse_other_modules(
    config: Mapping[str, Any], trained: Collection[str], base_names: Iterable[str], *, origin: str
) -> None:
    """Raise `UserError` unless `modules_to_save` names exactly the modules whose tensors are in the files.

    `trained` holds the names of the tensors of fully fine-tuned modules, `base_names` the names of all tensors, both as
    in the base checkpoint.
    """
    entries = config.get("modules_to_save") or []
    inside = {name: owners(name) for name in base_names}
    replaced = {m for modules in inside.values() for m in modules if _is_named(m, entries)} if entries else set[str]()
    missing = [name for name, modules in inside.items() if name not in trained and not replaced.isdisjoint(modules)]
    unnamed = [name for name in trained if not any(m.endswith(entry) for m in owners(name) for entry in entries)]
    if missing or unnamed:
        problem = f"the files lack {shorten(missing)}" if missing else f"the files also hold {shorten(unnamed)}"
        raise UserError(f"{origin} has modules_to_save = {entries!r}, but {problem}. Correct the entry.")


def _refuse_types(config: Mapping[str, Any], origin: str) -> None:
    for name, types in _TYPES.items():
        value = config.get(name, None if type(None) in types else types[0]())
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            expected = " or ".join("null" if each is type(None) else each.__name__ for each in types)
            raise UserError(f"{origin} has {name} = {value!r}; expected {expected}. Correct the entry.")
    for name in ("layers_to_transform", "layers_pattern"):
        if config.get(name) and isinstance(config.get("target_modules"), str):
            raise UserError(
                f"{origin} has {name} = {config[name]!r} and a pattern in target_modules; peft supports only one of "
                "them. Remove one."
            )
    if config.get("layers_pattern") and config.get("layers_to_transform") is None:
        raise UserError(
            f"{origin} has layers_pattern = {config['layers_pattern']!r} without layers_to_transform; expected both. "
            "Add layers_to_transform, or remove layers_pattern."
        )


def _entry_against(config: Mapping[str, Any], name: str) -> str | None:
    """Return the entry that excludes a module in `peft`; `None` if `peft` adapts the module."""
    if _matches(name, config.get("exclude_modules") or [], "exclude_modules"):
        return "exclude_modules"
    if any(
        _match(rf"(^|.*\.){entry}($|\..*)", name, "modules_to_save") for entry in config.get("modules_to_save") or []
    ):
        return "modules_to_save"
    targets = config.get("target_modules") or []
    if not _matches(name, targets, "target_modules"):
        return "target_modules"
    layers = config.get("layers_to_transform")
    if isinstance(targets, str) or name in targets or layers is None or layers == []:
        return None
    index = _layer_index(name, config.get("layers_pattern") or [])
    return None if index in ([layers] if isinstance(layers, int) else layers) else "layers_to_transform"


def _layer_index(name: str, patterns: str | list[str]) -> int | None:
    """Return the index of the block that contains a module; `None` if no pattern matches."""
    if not patterns:
        match = re.match(r".*?\.[^.]*\.(\d+)\.", name)
        return int(match[1]) if match else None
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        match = _match(rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\.", name, "layers_pattern")
        if match:
            return int(match["index"])
    return None


def _matches(name: str, targets: str | list[str], entry: str) -> bool:
    """Return True if a name fully matches a pattern, or matches one of several names as in `_is_named`."""
    if isinstance(targets, str):
        return _match(rf"(?:{targets})\Z", name, entry) is not None
    return _is_named(name, targets)


def _is_named(name: str, names: Iterable[str]) -> bool:
    """Return True if a name equals one of `names` or ends with a dot and one of `names`."""
    return any(name == each or name.endswith(f".{each}") for each in names)


def _match(pattern: str, name: str, entry: str) -> re.Match[str] | None:
    try:
        return re.match(pattern, name)
    except re.error as error:
        raise UserError(
            f"adapter_config.json has the pattern {pattern!r} in {entry}, which is not a valid regular expression: "
            f"{error}. Correct the entry."
        ) from error


def _by_pattern(config: Mapping[str, Any], entry: str, name: str, default: Any) -> Any:
    """Return the value of the first regular expression that matches the name or a suffix after a dot, as in `peft`."""
    matching = (value for key, value in (config.get(entry) or {}).items() if _match(rf"(.*\.)?({key})$", name, entry))
    return next(matching, default)


def owners(name: str) -> list[str]:
    """Return the names of the modules that contain a tensor or a module, innermost first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:size]) for size in range(len(parts), 0, -1)]


def _most_common(values: Iterable[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]
