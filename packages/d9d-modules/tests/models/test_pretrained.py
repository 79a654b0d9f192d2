import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from d9d_dist import StageInfo, UserError
from d9d_modules import (
    GEMMA3,
    LLAMA3,
    QWEN2,
    DecoderForCausalLM,
    Gemma3Params,
    Llama3Params,
    Qwen2Params,
    from_pretrained_config,
)
from d9d_modules.models.pretrained import PretrainedDecoder, known_families
from d9d_state import load_model_state, save_model_state

PARAMS = Qwen2Params(
    vocab_size=11,
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=12,
    initializer_range=0.3,
)


def _folder(path: Path, *, entries: dict[str, Any] | None = None, tensors: dict[str, Tensor] | None = None) -> Path:
    """Write a Qwen2 with further entries and tensors, and return the folder."""
    model = DecoderForCausalLM(PARAMS)
    config = {**QWEN2.write(PARAMS), **(entries or {})}
    save_model_state(model, path, QWEN2.mapper(PARAMS).inverse(), extra_files={"config.json": config})
    file = path / "model.safetensors"
    save_file({**load_file(file), **(tensors or {})}, file)
    return path


def _loaded(found: PretrainedDecoder) -> Any:
    model = found.build(StageInfo())
    assert found.folder is not None
    load_model_state(model, found.folder, found.load_mapper())
    return model


def test_a_dict_of_config_entries_describes_a_new_model_without_weights(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "qwen")
    found = from_pretrained_config(json.loads((folder / "config.json").read_text()))
    assert found.params == from_pretrained_config(folder).params
    assert found.folder is None
    assert str(found).startswith("new model: family qwen2")
    assert "no weights" in str(found)


def test_a_folder_is_recognized_and_described(tmp_path: Path) -> None:
    found = from_pretrained_config(_folder(tmp_path / "qwen", entries={"eos_token_id": [3, 5]}))
    assert found.export_files() == {"config.json": {**QWEN2.write(PARAMS), "eos_token_id": [3, 5]}}
    assert (found.family, found.params) == (QWEN2, PARAMS)
    assert str(found) == (
        f"{tmp_path / 'qwen'}: family qwen2, layers: 2 full_attention; 1.21e-06 B stored numbers (float32); "
        "tensors not used: none"
    )
    assert found.folder is not None
    model, stored = _loaded(found), load_file(found.folder / "model.safetensors")
    assert torch.equal(model.backbone.layers["1"].attention.k_proj.bias, stored["model.layers.1.self_attn.k_proj.bias"])
    save_model_state(model, tmp_path / "again", found.state_mapper().inverse(), extra_files=found.export_files())
    assert from_pretrained_config(tmp_path / "again").params == PARAMS
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in stored.items())


def test_tensors_that_the_model_does_not_use_are_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rotary = "model.layers.0.self_attn.rotary_emb.inv_freq"
    found = from_pretrained_config(_folder(tmp_path / "old", tensors={rotary: torch.ones(2)}))
    assert found.unused == (rotary,)
    assert str(found).endswith(f"tensors not used: {rotary}")
    with caplog.at_level(logging.WARNING):
        _loaded(found)
    assert caplog.messages == [f"{tmp_path / 'old'} contains tensors that the model does not use: {rotary}"]
    found = from_pretrained_config(_folder(tmp_path / "more", tensors={"vision.weight": torch.ones(2)}))
    with pytest.raises(UserError, match=r"in the file, but unused.*\n.*vision\.weight"):
        _loaded(found)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_language_model_of_a_multimodal_gemma_is_loaded(tmp_path: Path, prefix: str) -> None:
    sizes = {name: getattr(PARAMS, name) for name in ("vocab_size", "hidden_size", "num_layers", "num_heads")}
    params = Gemma3Params(**sizes, num_kv_heads=1, head_dim=4, intermediate_size=12)
    model = DecoderForCausalLM(params)
    save_model_state(model, tmp_path, GEMMA3.mapper(params).inverse())
    file = tmp_path / "model.safetensors"
    stored = {name.replace("model.", prefix, 1): tensor for name, tensor in load_file(file).items()}
    vision = "model.vision_tower.weight"
    save_file({**stored, vision: torch.ones(2)}, file)
    config = {"model_type": "gemma3", "text_config": GEMMA3.write(params), "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = from_pretrained_config(tmp_path)
    assert (found.family, found.params, found.unused) == (GEMMA3, params, (vision,))
    ids = torch.randint(0, 11, (2, 5))
    assert torch.equal(_loaded(found)(ids), model(ids))


def test_the_error_for_an_unknown_family_lists_differences_from_the_nearest_one(tmp_path: Path) -> None:
    entries = {"model_type": "new", "clip_qkv": 8.0, "max_window_layers": 28}
    folder = _folder(tmp_path / "new", entries=entries)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "vocab_size"}))
    expected = (
        r"model_type = 'new'; expected one of .*llama, mistral, .*qwen2.*The nearest family is qwen2; entries that it "
        r"does not know: clip_qkv; entries that it lacks: vocab_size\. Use d9d_loop\.hugging_face_model"
    )
    with pytest.raises(UserError, match=expected):
        from_pretrained_config(folder)
    (folder / "config.json").write_text(json.dumps({**config, "clip_qkv": None}))
    own = replace(QWEN2, model_type="new", fixed={**QWEN2.fixed, "clip_qkv": None})
    assert from_pretrained_config(folder, families=[own]).params == PARAMS


