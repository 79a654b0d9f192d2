"""Parts of an exported model that other programs ignore without an error, found from its `config.json`.

The nightly lane `exports` loads exports in these programs, and requires equal logits or a note for each difference.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

Reader: TypeAlias = Literal["transformers 4", "ctranslate2", "GGUF"]
Config: TypeAlias = Mapping[str, Any]

_FROM_GGUF = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text")
"""Families that `transformers` reads from GGUF files."""

_LOCAL_BASES = {"gemma3_text": "rope_local_base_freq", "modernbert": "local_rope_theta"}
"""Entry of `transformers` 4 with the RoPE base of local layers, by family."""

_GLOBAL_BASES = {"gemma3_text": "rope_theta", "modernbert": "global_rope_theta"}
"""Entry of `transformers` 4 with the RoPE base of global layers, by family."""

_GEMMA3_BASES = (1_000_000.0, 10_000.0)
"""Default RoPE bases of the global and the local layers of Gemma 3."""


class ExportNote(NamedTuple):
    """Part of a model that a program ignores without an error."""

    reader: Reader
    text: str

    def __str__(self) -> str:
        return f"d9d: {self.text}, so that logits differ without an error."


def print_export_notes(folder: Path) -> None:
    """Print the parts of the model in a folder that other programs ignore, if it has a `config.json`."""
    path = folder / "config.json"
    for note in export_notes(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else ():
        print(note)


def export_notes(config: Config) -> list[ExportNote]:
    """Return the parts of the model of a `config.json` that other programs ignore without an error."""
    return [*_of_transformers_4(config), *_of_ctranslate2(config), *_of_gguf(config)]


def with_older_entries(config: Config) -> dict[str, Any]:
    """Return a `config.json` that `transformers` 5 wrote, with the entries that version 4 reads."""
    model_type, rope = config.get("model_type"), _entries(config, "rope_parameters")
    older: dict[str, Any] = {}
    if _is_per_kind(rope):
        for kind, names in (("full_attention", _GLOBAL_BASES), ("sliding_attention", _LOCAL_BASES)):
            if model_type in names and "rope_theta" in _entries(rope, kind):
                older[names[str(model_type)]] = rope[kind]["rope_theta"]
        rope = _entries(rope, "full_attention") if model_type == "gemma3_text" else {}
    elif "rope_theta" in rope:
        older["rope_theta"] = rope["rope_theta"]
    for name in ("partial_rotary_factor", "original_max_position_embeddings"):
        if name in rope and (name == "partial_rotary_factor" or rope.get("rope_type") == "longrope"):
            older[name] = rope[name]
    if rope.get("rope_type", "default") != "default":
        older["rope_scaling"] = rope
    if model_type in ("qwen3_moe", "qwen3_next") and "num_local_experts" in config:
        older["num_experts"] = config["num_local_experts"]
    return {**older, **config}


def _of_transformers_4(config: Config) -> Iterator[ExportNote]:
    if _is_per_kind(_entries(config, "rope_parameters")) and config.get("model_type") not in _LOCAL_BASES:
        yield ExportNote("transformers 4", "transformers 4 does not read the RoPE bases of each kind of layer")


def _of_ctranslate2(config: Config) -> Iterator[ExportNote]:
    model_type = config.get("model_type")
    if model_type in ("qwen2", "qwen3") and _has_windows(config):
        yield ExportNote("ctranslate2", f"ctranslate2 ignores the sliding windows of {model_type}")
    kind = _global_rope(config).get("rope_type", "default")
    if (model_type, kind) in (("llama", "llama3"), ("gemma3_text", kind)) and kind != "default":
        yield ExportNote("ctranslate2", f"ctranslate2 ignores the RoPE scaling {kind} of {model_type}")
    if model_type == "gemma3_text" and config.get("query_pre_attn_scalar", 256) != config.get("head_dim", 256):
        yield ExportNote("ctranslate2", "ctranslate2 uses head_dim for query_pre_attn_scalar")
    if model_type == "gemma3_text" and config.get("rms_norm_eps", 1e-6) != 1e-6:
        yield ExportNote("ctranslate2", "ctranslate2 uses rms_norm_eps = 1e-6 for gemma3_text")
    if model_type == "gemma3_text" and _bases(config) != _GEMMA3_BASES:
        text = "ctranslate2 with transformers 5 uses the default RoPE bases of gemma3_text"
        yield ExportNote("ctranslate2", text)


def _of_gguf(config: Config) -> Iterator[ExportNote]:
    model_type = config.get("model_type")
    if model_type not in _FROM_GGUF:
        return
    kind = _global_rope(config).get("rope_type", "default")
    if kind != "default":
        yield ExportNote("GGUF", f"transformers reads no RoPE scaling ({kind}) from a GGUF file")
    if model_type != "gemma3_text" and _has_windows(config):
        yield ExportNote("GGUF", "transformers reads no sliding windows from a GGUF file")
    if model_type == "qwen3_moe":
        version, value = (4, "false") if config.get("norm_topk_prob", False) else (5, "true")
        yield ExportNote("GGUF", f"transformers {version} reads norm_topk_prob = {value} from each GGUF file")
    if model_type == "gemma3_text" and (lost := _lost_of_gemma3(config)):
        yield ExportNote("GGUF", f"transformers reads the default of {', '.join(lost)} from a GGUF file")


def _lost_of_gemma3(config: Config) -> list[str]:
    kinds = config.get("layer_types")
    lost = {
        "query_pre_attn_scalar": config.get("query_pre_attn_scalar", 256) != 256,
        "layer_types": kinds is not None
        and any((kind == "sliding_attention") is not ((index + 1) % 6 > 0) for index, kind in enumerate(kinds)),
        "rope_local_base_freq": _bases(config)[1] != _GEMMA3_BASES[1],
        "final_logit_softcapping": config.get("final_logit_softcapping") is not None,
        "use_bidirectional_attention": bool(config.get("use_bidirectional_attention")),
    }
    return [name for name, is_lost in lost.items() if is_lost]


def _bases(config: Config) -> tuple[float, float]:
    """Return the RoPE bases of the global and the local layers of a Gemma 3."""
    local = _entries(_entries(config, "rope_parameters"), "sliding_attention")
    theta, local_theta = _GEMMA3_BASES
    return _global_rope(config).get("rope_theta", theta), local.get("rope_theta", local_theta)


def _global_rope(config: Config) -> Config:
    rope = _entries(config, "rope_parameters")
    return _entries(rope, "full_attention") if _is_per_kind(rope) else rope


def _entries(config: Config, key: str) -> Config:
    found = config.get(key)
    return found if isinstance(found, Mapping) else {}


def _is_per_kind(rope: Config) -> bool:
    return any(isinstance(each, Mapping) for each in rope.values())


def _has_windows(config: Config) -> bool:
    if config.get("model_type") == "mistral":
        return config.get("sliding_window", 4096) is not None
    kinds = config.get("layer_types")
    is_used = config.get("use_sliding_window", False) and config.get("sliding_window", 4096) is not None
    return bool(is_used) and (kinds is None or "sliding_attention" in kinds)
