import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from d9d_dist import MeshConfig, UserError
from d9d_dist.testing import run_ranks
from d9d_state import _carried_files, save_model_state

CONFIG = {
    "model_type": "tiny",
    "hidden": 2,
    "eos_token_id": [7, 9],
    "dtype": "float32",
    "limit": float("inf"),
    "auto_map": {"AutoModel": "a.B"},
}
CARRIED = {
    "LICENSE": b"do as you like\n",
    "chat_template.jinja": b"{{ messages }}",
    "generation_config.json": b'{"eos_token_id": 7,  "temperature": 0.6}',
    "merges.txt": "#version\nĠ t\r\n".encode(),
    "preprocessor_config.json": b"{}",
    "special_tokens_map.json": b"{ }",
    "tokenizer.json": b'{"a": 1}',
    "tokenizer.model": bytes(range(256)),
    "vocab.json": b"{}\n\n",
}
LEFT = {
    ".gitattributes": b"",
    "adapter_config.json": b"{}",
    "model.safetensors": b"weights",
    "model.safetensors.index.json": b"{}",
    "modeling_tiny.py": b"raise SystemExit",
    "optimizer.pt": b"pickle",
    "pytorch_model.bin": b"pickle",
    "pytorch_model.bin.index.json": b"{}",
}


def _source(folder: Path, config: Any = CONFIG) -> Path:
    folder.mkdir(parents=True)
    for name, content in {**CARRIED, **LEFT}.items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "original").mkdir()
    (folder / "directory.json").mkdir()
    return folder


def _exported(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_small_files_are_copied_to_the_export(tmp_path: Path) -> None:
    source = _source(tmp_path / "source")
    save_model_state(nn.Linear(2, 3), tmp_path / "export", source=source)
    exported = _exported(tmp_path / "export")
    assert exported.pop("model.safetensors") != LEFT["model.safetensors"]
    assert exported.pop("config.json") == (source / "config.json").read_bytes()
    assert exported == CARRIED
    # An export replaces an earlier one, and can itself be the source.
    save_model_state(nn.Linear(2, 3), tmp_path / "export", source=tmp_path / "export")
    assert exported.items() <= _exported(tmp_path / "export").items()


def test_cache_symlinks_are_followed(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "blob").write_bytes(b"{}")
    (tmp_path / "source/tokenizer.json").symlink_to(tmp_path / "blob")
    save_model_state(nn.Linear(2, 3), tmp_path / "export", source=tmp_path / "source")
    assert (tmp_path / "export/tokenizer.json").read_bytes() == b"{}"
    assert not (tmp_path / "export/tokenizer.json").is_symlink()


def test_extra_files_and_their_entries_override_the_source(tmp_path: Path) -> None:
    source = _source(tmp_path / "source")
    own: dict[str, Any] = {"config.json": {"model_type": "tiny", "hidden": 3}, "vocab.json": {"new": 1}}
    save_model_state(nn.Linear(2, 3).to(torch.bfloat16), tmp_path / "export", extra_files=own, source=source)
    kept = {"eos_token_id": [7, 9], "limit": float("inf"), "dtype": "bfloat16", "hidden": 3, "model_type": "tiny"}
    assert json.loads((tmp_path / "export/config.json").read_text()) == kept
    assert json.loads((tmp_path / "export/vocab.json").read_text()) == {"new": 1}


def test_config_of_another_model_type_is_not_merged(tmp_path: Path) -> None:
    own: dict[str, Any] = {"config.json": {"model_type": "other"}}
    save_model_state(nn.Linear(2, 3), tmp_path / "export", extra_files=own, source=_source(tmp_path / "source"))
    assert json.loads((tmp_path / "export/config.json").read_text()) == {"model_type": "other"}


def test_large_files_are_logged_and_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_carried_files, "MAX_CARRIED_BYTES", 300)
    source = _source(tmp_path / "source")
    (source / "corpus.txt").write_bytes(bytes(301))
    with caplog.at_level(logging.WARNING):
        save_model_state(nn.Linear(2, 3), tmp_path / "export", source=source)
    assert "corpus.txt is larger than 300 bytes; it is not copied to the export" in caplog.text
    assert not (tmp_path / "export/corpus.txt").exists()
    assert (tmp_path / "export/tokenizer.model").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [("{", r"source/config\.json: .*Expected the config"), ("[]", r"contains a list; expected a JSON")],
)
def test_a_source_that_cannot_be_read_is_refused(tmp_path: Path, config: str, message: str) -> None:
    source = _source(tmp_path / "source")
    (source / "config.json").write_text(config)
    with pytest.raises(UserError, match=message):
        save_model_state(nn.Linear(2, 3), tmp_path / "export", source=source)
    with pytest.raises(
        UserError, match=r"the files beside the source weights cannot be read: .*absent.* Restore .*absent, or"
    ):
        save_model_state(nn.Linear(2, 3), tmp_path / "export", source=tmp_path / "absent")
    assert not (tmp_path / "export").exists()


def _save_on_two_ranks(folder: str, source: str) -> str:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        try:
            save_model_state(nn.Linear(2, 3), folder, ctx=ctx, source=source if ctx.is_main_process else "elsewhere")
        except UserError as error:
            return str(error)
    return "saved"


def test_only_the_main_process_reads_the_source(tmp_path: Path) -> None:
    source = _source(tmp_path / "source")
    assert run_ranks(_save_on_two_ranks, str(tmp_path / "export"), str(source)) == ["saved"] * 2
    assert CARRIED.items() <= _exported(tmp_path / "export").items()
    refused = run_ranks(_save_on_two_ranks, str(tmp_path / "other"), str(tmp_path / "absent"))
    assert refused[0] == refused[1]
    assert "cannot be read" in refused[0]
