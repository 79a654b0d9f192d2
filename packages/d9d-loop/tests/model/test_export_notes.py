"""Notes about programs that lose a part of an export; `.ci/check_exports.py` compares them with these programs."""

import json
from pathlib import Path
from typing import Any

import pytest

from d9d_loop.model.export_notes import export_notes, print_export_notes, with_older_entries

PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0}
GLOBAL = {"rope_theta": 1_000_000.0}
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "original_max_position_embeddings": 8192, "rope_theta": 500.0}
PATTERN = ["sliding_attention"] * 5 + ["full_attention"]
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "layer_types": PATTERN}
LOCAL = {"full_attention": PLAIN, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama", "rope_parameters": PLAIN}, {}),
        ({"model_type": "llama", "rope_parameters": LINEAR}, {"GGUF": r"no RoPE scaling (linear)"}),
        (
            {"model_type": "llama", "rope_parameters": LLAMA3},
            {"GGUF": "no RoPE scaling (llama3)", "ctranslate2": "ignores the RoPE scaling llama3 of llama"},
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {**LOCAL, "full_attention": {**LINEAR, **GLOBAL}}},
            {"GGUF": "no RoPE scaling (linear)", "ctranslate2": "ignores the RoPE scaling linear of gemma3_text"},
        ),
        ({"model_type": "gemma3_text", "rope_parameters": LOCAL}, {"ctranslate2": "default RoPE bases"}),
        (
            {"model_type": "gemma3_text", "query_pre_attn_scalar": 168, "head_dim": 128},
            {"GGUF": "the default of query_pre_attn_scalar", "ctranslate2": "head_dim for query_pre_attn_scalar"},
        ),
        (
            {"model_type": "qwen3", "rope_parameters": PLAIN, **WINDOWS},
            {"GGUF": "no sliding windows", "ctranslate2": "ignores the sliding windows of qwen3"},
        ),
        ({"model_type": "qwen3", **WINDOWS, "use_sliding_window": False}, {}),
        ({"model_type": "qwen2", **WINDOWS, "layer_types": ["full_attention"] * 6}, {}),
        ({"model_type": "mistral", "sliding_window": 4096}, {"GGUF": "no sliding windows"}),
        ({"model_type": "mistral", "sliding_window": None}, {}),
        ({"model_type": "qwen3_moe", "norm_topk_prob": False}, {"GGUF": "transformers 5 reads norm_topk_prob = true"}),
        (
            {"model_type": "qwen3_moe", "norm_topk_prob": True},
            {"GGUF": "transformers 4 reads norm_topk_prob = false"},
        ),
        ({"model_type": "gemma3_text", "layer_types": PATTERN}, {}),
        ({"model_type": "gemma3_text", "rms_norm_eps": 1e-5}, {"ctranslate2": "rms_norm_eps = 1e-6"}),
        ({"model_type": "gemma3_text", "layer_types": PATTERN[::-1]}, {"GGUF": "the default of layer_types"}),
        ({"model_type": "olmo3", "rope_parameters": LOCAL}, {"transformers 4": "RoPE bases of each kind of layer"}),
        ({"model_type": "glm4", "rope_parameters": LINEAR}, {}),
        ({"rope_parameters": [1]}, {}),
        ({}, {}),
    ],
)
def test_a_note_names_the_program_and_what_it_loses(config: dict[str, Any], expected: dict[str, str]) -> None:
    notes = {note.reader: note.text for note in export_notes(config)}
    assert notes.keys() == expected.keys()
    assert all(expected[reader] in notes[reader] for reader in notes)


def test_notes_of_a_folder_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_export_notes(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "rope_parameters": LINEAR}))
    print_export_notes(tmp_path)
    assert capsys.readouterr().out == (
        "d9d: transformers reads no RoPE scaling (linear) from a GGUF file, so that logits differ without an error.\n"
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_parameters": PLAIN}, {"rope_theta": 500.0}),
        ({"rope_parameters": LINEAR}, {"rope_theta": 500.0, "rope_scaling": LINEAR}),
        (
            {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
            {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
        ),
        (
            {"rope_parameters": {**LINEAR, "rope_type": "longrope", "original_max_position_embeddings": 8}},
            {
                "rope_theta": 500.0,
                "original_max_position_embeddings": 8,
                "rope_scaling": {**LINEAR, "rope_type": "longrope", "original_max_position_embeddings": 8},
            },
        ),
        ({"rope_parameters": PLAIN, "rope_theta": 7.0}, {}),
        (
            {"model_type": "gemma3_text", "rope_parameters": {**LOCAL, "full_attention": LINEAR}},
            {"rope_theta": 500.0, "rope_local_base_freq": 10_000.0, "rope_scaling": LINEAR},
        ),
        (
            {"model_type": "modernbert", "rope_parameters": LOCAL},
            {"global_rope_theta": 500.0, "local_rope_theta": 10_000.0},
        ),
        ({"model_type": "qwen3_moe", "num_local_experts": 4}, {"num_experts": 4}),
        ({"model_type": "gpt2"}, {}),
    ],
)
def test_transformers_4_finds_its_entries(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert with_older_entries(config) == {**config, **expected}