def test_the_nearest_family_is_chosen_by_the_text_entries_and_then_the_name(tmp_path: Path) -> None:
    text = QWEN2.write(PARAMS)
    with pytest.raises(UserError, match=r"'qwen2_vl'; .*nearest family is qwen2; .*not know: none; .*lacks: none"):
        from_pretrained_config({"model_type": "qwen2_vl", "text_config": text, "vision_config": {}})
    both = {key: value for key, value in text.items() if key not in {"use_mrope", "model_type"}}
    with pytest.raises(UserError, match=r"model_type = 'qwen3_x'; .*nearest family is qwen3;"):
        from_pretrained_config({**both, "model_type": "qwen3_x"})
    with pytest.raises(UserError, match=r"model_type = None; .*nearest family is qwen2;"):
        from_pretrained_config({key: value for key, value in text.items() if key != "model_type"})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": "{"}, r"config\.json is not valid JSON: .*Download it again"),
        ({"adapter_config.json": "{}"}, "contains an adapter; expected a model. Name the folder of the adapter's base"),
        ({}, r"the folder .* has no config\.json; expected a model"),
    ],
)
def test_folders_without_a_model_are_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        from_pretrained_config(tmp_path)


def test_a_repository_name_is_looked_up_in_the_hugging_face_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--Qwen--Qwen2.5-0.5B"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    snapshot = _folder(cached / "snapshots" / "abc")
    assert from_pretrained_config("Qwen/Qwen2.5-0.5B").folder == snapshot
    with pytest.raises(UserError, match=r"Qwen/Qwen3-8B is neither a folder .* hf download Qwen/Qwen3-8B"):
        from_pretrained_config("Qwen/Qwen3-8B")
    (snapshot / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"config\.json contains list; expected an object"):
        from_pretrained_config(snapshot)


def test_a_classifier_and_an_embedder_use_the_backbone(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "qwen")
    ids = torch.randint(0, 11, (2, 5))
    whole = _loaded(from_pretrained_config(folder))
    found = from_pretrained_config(folder, head="classification", num_classes=3)
    classifier = _loaded(found)
    assert found.unused == ("lm_head.weight",)
    assert classifier(ids).shape == (2, 3)
    assert torch.equal(classifier.backbone(ids), whole.backbone(ids))
    written = found.export_files()["config.json"]
    assert isinstance(written, dict)
    assert (written["architectures"], written["id2label"]) == (
        ["Qwen2ForSequenceClassification"],
        {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
    )
    save_model_state(classifier, tmp_path / "scored", found.state_mapper().inverse(), extra_files=found.export_files())
    again = _loaded(from_pretrained_config(tmp_path / "scored", head="classification", num_classes=3))
    assert torch.equal(again(ids), classifier(ids))
    with pytest.raises(UserError, match=r"head = 'classification', num_classes = None; expected num_classes"):
        from_pretrained_config(folder, head="classification")
    with pytest.raises(UserError, match=r"head = 'lm'; expected one of language_model, classification, embedding"):
        from_pretrained_config(folder, head="lm")  # ty: ignore[invalid-argument-type]

    found = from_pretrained_config(folder, head="embedding", pooling="mean", embedding_size=4)
    embedder = _loaded(found)
    assert embedder(ids).shape == (2, 4)
    save_model_state(embedder, tmp_path / "vectors", found.state_mapper().inverse(), extra_files=found.export_files())
    again = _loaded(from_pretrained_config(tmp_path / "vectors", head="embedding", pooling="mean"))
    assert torch.equal(again(ids), embedder(ids))
    stored = load_file(folder / "model.safetensors")
    del stored["lm_head.weight"]
    save_file({name.removeprefix("model."): tensor for name, tensor in stored.items()}, folder / "model.safetensors")
    found = from_pretrained_config(folder, head="embedding")
    assert found.unused == ()
    assert torch.equal(_loaded(found).backbone(ids), whole.backbone(ids))


def test_other_packages_register_families() -> None:
    known = known_families()
    assert known["llama"] is LLAMA3
    assert known["qwen2"].params is Qwen2Params
    assert Llama3Params is LLAMA3.params
