"""Folders with changed entries of `config.json`: the model equals that of `transformers`, or an error names an entry.

Unlike in test_config_entries.py, files have only the entries that `transformers` stores, so that others have their
defaults, and models are saved and loaded. The changes are derived from the configuration classes of
`transformers`, from the names that their sources read, and from the entries that d9d knows. Without `--all`, one change
of each family runs, and those that were once read in another way.
"""

import copy
import inspect
import json
import random
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch.nn import functional as F

from d9d_dist import StageInfo, UserError
from d9d_dist.testing import KeepFloat64
from d9d_modules import from_pretrained_config
from d9d_modules.models.pretrained import PretrainedHead, known_families
from d9d_state import load_model_state, save_model_state

Config: TypeAlias = dict[str, Any]

# Sizes with which each entry has a large effect, such as a large epsilon.
SIZES = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "rms_norm_eps": 0.1,
    "norm_eps": 0.1,
    "initializer_range": 0.5,
    "sliding_window": 4,
    "local_attention": 6,
    "query_pre_attn_scalar": 9,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 10,
    "first_k_dense_replace": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 6,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "num_mtp_layers": 0,
    "max_window_layers": 1,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
_VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "patch_size": 4}
VISION = {
    "gemma3": {**_VISION, "image_size": 8},
    "qwen3_5": {**_VISION, "depth": 1, "num_heads": 1, "out_hidden_size": 16},
    "qwen3_5_moe": {**_VISION, "depth": 1, "num_heads": 1, "out_hidden_size": 16},
}
"""Vision towers of multimodal configurations."""

ROPES: dict[str, Config] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 40.0, "original_max_position_embeddings": 16, "beta_fast": 16.0, "beta_slow": 0.5},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "longrope": {
        "short_factor": [1.0, 1.2],
        "long_factor": [2.0, 3.0],
        "original_max_position_embeddings": 8,
        "factor": 4.0,
    },
}
EXTRAS: Config = {
    "mscale": 0.7,
    "mscale_all_dim": 0.5,
    "attention_factor": 1.5,
    "truncate": False,
    "partial_rotary_factor": 0.5,
    "unknown": 3,
}
KINDS = ("full_attention", "sliding_attention")
HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
IDS = torch.randint(0, 10, (1, 24), generator=torch.Generator().manual_seed(0))


def _mapping() -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING


TYPES = [name for name in known_families() if name != "kimi_k2"]  # transformers has no class for Kimi K2


