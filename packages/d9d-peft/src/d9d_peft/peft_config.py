"""The configuration of Hugging Face `peft`'s adapters, `adapter_config.json`: each entry is used, ignored or refused.

`peft` reads the same entries when it reloads an adapter. An entry that changes what `peft` would compute and that has
no counterpart here is refused by name.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from d9d_dist import UserError
from d9d_peft._targets import shorten
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
"""The entries that are used, with the types that they may have."""

_IRRELEVANT: Mapping[str, str] = {
    "task_type": "selects the class of peft around the model, which changes no number",
    "auto_mapping": "names the class of the base model",
    "base_model_name_or_path": "the base weights are loaded apart",
    "revision": "the base weights are loaded apart",
    "peft_version": "names the version that wrote the file",
    "inference_mode": "freezes parameters; `inject` decides what is trained",
    "lora_dropout": "acts in training only, where the injected method's dropout counts",
    "loftq_config": "configures an initialisation; `init_lora_weights` is checked",
    "eva_config": "configures an initialisation; `init_lora_weights` is checked",
    "corda_config": "configures an initialisation; `init_lora_weights` is checked",
    "lora_ga_config": "configures an initialisation; `init_lora_weights` is checked",
    "megatron_core": "has an effect only with `megatron_config`, which is refused",
    "qalora_group_size": "has an effect only with `use_qalora`, which is refused",
    "runtime_config": "is ignored by peft too when it stands in a file",
}
"""The entries that are ignored, with the reason."""

_ONLY: Mapping[str, object] = {
    "bias": "none",
    "fan_in_fan_out": False,
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
"""The entries that are refused unless they have this value: their default, which turns them off."""

_INITIALISATIONS = (True, False, "gaussian", "orthogonal", "eva")
"""Those that leave the base weights alone: all that they set is in the file."""

_OFF = (None, False, [], {}, "")


def adapter_config(
    layers: Mapping[str, LowRank], parameters: Mapping[str, LowRank], modules: Sequence[str], *, is_dora: bool
) -> dict[str, object]:
    """The configuration that `peft` needs to apply adapters; the most common rank and alpha are the defaults.

    Args:
        layers: Rank and scale of each layer, by its name in the base checkpoint.
        parameters: Rank and scale of each parameter [experts, out, in] with adapters, by its name there.
        modules: Names of modules that are trained as they are.
        is_dora: Whether the adapters are those of DoRA.
    """
    low_ranks = {**layers, **parameters}
    is_stabilized = all(low_rank.rank_stabilized for low_rank in low_ranks.values())
    ranks = {name: low_rank.rank for name, low_rank in low_ranks.items()}
    # An alpha that gives the layer's scale under the one rule that a file has.
    alphas = {
        name: low_rank.alpha if low_rank.rank_stabilized == is_stabilized else low_rank.scaling * low_rank.rank
        for name, low_rank in low_ranks.items()
    }
    rank, alpha = _most_common(ranks.values()), _most_common(alphas.values())
    # peft refuses a dropout beside target_parameters.
    dropout = 0.0 if parameters else _most_common(low_rank.dropout for low_rank in layers.values())
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "target_modules": list(layers),
        "target_parameters": list(parameters) or None,
        "modules_to_save": list(modules) or None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "init_lora_weights": True,
        "bias": "none",
        "fan_in_fan_out": False,
        "rank_pattern": {_exactly(name): value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {_exactly(name): value for name, value in alphas.items() if value != alpha},
        "use_rslora": is_stabilized,
        "use_dora": is_dora,
    }


def read_config(text: str, *, origin: str, is_dora: bool) -> dict[str, Any]:
    """Read a configuration, and refuse each entry that has no counterpart here.

    Args:
        text: Content of the file.
        origin: Name of the file, for the message.
        is_dora: Whether the model's adapters are those of DoRA.

    Returns:
        The entries.

    Raises:
        UserError: If the file is no JSON, or naming the entries that cannot be used.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise UserError(f"{origin} is no JSON: {error}.") from error
    if not isinstance(config, dict) or not {"r", "lora_alpha"} <= config.keys():
        raise UserError(f"{origin} has no r and lora_alpha; expected the configuration of a LoRA adapter.")
    _refuse_types(config, origin)
    expected = {"peft_type": "LORA", "use_dora": is_dora, **_ONLY}
    refused = [
        f"{name} = {value!r} (expected {expected[name]!r})"
        for name, value in ({"peft_type": None, "use_dora": False} | config).items()
        if name in expected and value != expected[name]
    ]
    known = expected.keys() | _TYPES.keys() | _IRRELEVANT.keys()
    refused += [f"{name} = {value!r} (unknown)" for name, value in config.items() if name not in known | _off(config)]
    if refused:
        raise UserError(
            f"{origin} says {shorten(refused)}. Inject what the adapters were trained with, and convert what there is "
            "no method for to plain LoRA first."
        )
    initialisation = config.get("init_lora_weights", True)
    if initialisation not in _INITIALISATIONS:
        raise UserError(
            f"{origin} says init_lora_weights = {initialisation!r}, which changes the base weights or trains another "
            f"way; expected one of {', '.join(map(repr, _INITIALISATIONS))}. Convert the adapters to plain LoRA: in "
            "peft, save_pretrained(..., path_initial_model_for_weight_conversion=...)."
        )
    return config


