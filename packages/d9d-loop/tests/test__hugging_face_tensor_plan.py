from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from d9d_dist import (
    ColumnParallel,
    MeshConfig,
    Replicated,
    RowParallel,
    SequenceParallel,
    TensorStyle,
    UserError,
    parallelize_tensor,
)
from d9d_dist.testing import RankError, assert_trees_close, full_gradients, run_ranks
from d9d_loop import _hugging_face_tensor_plan
from d9d_loop._hugging_face_tensor_plan import STYLES, tensor_plan

_SIZES = {
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}


def _model(kind: str, **changes: Any) -> Any:
    import transformers

    model_class = getattr(transformers, kind)
    with torch.device("meta"):
        return model_class(model_class.config_class(**{**_SIZES, **changes}))


def test_attention_heads_stay_whole_in_split_projections() -> None:
    plan = tensor_plan(_model("Qwen3ForCausalLM"), 2).styles
    attention = {name.rpartition(".")[2]: style for name, style in plan.items() if "self_attn" in name}
    assert attention == {
        "q_proj": ColumnParallel(head_dim=6),
        "k_proj": ColumnParallel(head_dim=6),
        "v_proj": ColumnParallel(head_dim=6),
        "q_norm": SequenceParallel(),
        "k_norm": SequenceParallel(),
        "o_proj": RowParallel(),
    }
    fused = tensor_plan(_model("GPTNeoXForCausalLM"), 2).styles["gpt_neox.layers.0.attention.query_key_value"]
    assert fused == ColumnParallel(head_dim=6)  # 8 / 4 features of a query, a key and a value
    assert plan["model.layers.0.mlp.up_proj"] == ColumnParallel()


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_does_not_divide_stays_replicated(tied: bool) -> None:
    names = {"lm_head", "model.embed_tokens"}
    assert names <= tensor_plan(_model("LlamaForCausalLM", tie_word_embeddings=tied), 2).styles.keys()
    plan = tensor_plan(_model("LlamaForCausalLM", tie_word_embeddings=tied, vocab_size=13), 2).styles
    assert not names & plan.keys()
    assert "model.layers.0.mlp.up_proj" in plan


def test_a_head_that_is_tied_to_a_replicated_module_stays_replicated() -> None:
    model = _model("LlamaForCausalLM", tie_word_embeddings=True)
    model.tp_plan.pop("model.embed_tokens")
    assert "lm_head" not in tensor_plan(model, 2).styles


def test_blocks_with_unknown_styles_are_replicated() -> None:
    model = _model("LlamaForCausalLM")
    model.tp_plan["model.layers.*.mlp.up_proj"] = "diagonal"
    model.tp_plan["model.layers.*.mlp.down_proj.weight"] = "packed_rowwise"
    styles, whole = tensor_plan(model, 2)
    assert whole == {
        "model.layers.*.mlp": [
            "model.layers.*.mlp.up_proj (Linear, diagonal)",
            "model.layers.*.mlp.down_proj.weight (packed_rowwise)",
            "model.layers.*.mlp.down_proj (Linear, rowwise)",
        ]
    }
    assert not [name for name in styles if "mlp" in name]
    assert styles["model.layers.0.self_attn.o_proj"] == RowParallel()
    model.tp_plan["model.layers.*.self_attn.v_proj"] = "diagonal"
    styles, whole = tensor_plan(model, 2)
    assert styles.keys() == {"model.embed_tokens", "lm_head"}
    assert whole.keys() == {"model.layers.*.mlp", "model.layers.*.self_attn"}


def test_layers_outside_the_plan_are_replicated() -> None:
    styles, whole = tensor_plan(_model("DiffLlamaForCausalLM"), 2)
    assert styles.keys() == {"lm_head"}
    assert whole == {"the layers of DiffLlamaForCausalLM": ["a plan that names only lm_head"]}


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(UserError, match="BertForMaskedLM has no tensor-parallel plan"):
        tensor_plan(_model("BertForMaskedLM", hidden_size=8, num_attention_heads=2), 2)


