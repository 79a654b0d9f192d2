import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist import MeshConfig, StageInfo, UserError, materialize, parallelize_tensor, sync_gradients
from d9d_dist.testing import KeepFloat64, assert_rounds_like, assert_trees_close, full_gradients, run_ranks
from d9d_modules import (
    QWEN3,
    ClassificationHead,
    DecoderForCausalLM,
    DecoderForClassification,
    DecoderForEmbedding,
    DecoderModel,
    DecoderWithHeads,
    EmbeddingHead,
    GroupedQueryParams,
    Qwen3Params,
    decoder_backbone_from_hugging_face,
    decoder_lm_head,
    decoder_tensor_plan,
    pool,
)
from d9d_modules.decoder import HiddenAndLosses
from d9d_modules.models.decoder_params import AuxiliaryLosses
from d9d_state import parallel, rename

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
HEADS = {
    "text": decoder_lm_head,
    "topic": lambda backbone: ClassificationHead(backbone.params.hidden_size, 3, init_std=0.3),
    "vector": lambda backbone: EmbeddingHead(backbone.params.hidden_size, 5, pooling="mean", init_std=0.3),
}
MASK = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]])


def _ids() -> Tensor:
    return torch.randint(1, 16, (2, 8))


def test_each_head_has_its_own_loss() -> None:
    model = DecoderWithHeads(PARAMS, heads=HEADS).double()
    assert model.backbone.embedding is not None
    assert model.get_parameter("heads.text.weight") is model.backbone.embedding.weight
    input_ids, next_ids, topics = _ids(), _ids(), torch.tensor([2, 0])
    outputs = model(input_ids, mask_BL=MASK)
    assert {name: tuple(each.shape) for name, each in outputs.items()} == {
        "text": (2, 8, 16),
        "topic": (2, 3),
        "vector": (2, 5),
    }
    losses = model(input_ids, mask_BL=MASK, labels={"text": next_ids, "topic": topics})
    expected = F.cross_entropy(outputs["text"].flatten(0, 1), next_ids.flatten(), reduction="none").view(2, 8)
    torch.testing.assert_close(losses["text"], expected)
    torch.testing.assert_close(losses["topic"], F.cross_entropy(outputs["topic"], topics, reduction="none"))
    torch.testing.assert_close(losses["vector"], outputs["vector"])


BUILDERS: dict[str, Callable[[StageInfo], Any]] = {
    "classifier": lambda stage: DecoderForClassification(PARAMS, stage, num_classes=3),
    "embedder": lambda stage: DecoderForEmbedding(PARAMS, stage),
    "heads": lambda stage: DecoderWithHeads(PARAMS, stage, heads=HEADS),
}


@pytest.mark.parametrize("name", list(BUILDERS))
def test_chained_stages_equal_the_whole_model(name: str) -> None:
    build = BUILDERS[name]
    with torch.device("meta"):
        whole = build(StageInfo())
    materialize(whole, device=torch.device("cpu"), seed=1)
    state = whole.state_dict()
    stages = [build(StageInfo(index, 2)) for index in range(2)]
    input_ids = _ids()
    hidden = input_ids
    for stage in stages:
        stage.load_state_dict({key: state[key] for key in stage.state_dict()})
        hidden = stage(hidden, mask_BL=MASK)
    torch.testing.assert_close(hidden, whole(input_ids, mask_BL=MASK))
    # Only a language-model head is tied to the embedding.
    assert ("backbone.embedding.weight" in dict(stages[1].named_parameters())) is (name == "heads")
    assert list(stages[1].layers) == ["1"]


def test_heads_without_a_language_model_tie_nothing() -> None:
    last = DecoderWithHeads(PARAMS, StageInfo(1, 2), heads={"topic": HEADS["topic"]})
    assert last.backbone.embedding is None


def test_invalid_input_raises() -> None:
    model = DecoderWithHeads(PARAMS, heads=HEADS)
    input_ids = _ids()
    with pytest.raises(UserError, match=r"got labels for unknown head 'topics'; expected one of text, topic, vector"):
        model(input_ids, labels={"topics": torch.tensor([0, 1])})
    with pytest.raises(UserError, match=r"got labels for 'vector', an EmbeddingHead, which has no loss; expected none"):
        model(input_ids, labels={"vector": torch.tensor([0, 1])})
    with pytest.raises(UserError, match=r"class labels have shape \(2, 8\); expected \(2,\)"):
        model(input_ids, labels={"topic": input_ids})
    with pytest.raises(UserError, match=r"got class labels from 3 to 3; expected .* within 0 \.\.\. 2"):
        model(input_ids, labels={"topic": torch.tensor([3, 1])})
    with pytest.raises(UserError, match=r"got head names none; expected at least one"):
        DecoderWithHeads(PARAMS, heads={})
    with pytest.raises(UserError, match=r"got head names 'a\.b'; expected at least one, each a Python"):
        DecoderWithHeads(PARAMS, heads={"a.b": decoder_lm_head})
    with pytest.raises(UserError, match=r"got head names 'forward'; expected at least one, each a Python"):
        DecoderWithHeads(PARAMS, heads={"forward": decoder_lm_head})
    other: Any = {"other": lambda _: nn.Identity()}
    with pytest.raises(UserError, match=r"the head 'other' is a Identity; expected a LanguageModelHead"):
        DecoderWithHeads(PARAMS, heads=other)(input_ids)


