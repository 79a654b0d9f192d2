"""Multi-token prediction, compared with the MTP layers of `transformers`."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference_gradients import assert_same_gradients
from torch import Tensor
from torch.nn import functional as F

from d9d_dist import StageInfo, UserError
from d9d_dist.testing import KeepFloat64
from d9d_modules import QWEN_MTP, DecoderForCausalLM, DecoderWithMtp, Gemma3Params, HuggingFaceFamily, mtp_targets
from d9d_modules.models.decoder_mtp import DEEPSEEK_MTP, mtp_from_hugging_face
from d9d_moe import (
    DEEPSEEK_V3,
    GLM4_MOE,
    DeepseekV3Params,
    Glm4MoeParams,
    Qwen3NextParams,
    RouterLosses,
    SparseParams,
    sparse_from_hugging_face,
)
from d9d_state import parallel

SIZES: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 12,
    "num_layers": 2,
    "num_heads": 2,
    "intermediate_size": 20,
    "num_experts": 6,
    "top_k": 2,
    "expert_intermediate_size": 10,
    "initializer_range": 0.3,
}
DEEPSEEK = DeepseekV3Params(**SIZES, num_dense_layers=1, kv_rank=6, q_rank=None, head_dim=4, rotary_dim=4, value_dim=6)
GLM = Glm4MoeParams(**SIZES, num_dense_layers=1, num_kv_heads=1, head_dim=8, rotary_dim=4, has_qkv_bias=True)
QWEN = Qwen3NextParams(
    **SIZES,
    num_kv_heads=1,
    head_dim=8,
    rotary_dim=4,
    full_layers=(),
    num_linear_key_heads=1,
    num_linear_value_heads=2,
    linear_key_dim=4,
    linear_value_dim=4,
    shared_intermediate_size=5,
)
CASES: dict[str, tuple[SparseParams, HuggingFaceFamily[Any], str]] = {
    "deepseek": (DEEPSEEK, DEEPSEEK_V3, "DeepseekV3ForCausalLM"),
    "glm": (GLM, GLM4_MOE, "Glm4MoeForCausalLM"),
}


def _on_disk(main: Any, mtp: Any, *, num_layers: int) -> dict[str, Tensor]:
    """Return the tensors of both reference modules, those of the MTP layers under the names of a checkpoint."""
    tensors = dict(main.state_dict(keep_vars=True))
    for name, tensor in mtp.state_dict(keep_vars=True).items():
        if name.startswith("layers."):
            _, depth, rest = name.split(".", 2)
            rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
            tensors[f"model.layers.{num_layers + int(depth)}.{rest}"] = tensor
    return tensors


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_match(name: str, depth: int) -> None:
    import transformers
    from transformers.modeling_layers import MtpModel

    params, family, reference_name = CASES[name]
    reference_class = getattr(transformers, reference_name)
    config = reference_class.config_class.from_dict(
        json.loads(json.dumps({**family.write(params), "num_mtp_layers": depth}))
    )
    config._experts_implementation = "eager"
    main = reference_class(config)
    mtp = MtpModel(main, depth)
    for module in (main, mtp):
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    main, mtp = main.double(), mtp.double()
    for module in (*main.modules(), *mtp.modules()):
        if hasattr(module, "inv_freq"):
            module.inv_freq = module.inv_freq.float()
    mapper = parallel(
        sparse_from_hugging_face(params, layout="fused"),
        mtp_from_hugging_face(
            params,
            num_mtp_layers=depth,
            feed_forward=lambda index: params.feed_forward_from_hugging_face(index, "fused"),
        ),
    )
    ours = DecoderWithMtp(params, num_mtp_layers=depth, mtp_loss_weight=0.3).double()
    on_disk = _on_disk(main, mtp, num_layers=params.num_layers)
    loaded = mapper.apply_all({each: tensor.detach() for each, tensor in on_disk.items()})
    assert ours.load_state_dict(loaded, strict=False).missing_keys == ["mtp_embedding.weight"]
    input_ids, labels = torch.randint(0, 19, (2, 2, 9))
    labels[:, 3:5] = -100
    ids_BLK, labels_BLK = mtp_targets(input_ids, labels, num_mtp_layers=depth)
    with KeepFloat64():
        outputs = main.model(input_ids, use_cache=False)
        hidden, positions = outputs.last_hidden_state, torch.arange(9).unsqueeze(0)
        losses = _losses(main.lm_head(hidden), labels)
        for layer in range(depth):
            hidden = mtp.forward_layer(layer, hidden, positions, None, input_ids=ids_BLK[..., layer])
            losses = losses + 0.3 / depth * _losses(main.lm_head(hidden), labels_BLK[..., layer])
        losses.sum().backward()
    got = ours(input_ids, labels=labels, mtp_ids_BLK=ids_BLK, mtp_labels_BLK=labels_BLK)
    torch.testing.assert_close(got, losses, rtol=1e-10, atol=1e-10)
    got.sum().backward()
    assert_same_gradients(ours, mapper, on_disk, tolerance=1e-10)


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


@pytest.mark.parametrize("params", [DEEPSEEK, QWEN], ids=["deepseek", "qwen"])
def test_stages_of_packed_rows_give_the_losses_of_separate_documents(params: SparseParams) -> None:
    """Two stages of a packed row give the losses of the separate documents."""
    whole = DecoderWithMtp(params, num_mtp_layers=2).double()
    input_ids, labels = torch.randint(0, 19, (2, 1, 9))
    lengths = [4, 5]
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    documents = torch.tensor([[0] * lengths[0] + [7] * lengths[1]])
    ids_BLK, labels_BLK = mtp_targets(input_ids, labels, documents, num_mtp_layers=2)
    hidden: Any = input_ids
    names: set[str] = set()
    for index in range(2):
        stage = DecoderWithMtp(params, StageInfo(index, 2), num_mtp_layers=2).double()
        stage.load_state_dict({each: whole.state_dict()[each] for each in stage.state_dict()})
        names |= stage.state_dict().keys()
        assert "backbone.embedding.weight" in stage.state_dict()
        hidden = stage(
            hidden,
            position_ids=positions,
            document_ids_BL=documents,
            labels=labels,
            mtp_ids_BLK=ids_BLK,
            mtp_labels_BLK=labels_BLK,
        )
    expected = []
    for ids, each in zip(input_ids.split(lengths, dim=1), labels.split(lengths, dim=1), strict=True):
        own_ids, own_labels = mtp_targets(ids, each, num_mtp_layers=2)
        expected.append(whole(ids, labels=each, mtp_ids_BLK=own_ids, mtp_labels_BLK=own_labels))
    torch.testing.assert_close(hidden, torch.cat(expected, dim=1), rtol=1e-9, atol=1e-9)
    assert names == whole.state_dict().keys()
    layers = QWEN_MTP if params is QWEN else DEEPSEEK_MTP
    if params is DEEPSEEK:
        mapper = parallel(sparse_from_hugging_face(params), mtp_from_hugging_face(params, layers, num_mtp_layers=2))
        assert set(mapper.outputs) == names - {"mtp_embedding.weight"}
        assert "model.layers.3.eh_proj.weight" in mapper.inputs
    else:
        mapper = mtp_from_hugging_face(params, layers)
        assert {"mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.norm.weight"} < set(mapper.inputs)


def test_router_losses_of_the_mtp_layer_are_added() -> None:
    params = replace(DEEPSEEK, router_losses=RouterLosses(z=0.1))
    model = DecoderWithMtp(params, mtp_loss_weight=0.5).double()
    input_ids, labels = torch.randint(0, 19, (2, 1, 9))
    ids_BLK, labels_BLK = mtp_targets(input_ids, labels)
    losses = model(input_ids, labels=labels, mtp_ids_BLK=ids_BLK, mtp_labels_BLK=labels_BLK)
    plain = DecoderWithMtp(DEEPSEEK, mtp_loss_weight=0.5).double()
    plain.load_state_dict(model.state_dict())
    without = plain(input_ids, labels=labels, mtp_ids_BLK=ids_BLK, mtp_labels_BLK=labels_BLK)
    backbone = DecoderForCausalLM(params).double()
    backbone.load_state_dict({name: each for name, each in model.state_dict().items() if not name.startswith("mtp")})
    only_main = backbone.backbone(input_ids)[1]
    added = losses - without - only_main
    assert (added[:, :-1] > 0).all()
    assert added[0, -1].abs() <= 1e-12


def test_the_embedding_scale_is_rounded_to_the_dtype_of_the_embeddings() -> None:
    sizes = {
        name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size")
    }
    params = Gemma3Params(**sizes, num_kv_heads=1, head_dim=8)
    model = DecoderWithMtp(params).bfloat16()
    received: list[Tensor] = []
    model.mtp[0].register_forward_pre_hook(lambda module, args: received.append(args[0]))
    input_ids, labels = torch.randint(0, 19, (2, 1, 9))
    ids_BLK, labels_BLK = mtp_targets(input_ids, labels)
    model(input_ids, labels=labels, mtp_ids_BLK=ids_BLK, mtp_labels_BLK=labels_BLK)
    assert model.mtp_embedding is not None
    scale = torch.tensor(math.sqrt(12)).bfloat16()
    assert torch.equal(received[0], model.mtp_embedding(ids_BLK[..., 0]) * scale)


def test_missing_or_wrong_arguments_are_refused() -> None:
    model = DecoderWithMtp(DEEPSEEK)
    input_ids, labels = torch.randint(0, 19, (2, 1, 9))
    ids_BLK, labels_BLK = mtp_targets(input_ids, labels, num_mtp_layers=2)
    with pytest.raises(UserError, match=r"got mtp_ids_BLK of shape None; expected \(1, 9, 1\): use mtp_targets"):
        model(input_ids, labels=labels)
    with pytest.raises(UserError, match=r"got mtp_ids_BLK of shape \(1, 9, 2\); expected \(1, 9, 1\)"):
        model(input_ids, labels=labels, mtp_ids_BLK=ids_BLK, mtp_labels_BLK=labels_BLK)
    main = DecoderForCausalLM(DEEPSEEK)
    main.load_state_dict({name: each for name, each in model.state_dict().items() if not name.startswith("mtp")})
    torch.testing.assert_close(model.eval()(input_ids, labels=labels), main.eval()(input_ids, labels=labels))
    with pytest.raises(UserError, match=r"num_mtp_layers = 0, mtp_loss_weight = 0\.3; expected a number of layers"):
        DecoderWithMtp(DEEPSEEK, num_mtp_layers=0)
    joint = RouterLosses(balance=0.1, definition="transformers")
    with pytest.raises(UserError, match="router losses over all layers, which MTP does not support"):
        DecoderWithMtp(replace(DEEPSEEK, router_losses=joint))
