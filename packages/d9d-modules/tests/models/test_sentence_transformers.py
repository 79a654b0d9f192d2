"""Folders as sentence-transformers saves them; the entries are those of released checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest

from d9d_dist import UserError
from d9d_modules import GEMMA3, QWEN3, Gemma3Params, Qwen3Params, from_pretrained_config
from d9d_modules.models.sentence_transformers import read_pooling

SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
    "intermediate_size": 8,
    "max_position_embeddings": 8,
}


def _write(folder: Path, *kinds: str, modes: dict[str, bool] | None = None) -> None:
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "", "type": f"a.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    if modes is not None:
        (folder / "1_Pooling").mkdir()
        config = {"word_embedding_dimension": 8, "include_prompt": True, "pooling_mode_max_tokens": False, **modes}
        (folder / "1_Pooling/config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("mode", "pooling"),
    [
        ("pooling_mode_mean_tokens", "mean"),
        ("pooling_mode_lasttoken", "last"),
        ("pooling_mode_cls_token", "first"),
    ],
)
def test_the_head_has_the_pooling_of_the_folder(tmp_path: Path, mode: str, pooling: str) -> None:
    _write(tmp_path, "Transformer", "Pooling", "Normalize", modes={mode: True})
    (tmp_path / "config.json").write_text(json.dumps(QWEN3.write(Qwen3Params(**SIZES))))
    assert from_pretrained_config(tmp_path, head="embedding").pooling == pooling
    assert from_pretrained_config(tmp_path).pooling is None
    assert from_pretrained_config(tmp_path, head="embedding", pooling="last").pooling == "last"


def test_dense_layers_of_embeddinggemma_are_refused_unless_a_pooling_is_given(tmp_path: Path) -> None:
    _write(tmp_path, "Transformer", "Pooling", "Dense", "Dense", "Normalize", modes={"pooling_mode_mean_tokens": True})
    config = GEMMA3.write(Gemma3Params(**SIZES, is_causal=False))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"modules.json lists Dense \(2_Dense\), Dense \(3_Dense\); .* Pass pooling="):
        from_pretrained_config(tmp_path, head="embedding")
    assert from_pretrained_config(tmp_path, head="embedding", pooling="mean").pooling == "mean"


@pytest.mark.parametrize(("is_causal", "pooling"), [(True, "last"), (False, "mean")])
def test_bidirectional_gemma_pools_by_the_mean(is_causal: bool, pooling: str) -> None:
    assert Gemma3Params(**SIZES, is_causal=is_causal).pooling == pooling


def test_other_poolings_are_refused(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) is None
    _write(tmp_path, "Transformer")
    assert read_pooling(tmp_path) is None
    _write(tmp_path, "Transformer", "Pooling", modes={"pooling_mode_weightedmean_tokens": True})
    with pytest.raises(UserError, match=r"has the pooling pooling_mode_weightedmean_tokens; expected one of"):
        read_pooling(tmp_path)