@cache
def _written(model_type: str) -> tuple[Config, Config]:
    """Return the `config.json` that `transformers` writes for a tiny model, and all values of the configuration."""
    made = _mapping()[model_type]
    names = {*inspect.signature(made.__init__).parameters, *made.__dataclass_fields__}
    sizes: Config = {name: value for name, value in SIZES.items() if name in names}
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    # By default so few layers would all be of one kind.
    if model_type == "gemma3_text":
        sizes["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    if model_type in HYBRIDS:
        sizes["layer_types"] = ["linear_attention", "full_attention", "linear_attention"]
    if model_type == "qwen3_moe":  # its head_dim is read although the class does not declare it
        sizes["head_dim"] = SIZES["head_dim"]
    config = made(**sizes)
    written, full = (json.loads(json.dumps(each)) for each in (config.to_diff_dict(), config.to_dict()))
    return {**written, "model_type": model_type}, full


def _values(value: object) -> Iterator[object]:
    """Yield other values of an entry."""
    match value:
        case bool():
            yield from (None, not value)
        case int():
            yield from (None, value + 1, value * 2, 1, 0)
        case float():
            yield from (None, value * 1.5 + 0.5, int(value) + 1)
        case str():
            yield from (None, "gelu", "relu")
        case list():
            yield from (None, value[::-1], [], value[:1] * len(value), value[-1:] * len(value), value[:-1])
        case None:
            yield from (True, False, 2, 3, 0.5)
        case _:
            yield None


def _entry_changes(model_type: str) -> Iterator[tuple[str, Config]]:
    written, full = _written(model_type)
    made, family = _mapping()[model_type], known_families()[model_type]
    legacy = re.findall(r'kwargs\.(?:get|pop|setdefault)\("(\w+)"', inspect.getsource(sys.modules[made.__module__]))
    aliases = [*made.attribute_map.items()] + [
        pair
        for each in family.entries
        if each.alias is not None
        for pair in ((each.alias, each.key), (each.key, each.alias))
    ]
    nested = {"model_type", "text_config", "vision_config", "quantization_config", "rope_parameters", "rope_scaling"}
    for key in sorted({*full, *family.used, *family.irrelevant, *made.attribute_map, *legacy} - nested):
        if key in written:
            yield f"{key}: missing", {name: value for name, value in written.items() if name != key}
        for value in _values(full.get(key)):
            yield f"{key} = {value}", {**written, key: value}
    for alias, key in aliases:
        value = full.get(key, full.get(alias))
        without = {name: each for name, each in written.items() if name not in {key, alias}}
        if isinstance(value, int):
            yield f"{alias} alone", {**without, alias: value - 1}
            yield f"{alias} beside {key}", {**without, key: value, alias: value - 1}


def _ropes(pairs: int) -> Iterator[tuple[str, Config]]:
    for kind, given in ROPES.items():
        entries = {key: value[:1] * pairs if isinstance(value, list) else value for key, value in given.items()}
        whole = {"rope_type": kind, **entries}
        yield kind, whole
        yield f"{kind} as type", {"type": kind, **entries}
        for key in entries:
            yield f"{kind} without {key}", {name: value for name, value in whole.items() if name != key}
        for key, value in EXTRAS.items():
            yield f"{kind} with {key}", {**whole, key: value}
    yield "mscales", {"rope_type": "yarn", **ROPES["yarn"], "mscale": 0.7, "mscale_all_dim": 0.5}
    yield "empty", {}


def _rope_changes(model_type: str) -> Iterator[tuple[str, Config]]:
    written, full = _written(model_type)
    named = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    clean = {key: value for key, value in written.items() if key not in named}
    head = full.get("qk_rope_head_dim") or full.get("head_dim") or full["hidden_size"] // full["num_attention_heads"]
    part = full["rope_parameters"].get("partial_rotary_factor", 1.0)
    plain, theta = {"rope_type": "default", "rope_theta": 50.0}, {"rope_theta": 500.0}
    for name, rope in _ropes(int(head * part) // 2):
        yield f"rope_scaling: {name}", {**clean, **theta, "rope_scaling": rope}
        yield f"rope_scaling: {name}, no base", {**clean, "rope_scaling": rope}
        yield f"rope_parameters: {name}", {**clean, "rope_parameters": {**rope, **theta}}
        yield f"rope_parameters: {name}, base outside", {**clean, **theta, "rope_parameters": rope}
        yield f"both: {name}", {**clean, "rope_scaling": rope, "rope_parameters": {**plain, **theta}}
        both = {"rope_parameters": dict.fromkeys(KINDS, plain), "rope_scaling": rope}
        yield f"kinds and rope_scaling: {name}", {**clean, **both}
        for kind, other in (KINDS, KINDS[::-1]):
            yield f"{kind}: {name}", {**clean, "rope_parameters": {kind: {**rope, **theta}, other: plain}}
            yield f"{kind} alone: {name}", {**clean, "rope_parameters": {kind: {**rope, **theta}}}
    yarn, length = {"rope_type": "yarn", **ROPES["yarn"]}, {"original_max_position_embeddings": 8}
    outer: list[Config] = [
        *({}, theta, {**theta, "rope_scaling": None}, {**theta, "rope_parameters": None}, {"rope_theta": None}),
        *({key: 50.0} for key in ("rope_local_base_freq", "global_rope_theta", "local_rope_theta", "default_theta")),
        *({**theta, "partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.25, "rope_parameters": plain}),
        *({**theta, **length}, {**theta, **length, "rope_scaling": yarn}, {**theta, "rope_parameters": plain}),
        {**theta, **length, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    ]
    for each in outer:
        yield f"outer: {each}", {**clean, **each}


@cache
def _changes(model_type: str) -> dict[str, Config]:
    """Return the changed configurations of a family by name, with the unchanged one first."""
    if model_type not in VISION:
        return {
            "unchanged": _written(model_type)[0],
            **dict(_entry_changes(model_type)),
            **dict(_rope_changes(model_type)),
        }
    made, inner = _mapping()[model_type], known_families()[model_type].model_type
    config = made(text_config=copy.deepcopy(_written(inner)[0]), vision_config=VISION[model_type])
    written = {**json.loads(json.dumps(config.to_diff_dict())), "text_config": _written(inner)[0]}
    outer = {
        f"outer {key} = {value}": {**written, key: value}
        for key in written.keys() - {"model_type", "text_config", "vision_config", "architectures"}
        for value in _values(written[key])
    }
    text = {f"text: {name}": {**written, "text_config": each} for name, each in _entry_changes(inner)}
    return {"unchanged": written, **outer, **text}


def _reference(folder: Path) -> Any:
    """Build the model of `transformers` with random weights, and save them."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    for each in (config, config.get_text_config()):
        each._experts_implementation = "eager"
    kind = "MaskedLM" if config.model_type == "modernbert" else "CausalLM"
    if hasattr(config, "text_config"):
        kind = "ImageTextToText"
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config, attn_implementation="eager")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name and "gemma" not in config.model_type), std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    model.save_pretrained(folder)
    model.double().train()
    for module in model.modules():
        for name, buffer in [*module.named_buffers(recurse=False)]:  # angles are float32 in both implementations
            if name.endswith("inv_freq"):
                setattr(module, name, buffer.float())
    return model


def _check(config: Config, folder: Path) -> str:
    """Compare both models of a configuration; return what happened, or raise an `AssertionError`."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    try:
        from_pretrained_config(folder)
    except UserError as error:
        return _named(config, error)
    try:
        reference = _reference(folder)
        ids = IDS % reference.config.get_text_config().vocab_size
        masked = reference.config.model_type == "modernbert"
        with KeepFloat64():
            torch.manual_seed(1)
            output = reference(ids, return_dict=True, **({} if masked else {"labels": ids, "use_cache": False}))
    except Exception:  # any exception: transformers does not check its configurations
        return "not supported by transformers"
    path.write_text(json.dumps(config))
    try:
        found = from_pretrained_config(folder)
        ours = found.build(StageInfo())
        load_model_state(ours, folder, found.load_mapper())
        logits = ours.double().train()(ids)
    except UserError as error:
        return _named(config, error)
    gap = (logits - output.logits).abs().max() / output.logits.abs().max()
    assert gap < 2e-6, f"logits differ by {gap:.1e}"
    if not masked and found.params.auxiliary_losses is None:  # then the loss of transformers has no other terms
        torch.testing.assert_close(output.loss, F.cross_entropy(output.logits[0, :-1], ids[0, 1:]), rtol=1e-5, atol=0)
    return "equal"


def _named(config: Config, error: UserError) -> str:
    names = {*config, *known_families()[config["model_type"]].used, *config.get("text_config", {})}
    names |= {*EXTRAS, "default_theta", *(key for rope in ROPES.values() for key in rope)}
    assert any(name in str(error) for name in names), f"the error names no entry: {error}"
    return "error"


REGRESSIONS = {
    "gpt_oss": ("outer: {'rope_theta': 500.0}", "experts_per_token alone", "num_experts alone"),
    "gemma3_text": (
        "rope_scaling: linear as type",
        "rope_scaling: yarn with truncate",
        "full_attention: yarn with truncate",
        "sliding_attention: linear as type",
    ),
    "modernbert": ("full_attention: yarn with truncate", "sliding_attention: yarn as type"),
    "gemma3": (
        "text: tie_word_embeddings = False",
        "text: final_logit_softcapping = 0.5",
        "text: use_bidirectional_attention = True",
    ),
    "glm4": ("rms_norm_eps: missing",),
    "qwen2": ("num_key_value_heads: missing",),
    "qwen3_5_text": ("linear_num_key_heads = 3",),
    "qwen3_5_moe": ("unchanged",),
}
"""Changes that were once read in another way."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity_warning()
    logging.enable_progress_bar()


def _run(changes: dict[str, Config], folder: Path) -> list[str]:
    """Return the problems of changed configurations."""
    problems, outcomes = [], []
    for number, (name, config) in enumerate(changes.items()):
        (folder / str(number)).mkdir()
        try:
            outcomes.append(_check(config, folder / str(number)))
        except Exception as error:  # also errors that are no `UserError`
            problems.append(f"{name}: {type(error).__name__}: {error}")
    assert "equal" in outcomes or problems
    return problems


@pytest.mark.parametrize("model_type", TYPES)
def test_changed_entries_are_read_as_by_transformers(model_type: str, tmp_path: Path) -> None:
    changes = _changes(model_type)
    assert set(REGRESSIONS.get(model_type, ())) <= changes.keys()
    chosen = random.Random(model_type).sample([*changes], 1)  # noqa: S311
    names = ["unchanged", *REGRESSIONS.get(model_type, ()), *chosen]
    assert not _run({name: changes[name] for name in names}, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("model_type", TYPES)
def test_all_changed_entries_are_read_as_by_transformers(model_type: str, tmp_path: Path) -> None:
    assert len(_changes(model_type)) > (100 if model_type in VISION else 500)
    assert not _run(_changes(model_type), tmp_path)


@pytest.mark.parametrize("model_type", [name for name in TYPES if name not in VISION])
def test_missing_entries_have_the_defaults_of_transformers(model_type: str) -> None:
    defaults = _mapping()[model_type]().to_dict()
    family = known_families()[model_type]
    ours: Config = {entry.key: entry.default for entry in family.entries if isinstance(entry.default, int | float)}
    ours |= dict(family.fixed)
    assert not {key: (value, defaults[key]) for key, value in ours.items() if defaults.get(key, value) != value}


@pytest.mark.parametrize("model_type", [name for name in TYPES if name not in VISION])
def test_exports_name_the_classes_of_transformers(model_type: str) -> None:
    from transformers.models.auto import modeling_auto as auto

    config = {**_written(model_type)[0], "pad_token_id": 3}
    language = "MASKED_LM" if model_type == "modernbert" else "CAUSAL_LM"
    heads: dict[PretrainedHead, str] = {
        "language_model": f"FOR_{language}_",
        "classification": "FOR_SEQUENCE_CLASSIFICATION_",
        "embedding": "",
    }
    for head, name in heads.items():
        found = from_pretrained_config(config, head=head, num_classes=2 if head == "classification" else None)
        written: Any = found.export_files()["config.json"]
        expected = getattr(auto, f"MODEL_{name}MAPPING_NAMES").get(model_type)
        assert written["architectures"] == ([] if expected is None else [expected])
        assert written["pad_token_id"] == 3


@pytest.mark.parametrize("model_type", [name for name in TYPES if name not in VISION])
@pytest.mark.sample("gemma3_text", "qwen3_5_text")
def test_the_class_that_an_export_names_loads_it(model_type: str, tmp_path: Path) -> None:
    import transformers

    config = {**_written(model_type)[0], "pad_token_id": None}
    heads: tuple[PretrainedHead, ...] = ("language_model", "classification", "embedding")
    for head in heads:
        found = from_pretrained_config(config, head=head, num_classes=2 if head == "classification" else None)
        ours: Any = found.build(StageInfo()).eval()
        folder = tmp_path / head
        save_model_state(ours, folder, found.state_mapper().inverse(), extra_files=found.export_files())
        names = json.loads((folder / "config.json").read_text())["architectures"]
        for name in names:
            built = getattr(transformers, name)
            loaded, report = built.from_pretrained(folder, experts_implementation="eager", output_loading_info=True)
            assert not report["missing_keys"]
            assert not report["unexpected_keys"]
            with torch.no_grad():
                theirs = loaded.eval()(IDS)
                expected = theirs.last_hidden_state if head == "embedding" else theirs.logits
                got = ours.backbone(IDS) if head == "embedding" else ours(IDS)
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
