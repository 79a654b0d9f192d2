import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from d9d_dist.testing import assert_rounds_like
from d9d_modules import (
    DecoderForClassification,
    DecoderForEmbedding,
    Qwen3Params,
    decoder_backbone_from_hugging_face,
    decoder_classifier_from_hugging_face,
    pool,
    qwen3_hugging_face_config,
)

PARAMS = Qwen3Params(
    vocab_size=16,
    hidden_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=20,
    tie_word_embeddings=True,
    initializer_range=0.3,
)
MASK = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]])


def _ids() -> Tensor:
    return torch.randint(1, 16, (2, 8))


def test_a_classifier_is_that_of_transformers() -> None:
    config = Qwen3Config.from_dict({**qwen3_hugging_face_config(PARAMS), "num_labels": 3, "pad_token_id": 0})
    reference: Any = Qwen3ForSequenceClassification(config)
    mapper = decoder_classifier_from_hugging_face(PARAMS)
    model = DecoderForClassification(PARAMS, num_classes=3)
    state = reference.state_dict()
    mapped: dict[str, Tensor] = {}
    for group in mapper.groups:
        mapped |= mapper.apply({name: state[name] for name in group.inputs})
    model.load_state_dict(mapped)
    input_ids = _ids() * MASK
    labels = torch.tensor([2, 0])
    logits = reference(input_ids, attention_mask=MASK).logits
    losses = F.cross_entropy(logits, labels, reduction="none")
    losses.sum().backward()
    theirs = [logits, losses, reference.model.embed_tokens.weight.grad, reference.score.weight.grad]

    def results(ours: nn.Module) -> list[Any]:
        logits, losses = ours(input_ids, mask_BL=MASK), ours(input_ids, mask_BL=MASK, labels=labels)
        losses.sum().backward()
        names = ("backbone.embedding.weight", "head.score.weight")
        return [logits, losses, *(ours.get_parameter(name).grad for name in names)]

    # The peer rounds as this model does, if both compute the same.
    assert_rounds_like(theirs, results(copy.deepcopy(model).double()), peer=results(model))
    assert model(input_ids, mask_BL=MASK, labels=torch.tensor([-100, 0]))[0] == 0


def test_an_embedding_is_a_pooled_vector() -> None:
    model = DecoderForEmbedding(PARAMS, pooling="mean").double()
    input_ids = _ids()
    pooled = pool(model.backbone(input_ids), MASK, pooling="mean")
    torch.testing.assert_close(model(input_ids, mask_BL=MASK), F.normalize(pooled, dim=-1))
    plain = DecoderForEmbedding(PARAMS, embedding_size=5, normalize=False)
    assert plain(input_ids).shape == (2, 5)
    names = set(decoder_backbone_from_hugging_face(PARAMS, prefix="").inputs)
    assert {"embed_tokens.weight", "layers.1.self_attn.q_norm.weight", "norm.weight"} <= names