def refuse_other_scale(config: Mapping[str, Any], name: str, low_rank: LowRank, *, origin: str) -> None:
    """Refuse a layer or parameter of another rank or scale than a configuration says.

    Raises:
        UserError: With the options that would fit.
    """
    stored = config_low_rank(config, name)
    if stored.rank != low_rank.rank or not math.isclose(stored.scaling, low_rank.scaling, rel_tol=1e-9):
        wanted = "rank_stabilized = True and " if stored.rank_stabilized else ""
        raise UserError(
            f"the adapters in {origin} have rank {stored.rank} and scale {name} by {stored.scaling:g} (r, lora_alpha, "
            f"rank_pattern, alpha_pattern, use_rslora); the model's layer has rank {low_rank.rank} and scale "
            f"{low_rank.scaling:g}. Inject it with {wanted}rank = {stored.rank} and alpha = {stored.alpha:g}."
        )


def config_low_rank(config: Mapping[str, Any], name: str) -> LowRank:
    """Rank and scale of a layer or parameter."""
    rank = _by_pattern(config, "rank_pattern", name, config["r"])
    alpha = _by_pattern(config, "alpha_pattern", name, config["lora_alpha"])
    if not isinstance(alpha, int | float):
        raise UserError(f"adapter_config.json says alpha_pattern = {config['alpha_pattern']!r}; expected numbers.")
    low_rank = LowRank(rank=rank, alpha=alpha, rank_stabilized=config.get("use_rslora", False))
    low_rank.check("adapter_config.json (r, rank_pattern, lora_alpha, alpha_pattern)")
    return low_rank


def refuse_untargeted_layer(config: Mapping[str, Any], name: str, *, origin: str) -> None:
    """Refuse a layer whose adapter is in the files, but that `peft` would leave alone.

    Raises:
        UserError: Naming the entries that leave it alone.
    """
    entry = _entry_against(config, name)
    if entry is not None and not is_target(config, f"{name}.weight"):
        raise UserError(
            f"{origin} says {entry} = {config.get(entry)!r}, with which peft does not adapt {name}; the files hold an "
            "adapter of it. Correct the entry, or remove the adapter's tensors."
        )


def is_target(config: Mapping[str, Any], parameter: str) -> bool:
    """True if `peft` adapts a parameter because `target_parameters` names it."""
    return _is_named(parameter, config.get("target_parameters") or [])


def refuse_other_targets(
    config: Mapping[str, Any], parameters: Collection[str], layers: Collection[str], *, origin: str
) -> None:
    """Refuse target parameters of which the files hold no adapters, and adapters that no entry names.

    With other parameters, `peft` would look for the tensors under other names.

    Args:
        config: The configuration.
        parameters: Names of the parameters [experts, out, in] with adapters.
        layers: Names of the layers with adapters.
        origin: Name of the file, for the message.

    Raises:
        UserError: Naming `target_parameters`.
    """
    targets = config.get("target_parameters") or []
    adapted = [*parameters, *(f"{name}.weight" for name in layers)]
    unknown = [target for target in targets if not any(_is_named(name, [target]) for name in adapted)]
    missing = [name for name in parameters if not is_target(config, name)]
    if unknown or missing:
        raise UserError(
            f"{origin} says target_parameters = {targets!r}; the model's adapters are those of "
            f"{shorten(list(parameters)) if parameters else 'layers'}. Inject adapters into these parameters, and pass "
            "a base_mapper with the names of the model that they were trained on, such as "
            "qwen3_moe_from_hugging_face(params, layout='fused')."
        )


