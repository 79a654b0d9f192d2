"""Each entry of `adapter_config.json` with changed values: d9d loads the same model as `peft`, or refuses the entry."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import UserError
from d9d_dist.testing import assert_rounds_like
from d9d_peft import FullTune, LoRA, Stack, inject, load_adapters

METHOD = Stack(LoRA(r"self_attn\.(q|v)_proj|down_proj", rank=4, alpha=6), FullTune(r"model\.norm$"))

# For each field of peft's LoraConfig: changed values that are loaded, then changed values that are refused.
EDITS: dict[str, tuple[list[Any], list[Any]]] = {
    "task_type": (["CAUSAL_LM", "FEATURE_EXTRACTION"], []),
    "peft_type": ([], ["LOHA", "ADALORA", None, 3]),
    "auto_mapping": ([{"base_model_class": "Other", "parent_library": "other"}], []),
    "peft_version": (["0.1.0"], []),
    "base_model_name_or_path": (["other"], []),
    "revision": (["other"], []),
    "inference_mode": ([False], []),
    "r": ([], [8, 2, 0, 4.0, "4", True]),
    "target_modules": (
        [
            ["q_proj", "v_proj", "down_proj", "k_proj"],
            r".*\.(q_proj|v_proj|down_proj)",
            r".*self_attn\.[qv]_proj|.*down_proj",
            ["self_attn.q_proj", "self_attn.v_proj", "model.layers.0.mlp.down_proj", "layers.1.mlp.down_proj"],
        ],
        [["q_proj"], ["proj"], "q_proj", r".*q_proj", None, [], "(", 3],
    ),
    "exclude_modules": (
        [["nothing"], [], "layers", None],
        [["q_proj"], r"model\.layers\.1\..*", ["1.mlp.down_proj"], "("],
    ),
    "lora_alpha": ([6.0], [12, 0, "6", None]),
    "lora_dropout": ([0.5], []),
    "fan_in_fan_out": ([True], []),
    "bias": ([], ["all", "lora_only"]),
    "use_rslora": ([], [True, "yes"]),
    "modules_to_save": (
        [["model.norm", "nothing"]],
        [None, [], ["lm_head"], ["model.norm", "lm_head"], ["model.norm", "down_proj"], "model.norm"],
    ),
    "init_lora_weights": (
        [False, "gaussian", "eva", "orthogonal"],
        ["olora", "pissa", "pissa_niter_4", "corda", "loftq", "mica", "lora_ga", "other", None],
    ),
    "layers_to_transform": ([[0, 1], [], None], [0, [1], [2]]),
    "layers_pattern": ([None, []], ["layers"]),
    "rank_pattern": ([{"nothing": 2}, {"k_proj": 2}, {"q_proj": 4}], [{"q_proj": 2}, {".*": 8}, ["q_proj"], {"(": 4}]),
    "alpha_pattern": (
        [{"nothing": 2}, {"q_proj": 6}, {"proj": 3}],
        [{"q_proj": 12}, {"q_proj": "6"}, {r"layers\.1\..*": 3}, {"model.layers.0.mlp.down_proj": 1}],
    ),
    "megatron_config": ([], [{"tensor_model_parallel_size": 1}]),
    "megatron_core": (["other"], []),
    "trainable_token_indices": ([], [[1], {"embed_tokens": [1]}]),
    "loftq_config": ([{"loftq_bits": 4}], []),
    "eva_config": ([{"rho": 3.0}], []),
    "corda_config": ([{"corda_method": "kpm"}], []),
    "lora_ga_config": ([{"direction": "ArBr"}], []),
    "use_dora": ([], [True]),
    "velora_config": ([], [{}]),
    "alora_invocation_tokens": ([], [[1]]),
    "use_qalora": ([], [True]),
    "qalora_group_size": ([8], []),
    "monteclora_config": ([], [{}]),
    "layer_replication": ([], [[[0, 2], [1, 2]]]),
    "runtime_config": ([{"ephemeral_gpu_offload": True}], []),
    "lora_bias": ([], [True]),
    "target_parameters": ([None, []], [["q_norm.weight"], ["experts.down_proj"], "q_proj.weight"]),
    "use_bdlora": ([], [{"target_modules_bd_a": ["q_proj"]}]),
    "arrow_config": ([], [{}]),
    "kasa_config": ([], [{}]),
    "ensure_weight_tying": ([], [True]),
}
# Entries that peft does not have, and combinations of entries.
OTHERS: list[tuple[dict[str, Any], str | None]] = [
    ({"new_option": None, "new_switch": False}, None),
    ({"new_option": 3}, "new_option"),
    ({"layers_to_transform": [0, 1], "layers_pattern": "layers"}, None),
    ({"layers_to_transform": [0, 1], "layers_pattern": ["h", "layers"]}, None),
    ({"layers_to_transform": [0, 1], "layers_pattern": "h"}, "layers_to_transform"),
    ({"layers_to_transform": [0, 1], "target_modules": ".*_proj"}, "layers_to_transform"),
    ({"use_rslora": True, "lora_alpha": 3}, None),
    ({"r": 8, "rank_pattern": {".*": 4}}, None),
    ({"r": 8, "lora_alpha": 12}, "r"),
    ({"r": 8, "rank_pattern": {".*": 4}, "alpha_pattern": {"q_proj": 5}}, "alpha_pattern"),
    ({"target_modules": ["q_proj", "v_proj"], "target_parameters": ["down_proj.weight"]}, None),
    ({"target_modules": ["q_proj", "v_proj"], "target_parameters": ["1.mlp.down_proj.weight"]}, "target_modules"),
]


def qwen() -> Any:
    """Return a small Qwen3 with random weights, equal on every call, in float32 as PiSSA requires."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).float()


