"""ModernBERT's heads and folders; `test_families.py` compares the masked language model with `transformers`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from d9d_dist import StageInfo, UserError
from d9d_dist.testing import KeepFloat64, assert_trees_close
from d9d_modules import (
    MODERNBERT,
    DecoderForCausalLM,
    DecoderWithHeads,
    ModernBertParams,
    decoder_lm_head,
    from_pretrained_config,
)
from d9d_modules.models.modernbert import modernbert_from_hugging_face
from d9d_modules.models.pretrained import PretrainedDecoder
from d9d_state import load_model_state, save_model_state

PARAMS = ModernBertParams(
    vocab_size=11,
    hidden_size=8,
    num_layers=3,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=12,
    sliding_window=2,
    sliding_layers=(1, 2),
    norm_bias=True,
    transform_bias=True,
    classifier_pooling="mean",
    initializer_range=0.3,
)
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
IDS = torch.tensor([[1, 5, 2, 7, 3, 2], [1, 4, 4, 9, 0, 0]])


def _reference(kind: str, params: ModernBertParams = PARAMS) -> Any:
    import transformers

    torch.manual_seed(0)
    entries: dict[str, Any] = {**MODERNBERT.write(params), "pad_token_id": None, "num_labels": 3}
    config = transformers.AutoConfig.for_model(**entries)
    model = getattr(transformers, kind)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name), std=0.3)
    return model


def _loaded(found: PretrainedDecoder) -> Any:
    model = found.build(StageInfo())
    assert found.folder is not None
    load_model_state(model, found.folder, found.load_mapper())
    return model


def _in_float64(reference: Any) -> Any:
    model = reference.double()
    rotary = model.model.rotary_emb
    for name, buffer in [*rotary.named_buffers()]:
        setattr(rotary, name, buffer.float())
    return model


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_classifier_equals_transformers(tmp_path: Path, pooling: Any) -> None:
    reference = _reference("ModernBertForSequenceClassification", replace(PARAMS, classifier_pooling=pooling))
    reference.save_pretrained(tmp_path / "theirs")
    reference = _in_float64(reference)
    found = from_pretrained_config(tmp_path / "theirs", head="classification", num_classes=3)
    assert found.unused == ()
    model = _loaded(found).double()
    labels = torch.tensor([2, 0])
    with KeepFloat64():
        logits = reference(IDS, attention_mask=MASK).logits
    expected = F.cross_entropy(logits, labels, reduction="none")
    expected.sum().backward()
    # Padding is a document of its own.
    losses = model(IDS, mask_BL=MASK, document_ids_BL=MASK, labels=labels)
    losses.sum().backward()
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-10)
    mapper = found.state_mapper()
    gradients = mapper.apply_all({name: parameter.grad for name, parameter in reference.named_parameters()})
    got = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_trees_close(got, gradients, rtol=1e-10, atol=1e-10)
    save_model_state(model.float(), tmp_path / "ours", mapper.inverse(), extra_files=found.export_files())
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["architectures"] == [type(reference).__name__]
    again = type(reference).from_pretrained(tmp_path / "ours")
    assert_trees_close(again.state_dict(), reference.float().state_dict(), rtol=0, atol=0)


def test_padding_and_packed_documents_are_not_attended_to() -> None:
    reference = _in_float64(_reference("ModernBertForMaskedLM"))
    model = DecoderForCausalLM(PARAMS).double()
    model.load_state_dict(modernbert_from_hugging_face(PARAMS).apply_all(reference.state_dict()), strict=False)
    with KeepFloat64():
        expected = reference(IDS, attention_mask=MASK).logits
    is_token = MASK.bool()
    logits = model(IDS, document_ids_BL=MASK)
    torch.testing.assert_close(logits[is_token], expected[is_token], rtol=1e-10, atol=1e-10)
    packed, lengths = torch.cat([IDS[0], IDS[1, :4]]).unsqueeze(0), (6, 4)
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    documents = torch.tensor([[0] * lengths[0] + [1] * lengths[1]])
    logits = model(packed, position_ids=positions, document_ids_BL=documents)
    torch.testing.assert_close(logits[0], expected[is_token], rtol=1e-10, atol=1e-10)


def test_folders_of_other_heads_are_read(tmp_path: Path) -> None:
    """A classifier loads the transform of a masked language model; embedding models have names without a prefix."""
    reference = _reference("ModernBertForMaskedLM")
    reference.save_pretrained(tmp_path)
    found = from_pretrained_config(tmp_path, head="classification", num_classes=2)
    assert found.unused == ("decoder.bias",)
    assert not found.is_causal
    model = _loaded(found)
    assert torch.equal(model.head.transform.dense.weight, reference.head.dense.weight)
    assert model.head.pooling == "mean"

    file = tmp_path / "model.safetensors"
    backbone = {name.removeprefix("model."): x for name, x in load_file(file).items() if name.startswith("model.")}
    save_file(backbone, file, metadata={"format": "pt"})
    found = from_pretrained_config(tmp_path, head="embedding", pooling="first")
    assert found.unused == ()
    embeddings: Tensor = _loaded(found)(IDS)
    hidden = reference.model(IDS).last_hidden_state[:, 0]
    torch.testing.assert_close(embeddings, F.normalize(hidden, dim=-1), rtol=1e-5, atol=1e-5)


def test_a_language_model_among_several_heads_has_its_transform() -> None:
    model = DecoderForCausalLM(PARAMS)
    several = DecoderWithHeads(PARAMS, heads={"text": decoder_lm_head})
    several.load_state_dict({name.replace("lm_head", "heads.text"): x for name, x in model.state_dict().items()})
    assert torch.equal(several(IDS)["text"], model(IDS))
    assert several.ends() == []


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"rope_theta": 10.0}, r"rope_theta = 10\.0 for no kind of layer"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling = .* for no kind of layer"),
        ({"classifier_pooling": "max"}, "classifier_pooling = 'max'; expected 'cls' or 'mean'"),
        ({"hidden_activation": "silu"}, "hidden_activation = 'silu'; only 'gelu' is supported"),
        ({"mlp_dropout": 0.1}, r"mlp_dropout = 0\.1; only 0\.0 is supported"),
        ({"num_attention_heads": 3}, "hidden_size = 8, num_attention_heads = 3; expected an even number"),
    ],
)
def test_unsupported_configurations_are_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MODERNBERT.read({**json.loads(json.dumps(MODERNBERT.write(PARAMS))), **entries})


def test_models_that_a_config_cannot_express_are_refused() -> None:
    with pytest.raises(UserError, match=r"ModernBertForMaskedLM cannot express num_kv_heads = 1 \(read as 2\)"):
        MODERNBERT.write(replace(PARAMS, num_kv_heads=1))