def _train(params: Qwen3Params) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with MeshConfig(tensor_parallel=-1).build() as ctx:
        with torch.device("meta"):
            model = DecoderWithHeads(params, heads=HEADS).double()
        parallelize_tensor(model, ctx.mesh_for("dense")["tp"], decoder_tensor_plan(model))
        materialize(model, device=ctx.device, seed=0)
        input_ids, next_ids = torch.randint(0, 16, (2, 2, 8), generator=torch.Generator().manual_seed(0))
        document_ids_BL = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1]).expand(2, 8)
        labels = {"text": next_ids, "topic": torch.tensor([2, 0])}
        losses = model(input_ids, mask_BL=MASK, document_ids_BL=document_ids_BL, labels=labels)
        (losses["text"].sum() + losses["topic"].sum() + losses["vector"][:, 0].sum()).backward()
        sync_gradients(model)
        return {name: loss.detach() for name, loss in losses.items()}, full_gradients(model)


def test_tensor_parallel_heads_equal_one_process() -> None:
    params = replace(PARAMS, tie_word_embeddings=False)
    ((losses, gradients),) = run_ranks(_train, params, world_size=1)
    for found_losses, found in run_ranks(_train, params):
        assert_trees_close(found_losses, losses, rtol=1e-12)
        assert_trees_close(found, gradients, rtol=1e-11)


def test_every_model_has_a_decoder_backbone() -> None:
    assert all(isinstance(build(StageInfo()).backbone, DecoderModel) for build in BUILDERS.values())


def test_a_classifier_equals_transformers() -> None:
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    config = Qwen3Config.from_dict({**QWEN3.write(PARAMS), "num_labels": 3, "pad_token_id": 0})
    reference: Any = Qwen3ForSequenceClassification(config)
    mapper = parallel(decoder_backbone_from_hugging_face(PARAMS), rename("score.weight", "head.score.weight"))
    model = DecoderForClassification(PARAMS, num_classes=3)
    state = reference.state_dict()
    model.load_state_dict(mapper.apply_all(state))
    input_ids = _ids() * MASK
    labels = torch.tensor([2, 0])

    def results_of(reference: Any) -> dict[str, Any]:
        logits = reference(input_ids, attention_mask=MASK).logits
        losses = F.cross_entropy(logits, labels, reduction="none")
        losses.sum().backward()
        named = {name: parameter.grad for name, parameter in reference.named_parameters()}
        return {"logits": logits.detach(), "losses": losses.detach(), "gradients": mapper.apply_all(named)}

    peer = results_of(reference)
    with KeepFloat64():
        exact = results_of(copy.deepcopy(reference).double())
    logits, losses = model(input_ids, mask_BL=MASK), model(input_ids, mask_BL=MASK, labels=labels)
    losses.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    got = {"logits": logits.detach(), "losses": losses.detach(), "gradients": gradients}
    assert_rounds_like(got, exact, peer=peer)
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


class _WithLosses(nn.Module):
    """Feed-forward block that returns the mean square of its input as the loss of each token."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x_BLD: Tensor, **_: Any) -> HiddenAndLosses:
        return HiddenAndLosses(self.inner(x_BLD), x_BLD.square().mean(dim=-1))


@dataclass(frozen=True, kw_only=True)
class _ParamsWithLosses(GroupedQueryParams):
    @property
    def auxiliary_losses(self) -> AuxiliaryLosses:
        return AuxiliaryLosses("mean squares")

    def feed_forward(self, index: int) -> nn.Module:
        return _WithLosses(super().feed_forward(index))


def test_auxiliary_losses_of_all_layers_are_added_where_there_is_a_label() -> None:
    sizes = {name: getattr(PARAMS, name) for name in ("vocab_size", "hidden_size", "num_heads", "num_kv_heads")}
    params = _ParamsWithLosses(**sizes, num_layers=2, head_dim=6, intermediate_size=20, initializer_range=0.3)
    model = DecoderForCausalLM(params).double()
    inputs: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, _WithLosses):
            module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    ids, labels = torch.randint(0, 16, (2, 2, 5))
    labels[0, 3] = -100
    assert model.lm_head is not None
    hidden_BLD, summed_BL = model.backbone(ids)
    expected_BL = sum(x.square().mean(dim=-1) for x in inputs)
    torch.testing.assert_close(summed_BL, expected_BL, rtol=1e-12, atol=0)
    cross_entropy_BL = F.cross_entropy(model.lm_head(hidden_BLD).transpose(1, 2), labels, reduction="none")
    expected_BL = cross_entropy_BL + summed_BL * (labels != -100)
    torch.testing.assert_close(model(ids, labels=labels), expected_BL, rtol=1e-12, atol=1e-14)