def test_a_model_that_computes_with_weights_outside_of_forwards_is_an_error() -> None:
    model = _model("Qwen3ForCausalLM")
    model.model.layers[0].altup = type("Gemma3nTextAltUp", (nn.Module,), {})()
    with pytest.raises(UserError, match="Qwen3ForCausalLM has Gemma3nTextAltUp, which computes with weights outside"):
        tensor_plan(model, 2)


def _embedding(padding_idx: int) -> nn.ModuleDict:
    import transformers

    torch.manual_seed(3)
    model = transformers.Gemma3ForCausalLM(_model("Gemma3ForCausalLM", pad_token_id=padding_idx).config).double()
    return nn.ModuleDict({"embed_tokens": model.model.embed_tokens})


def _embed_on_ranks(ids: torch.Tensor, padding_idx: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    style = tensor_plan(_model("Gemma3ForCausalLM", pad_token_id=padding_idx), 2).styles["model.embed_tokens"]
    with MeshConfig(tensor_parallel=2).build() as ctx:
        embedding = _embedding(padding_idx)
        parallelize_tensor(embedding, ctx.mesh_for("dense")["tp"], {"embed_tokens": style})
        return _look_up(embedding, ids)


def _look_up(embedding: nn.ModuleDict, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    outputs = embedding["embed_tokens"](ids)
    outputs.square().sum().backward()
    return outputs.detach(), full_gradients(embedding)


@pytest.mark.parametrize("padding_idx", [0, 7])
def test_a_split_embedding_scales_its_rows_and_gives_padding_no_gradient(padding_idx: int) -> None:
    ids = torch.arange(12).view(3, 4)
    expected = _look_up(_embedding(padding_idx), ids)
    assert not expected[1]["embed_tokens.weight"][padding_idx].any()
    for found in run_ranks(_embed_on_ranks, ids, padding_idx, world_size=2):
        assert_trees_close(found, expected, rtol=1e-12)


def test_a_split_embedding_refuses_ids_out_of_range() -> None:
    with pytest.raises(RankError, match=r"token ids within 0 ... 11"):
        run_ranks(_embed_on_ranks, torch.tensor([[12]]), 0, world_size=2)


def test_modules_between_split_layers_have_partial_gradients_or_keep_their_block_whole() -> None:
    plan = tensor_plan(_model("ApertusForCausalLM"), 2).styles  # its plan does not name the trained activation
    assert plan["model.layers.0.mlp.act_fn"] == SequenceParallel()
    model = _model("Qwen3ForCausalLM")
    model.tp_plan.pop("model.layers.*.self_attn.q_norm")
    assert tensor_plan(model, 2).styles["model.layers.0.self_attn.q_norm"] == SequenceParallel()
    model.model.layers[0].mlp.norm = nn.LayerNorm(12)
    model.model.layers[0].mlp.scale = nn.Parameter(torch.ones(()))
    styles, whole = tensor_plan(model, 2)
    assert whole == {
        "model.layers.*.mlp": ["model.layers.*.mlp.scale (no style)", "model.layers.*.mlp.norm (LayerNorm, no style)"]
    }
    assert not [name for name in styles if "mlp" in name]


def _experts() -> nn.Module:
    import transformers

    torch.manual_seed(3)
    sizes = {"num_experts": 4, "moe_intermediate_size": 6, "num_experts_per_tok": 2}
    model = transformers.Qwen3MoeForCausalLM(_model("Qwen3MoeForCausalLM", **sizes).config).double()
    model.config._experts_implementation = "eager"
    return model.get_submodule("model.layers.0.mlp")


def _train_first_experts(block: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients when every token is routed to experts 0 and 1."""
    with torch.no_grad():
        block.get_parameter("gate.weight").copy_(torch.tensor([2.0, 1.0, -1.0, -2.0])[:, None].expand(4, 8))
    block(
        torch.rand(3, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ).square().sum().backward()
    return full_gradients(block)


def _train_split_experts() -> dict[str, torch.Tensor]:
    sizes = {"num_experts": 4, "moe_intermediate_size": 6, "num_experts_per_tok": 2}
    style = tensor_plan(_model("Qwen3MoeForCausalLM", **sizes), 2).styles["model.layers.0.mlp.experts"]
    with MeshConfig(tensor_parallel=2).build() as ctx:
        block = _experts()
        parallelize_tensor(block.get_submodule("experts"), ctx.mesh_for("dense")["tp"], {"": style})
        return _train_first_experts(block)


def test_experts_without_tokens_on_a_rank_have_gradients_of_zero() -> None:
    expected = _train_first_experts(_experts())
    for found in run_ranks(_train_split_experts, world_size=2):
        assert_trees_close(found, expected, rtol=1e-12)


_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 6, "num_experts_per_tok": 2}
_LATENT = {
    "pad_token_id": 0,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 4),
}

ROWS: list[tuple[str, str, TensorStyle | dict[str, Shard], dict[str, Any]]] = [
    (
        "Llama4ForCausalLM",
        "model.layers.0.feed_forward.experts",
        {"gate_up_proj": Shard(0), "down_proj": Shard(0)},
        {"num_local_experts": 2, "moe_layers": [0]},
    ),
    ("Qwen3MoeForCausalLM", "model.layers.0.mlp.experts", {"gate_up_proj": Shard(0), "down_proj": Shard(0)}, _EXPERTS),
    ("HYV4ForCausalLM", "model.layers.0.self_attn", {"sinks": Shard(0)}, _LATENT),
    (
        "InklingForCausalLM",
        "model.layers.0.mlp.shared_experts",
        {"gate_proj": Shard(1), "up_proj": Shard(1), "down_proj": Shard(2)},
        {"n_shared_experts": 1, "mlp_layer_types": ["sparse"]},
    ),
    ("HYV4ForCausalLM", "model.layers.0.self_attn.kv_a_proj_with_mqa", {}, _LATENT),
    ("LlamaForCausalLM", "model.layers.0.self_attn.q_proj", ColumnParallel(head_dim=6), {}),
    ("LlamaForCausalLM", "lm_head", ColumnParallel(output=Replicate()), {}),
    ("LlamaForCausalLM", "model.layers.0.self_attn.o_proj", RowParallel(), {}),
    ("InklingForCausalLM", "lm_head", {"weight": Shard(1)}, {"mlp_layer_types": ["dense"]}),
    ("LlamaForCausalLM", "model.embed_tokens", {"weight": Shard(0)}, {}),
    ("InklingForCausalLM", "model.embed_tokens", Replicated(), {"mlp_layer_types": ["dense"]}),
    ("Qwen3ForCausalLM", "model.layers.0.self_attn.q_norm", SequenceParallel(), {}),
    ("Inkling2ForCausalLM", "model.embed_tokens", Replicated(), {"mlp_layer_types": ["dense"]}),
]
"""For each row of the table: a class of models, one of its modules, and the module's style or placements."""


@pytest.mark.parametrize("row", range(len(STYLES)))
def test_each_row_of_the_table_has_a_model(row: int) -> None:
    kind, name, expected, changes = ROWS[row]
    styles = tensor_plan(_model(kind, **changes), 2).styles
    style = styles[name]
    assert (style.placements() if isinstance(expected, dict) else style) == expected
    with mock.patch.object(_hugging_face_tensor_plan, "STYLES", [*STYLES[:row], *STYLES[row + 1 :]]):
        assert tensor_plan(_model(kind, **changes), 2).styles.get(name) != style


@pytest.mark.parametrize("size", [0, 4])
def test_a_weight_that_the_model_reads_itself_is_replicated(size: int) -> None:
    text = {**_SIZES, "hidden_size_per_layer_input": size, "vocab_size_per_layer_input": 12}
    model = _model("Gemma4ForConditionalGeneration", text_config=text, vision_config=None, audio_config=None)
    assert ("model.language_model.embed_tokens" in tensor_plan(model, 2).styles) == (size == 0)


def test_a_loop_that_computes_experts_of_other_ranks_stays_whole() -> None:
    model = _model("NemotronHForCausalLM", layers_block_type=["moe"], n_routed_experts=4)
    model.config._experts_implementation = "eager"
    styles, whole = tensor_plan(model, 2)
    assert "model.layers.*.mixer.experts (NemotronHExperts, moe_tp_experts)" in whole["model.layers.*.mixer.experts"]
    assert not [name for name in styles if "experts" in name]
    model.config._experts_implementation = "grouped_mm"
    assert tensor_plan(model, 2).styles["model.layers.0.mixer.experts"].placements()