def logits(model: nn.Module) -> Tensor:
    result: Tensor = model.eval()(torch.arange(12).view(2, 6)).logits
    return result


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an adapter that `peft` saved."""
    import peft

    folder = tmp_path_factory.mktemp("saved")
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], modules_to_save=["model.norm"]
    )
    model = peft.get_peft_model(qwen(), config)
    assert isinstance(model, peft.PeftModel)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, mean=0.2, std=0.3)
    model.save_pretrained(str(folder))
    return folder


def edited(saved: Path, folder: Path, entries: dict[str, Any]) -> Path:
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return folder


def loaded(folder: Path) -> nn.Module:
    model = qwen()
    inject(METHOD, model)
    load_adapters(model, folder)
    return model


def check_equal(folder: Path) -> None:
    import peft

    check_same_logits(loaded(folder), peft.PeftModel.from_pretrained(qwen(), folder))


def check_same_logits(model: nn.Module, reference: nn.Module) -> None:
    """Check that both compute the same: then the reference rounds as the model does."""
    ours = logits(model)
    assert_rounds_like([logits(reference)], [logits(model.double())], peer=[ours])


def test_all_entries_of_peft_are_tested() -> None:
    import peft

    assert EDITS.keys() == {field.name for field in dataclasses.fields(peft.LoraConfig)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (values, _) in EDITS.items() for value in values])
def test_edited_entry_gives_the_output_of_peft(saved: Path, tmp_path: Path, name: str, value: Any) -> None:
    check_equal(edited(saved, tmp_path, {name: value}))


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (_, values) in EDITS.items() for value in values])
def test_the_error_names_an_unsupported_entry(saved: Path, tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"adapter_config\.json.*\b{name}\b"):
        loaded(edited(saved, tmp_path, {name: value}))


@pytest.mark.parametrize(("entries", "refused"), OTHERS)
def test_combined_entries_give_the_output_of_peft(
    saved: Path, tmp_path: Path, entries: dict[str, Any], refused: str | None
) -> None:
    folder = edited(saved, tmp_path, entries)
    if refused is None:
        check_equal(folder)
    else:
        with pytest.raises(UserError, match=rf"adapter_config\.json.*\b{refused}\b"):
            loaded(folder)


@pytest.mark.parametrize("name", EDITS)
def test_missing_entry_is_accepted(saved: Path, tmp_path: Path, name: str) -> None:
    import peft

    folder = edited(saved, tmp_path, {})
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config.pop(name, None)
    path.write_text(json.dumps(config))
    try:
        model = loaded(folder)
    except UserError as error:
        assert name in str(error)  # noqa: PT017  (loading it is right too)
        return
    reference = peft.PeftModel.from_pretrained(qwen(), folder)
    check_same_logits(model, reference)