def refuse_other_modules(
    config: Mapping[str, Any], trained: Collection[str], base_names: Iterable[str], *, origin: str
) -> None:
    """Refuse modules that `peft` would replace without tensors in the files, and tensors of modules it does not name.

    Args:
        config: The configuration.
        trained: Names in the base checkpoint of the tensors that are trained as they are.
        base_names: Names of all tensors of the base checkpoint.
        origin: Name of the file, for the message.

    Raises:
        UserError: Naming `modules_to_save`.
    """
    entries = config.get("modules_to_save") or []
    owners = {name: _owners(name) for name in base_names}
    replaced = {m for modules in owners.values() for m in modules if _is_named(m, entries)} if entries else set[str]()
    missing = [name for name, modules in owners.items() if name not in trained and not replaced.isdisjoint(modules)]
    unnamed = [name for name in trained if not any(m.endswith(entry) for m in _owners(name) for entry in entries)]
    if missing or unnamed:
        problem = f"the files lack {shorten(missing)}" if missing else f"the files also hold {shorten(unnamed)}"
        raise UserError(f"{origin} says modules_to_save = {entries!r}; {problem}. Correct the entry.")


def _off(config: Mapping[str, Any]) -> frozenset[str]:
    """Entries without a value: an option that a newer version of peft added, and that is off."""
    return frozenset(name for name, value in config.items() if any(value is off or value == off for off in _OFF))


def _refuse_types(config: Mapping[str, Any], origin: str) -> None:
    for name, types in _TYPES.items():
        value = config.get(name, None if type(None) in types else types[0]())
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            expected = " or ".join("null" if each is type(None) else each.__name__ for each in types)
            raise UserError(f"{origin} says {name} = {value!r}; expected {expected}.")
    for name in ("layers_to_transform", "layers_pattern"):
        if config.get(name) and isinstance(config.get("target_modules"), str):
            raise UserError(
                f"{origin} says {name} = {config[name]!r} beside a pattern in target_modules; peft has one."
            )
    if config.get("layers_pattern") and config.get("layers_to_transform") is None:
        raise UserError(f"{origin} says layers_pattern = {config['layers_pattern']!r} without layers_to_transform.")


def _entry_against(config: Mapping[str, Any], name: str) -> str | None:
    """The entry because of which `peft` does not adapt a module; `None` if it does."""
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
    """The number of the block that a module is in."""
    if not patterns:
        match = re.match(r".*?\.[^.]*\.(\d+)\.", name)
        return int(match[1]) if match else None
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        match = _match(rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\.", name, "layers_pattern")
        if match:
            return int(match["index"])
    return None


def _matches(name: str, targets: str | list[str], entry: str) -> bool:
    """True if a name matches a pattern as a whole, or is one of some names."""
    if isinstance(targets, str):
        return _match(rf"(?:{targets})\Z", name, entry) is not None
    return _is_named(name, targets)


def _is_named(name: str, names: Iterable[str]) -> bool:
    """True if a name, or what it ends with after a dot, is one of some names."""
    return any(name == each or name.endswith(f".{each}") for each in names)


def _match(pattern: str, name: str, entry: str) -> re.Match[str] | None:
    try:
        return re.match(pattern, name)
    except re.error as error:
        raise UserError(f"adapter_config.json has no regular expression in {entry}: {error}.") from error


def _exactly(name: str) -> str:
    """A pattern that matches a name, and none that ends in it after a dot."""
    return f"^{re.escape(name)}"


def _by_pattern(config: Mapping[str, Any], entry: str, name: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a name, at a dot, as `peft` reads them."""
    matching = (value for key, value in (config.get(entry) or {}).items() if _match(rf"(.*\.)?({key})$", name, entry))
    return next(matching, default)


def _owners(name: str) -> list[str]:
    """The modules that a tensor lies in, the closest first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:size]) for size in range(len(parts), 0, -1)]


def _most_common(values: Iterable[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]
