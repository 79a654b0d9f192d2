"""Exports keep the files of the initial weights: a checkpoint is trained, exported, and generates the same."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from d9d_dist import StageInfo
from d9d_loop import Loss, ModelProvider, Task, Trainer, TrainerConfig, validate_config
from d9d_modules import QWEN3, Qwen3ForCausalLM, Qwen3Params, decoder_from_hugging_face
from d9d_pipeline import Inputs
from d9d_state import JsonValue, StateMapper

VOCAB = 24
MAX_NEW_TOKENS = 40
UNKNOWN = "w0"
PROMPT = torch.tensor([[3, 5, 7]])


class _Decoder(ModelProvider):
    def __init__(self, params: Qwen3Params) -> None:
        self.params = params

    def build(self, stage: StageInfo) -> nn.Module:
        return Qwen3ForCausalLM(self.params, stage)

    def state_mapper(self, model: nn.Module) -> StateMapper:
        return decoder_from_hugging_face(self.params)

    def export_files(self) -> Mapping[str, JsonValue]:
        return {"config.json": QWEN3.write(self.params)}


class _NextToken(Task):
    weight_unit = "tokens"

    def inputs(self, batch: Any) -> Inputs:
        return Inputs(batch["ids"][:, :-1], labels=batch["ids"][:, 1:])

    def loss(self, outputs: Tensor, batch: Any) -> Loss:
        return Loss(outputs.sum(), weight=outputs.numel())


def _generate(model: Any) -> list[int]:
    return model.generate(PROMPT, max_new_tokens=MAX_NEW_TOKENS)[0].tolist()


def _save_original(folder: Path) -> list[int]:
    """Save a model with a tokenizer and a generation config that stops early; return its generated tokens."""
    import transformers

    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, initializer_range=0.5, bos_token_id=1, **sizes
    )
    torch.manual_seed(0)  # other draws repeat a few tokens for ever, so that no token stops early
    model: Any = transformers.Qwen3ForCausalLM(config)
    generation = transformers.GenerationConfig(do_sample=False, bos_token_id=1, pad_token_id=0)
    model.generation_config = generation
    written = _generate(model)
    assert len(written) == PROMPT.numel() + MAX_NEW_TOKENS
    stop = next(token for token in written[8:] if token not in written[3:8])
    generation.eos_token_id = config.eos_token_id = [stop, VOCAB - 1]
    config.pad_token_id = 0
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, eos_token=f"w{stop}", chat_template="{{ messages[0].content }}"
    ).save_pretrained(folder)
    return _generate(model)


def _trainer(folder: Path, params: Qwen3Params, **changes: Any) -> Trainer:
    config = {
        "steps": 1,
        "batch": {"global_size": 2},
        "run": {"folder": folder, "name": "run"},
        "logging": {"progress": False},
        "resilience": {"health": {"enabled": False}},
        "optimizer": {"learning_rate": 1e-30, "weight_decay": 0.0},
        **changes,
    }
    data = [{"ids": torch.arange(first, first + 9) % VOCAB} for first in range(4)]
    return Trainer(validate_config(TrainerConfig, config), model=_Decoder(params), data=data, task=_NextToken())


@pytest.fixture(name="original")
def _original(tmp_path: Path) -> tuple[Path, list[int], Qwen3Params]:
    written = _save_original(tmp_path / "original")
    config = json.loads((tmp_path / "original/config.json").read_text())
    return tmp_path / "original", written, QWEN3.read(config)


@pytest.mark.slow
def test_an_export_generates_like_the_original(tmp_path: Path, original: tuple[Path, list[int], Qwen3Params]) -> None:
    import transformers

    source, written, params = original
    assert len(written) < PROMPT.numel() + MAX_NEW_TOKENS
    result = _trainer(tmp_path, params, initial_weights=source).train()
    exported = result.export_dir
    assert exported is not None
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert _generate(model) == written
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(exported)
    assert tokenizer("w3 w5 w7").input_ids == PROMPT[0].tolist()
    assert tokenizer.apply_chat_template([{"content": "hello"}], tokenize=False) == "hello"

    names = {path.name for path in source.iterdir()}
    assert {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    assert {path.name for path in exported.iterdir()} == names
    for name in names - {"config.json", "model.safetensors"}:
        assert (exported / name).read_bytes() == (source / name).read_bytes(), name
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (source, exported))
    assert {"eos_token_id", "bos_token_id", "pad_token_id", "dtype"} <= theirs.keys()
    assert theirs | ours == ours | {"layer_types": ours["layer_types"]}
    assert {key for key in theirs if ours[key] != theirs[key]} <= {"layer_types"}
    assert QWEN3.read(ours) == params


def test_changed_sizes_replace_the_sizes_of_the_source(
    tmp_path: Path, original: tuple[Path, list[int], Qwen3Params]
) -> None:
    import transformers

    source, _, params = original
    provider_params = replace(params, rope_theta=500.0, max_position_embeddings=64)
    exported = _trainer(tmp_path, provider_params, initial_weights=source).train().export_dir
    assert exported is not None
    ours = json.loads((exported / "config.json").read_text())
    assert QWEN3.read(ours) == provider_params
    assert transformers.AutoConfig.from_pretrained(exported).rope_parameters["rope_theta"] == 500.0


@pytest.mark.slow
def test_a_resumed_job_does_not_need_the_source(
    tmp_path: Path, original: tuple[Path, list[int], Qwen3Params], capsys: pytest.CaptureFixture[str]
) -> None:
    source, _, params = original
    _trainer(tmp_path, params, initial_weights=source).train()
    source.rename(tmp_path / "moved")
    exported = _trainer(tmp_path, params, steps=2, initial_weights=source).train().export_dir
    assert exported is not None
    assert (exported / "tokenizer.json").read_bytes() == (tmp_path / "moved/tokenizer.json").read_bytes()
    shutil.rmtree(exported)
    _trainer(tmp_path, params, steps=3, initial_weights=source).train()
    assert {path.name for path in exported.iterdir()} == {"config.json", "model.safetensors"}
    assert "no longer exist: their tokenizer and other files are not exported" in "".join(capsys.readouterr())
