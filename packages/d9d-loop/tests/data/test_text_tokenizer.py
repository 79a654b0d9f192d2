import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from d9d_dist import UserError
from d9d_loop.data import TextTokenizer, read_text_tokenizer, tokenize_text, train_tokenizer
from d9d_loop.data.text_tokenizer import TOKENIZER_FILES

tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers, which is optional")
transformers: Any = pytest.importorskip("transformers", reason="its tokenizers are the oracle")

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|endoftext|>"]
TEXTS = ["", " ", "to be", "Größe 漢字 x<|endoftext|>y <new> </s>", "a longer text " * 9]


def _backend() -> Any:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={each: n for n, each in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return backend


def _stored_cut(backend: Any) -> None:
    backend.enable_truncation(4)
    backend.enable_padding(length=8, pad_id=3, pad_token="!")  # noqa: S106


def _bos_and_eos(backend: Any) -> None:
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 257), ("</s>", 258)]
    )


def _added(backend: Any) -> None:
    backend.add_tokens(["<new>"])


CHANGES: dict[str, Any] = {"plain": lambda _: None, "cut": _stored_cut, "bos": _bos_and_eos, "added": _added}
SETTINGS: dict[str, dict[str, Any] | None] = {
    "no settings": None,
    "named": {"eos_token": "</s>", "pad_token": "<pad>", "bos_token": "<s>"},
    "add_bos": {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True},
    "add_eos": {"bos_token": "<s>", "eos_token": "</s>", "add_eos_token": True},
    "split": {"eos_token": "</s>", "split_special_tokens": True},
    "new": {"eos_token": "<new>", "model_max_length": 3, "truncation_side": "left"},
}


def _write(folder: Path, change: str, settings: str, **config: Any) -> Path:
    folder.mkdir()
    backend = _backend()
    CHANGES[change](backend)
    backend.save(str(folder / "tokenizer.json"))
    if (entries := SETTINGS[settings]) is not None:
        entries = {"tokenizer_class": "PreTrainedTokenizerFast", **entries, **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(entries))
    return folder


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_tokens_are_those_of_transformers(change: str, settings: str, tmp_path: Path) -> None:
    folder = _write(tmp_path / "model", change, settings)
    auto, ours = transformers.AutoTokenizer.from_pretrained(folder), read_text_tokenizer(folder)
    again = pickle.loads(pickle.dumps(ours))  # noqa: S301 - as a worker process receives it
    assert ours.identity() == read_text_tokenizer(folder / "tokenizer.json").identity() == again.identity()
    assert ours.vocab_size == max(auto.get_vocab().values()) + 1
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (auto.bos_token_id, auto.eos_token_id, auto.pad_token_id) or (
        change == "cut" and settings != "named"  # transformers derives a padding token from the stored padding
    )
    for text in TEXTS:
        expected = auto(text).input_ids
        assert ours.encode(text) == again.encode(text) == ours.encode_offsets(text, adds_special=True).ids == expected
        assert ours.encode_offsets(text).ids == auto(text, add_special_tokens=False).input_ids
        assert ours.encode_cut(text, 5) == auto(text, truncation=True, max_length=5).input_ids
    assert ours.encode_documents(TEXTS) == [auto(text).input_ids for text in TEXTS]


def test_each_document_ends_with_the_end_token_once(tmp_path: Path) -> None:
    ours = read_text_tokenizer(_write(tmp_path / "model", "bos", "named"))
    assert ours.encode_documents(["a"], end=ours.end_id) == [[257, ours.token_id("a"), 258]]
    assert ours.encode_documents(["a"], end=260) == [[257, ours.token_id("a"), 258, 260]]
    assert ours.encode_prompt("a") == [257, ours.token_id("a")]  # a model continues it
    with pytest.raises(UserError, match="a length of 2 tokens leaves no room for a text"):
        ours.encode_cut("abc", 2)


def test_settings_change_the_identity_and_stored_cuts_do_not(tmp_path: Path) -> None:
    def identity(change: str, settings: str) -> str:
        return read_text_tokenizer(_write(tmp_path / f"{change}-{settings}", change, settings)).identity()

    named = identity("plain", "named")
    assert identity("cut", "named") == named
    others = [identity("bos", "named"), identity("added", "named"), identity("plain", "split")]
    assert len({named, *others}) == 4


def test_a_tokenizer_of_a_class_is_what_the_class_makes_of_it(tmp_path: Path) -> None:
    folder = _write(tmp_path / "model", "plain", "no settings")
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    assert [read_text_tokenizer(folder).encode(text) for text in TEXTS] == [auto(text).input_ids for text in TEXTS]


def test_without_transformers_settings_that_change_tokens_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {name: _write(tmp_path / name, "plain", name) for name in SETTINGS}
    classy = _write(tmp_path / "classy", "plain", "named", tokenizer_class="Qwen2Tokenizer")
    expected = read_text_tokenizer(folders["named"])
    monkeypatch.setattr("d9d_loop.data.text_tokenizer.find_spec", lambda name: None if name == "transformers" else name)
    plain = read_text_tokenizer(folders["named"])
    assert plain.identity() == expected.identity()
    assert (plain.bos_id, plain.eos_id, plain.pad_id) == (257, 258, 259)
    assert plain.special_tokens == expected.special_tokens
    for name, entry in (("add_bos", "add_bos_token"), ("split", "split_special_tokens"), ("new", "<new>")):
        with pytest.raises(UserError, match=rf"{entry} needs the package transformers, which is not installed"):
            read_text_tokenizer(folders[name])
    with pytest.raises(UserError, match="tokenizer_class needs the package transformers"):
        read_text_tokenizer(classy)


def test_a_tokenizer_of_bytes_is_saved_for_transformers(tmp_path: Path) -> None:
    ours = TextTokenizer.of_bytes()
    ours.save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "Größe 漢字 \0\x7f"
    assert ours.encode(text) == list(text.encode()) == auto(text).input_ids
    assert ours.decode(ours.encode(text)) == text
    assert (ours.vocab_size, ours.end_id, auto.eos_token_id) == (257, 256, 256)
    assert read_text_tokenizer(tmp_path).identity() == ours.identity()


def test_a_file_of_another_name_has_no_settings(tmp_path: Path) -> None:
    folder = _write(tmp_path / "model", "plain", "split")
    _backend().save(str(folder / "other.json"))
    assert len(read_text_tokenizer(folder / "other.json").encode("</s>")) == 1
    assert len(read_text_tokenizer(folder / "tokenizer.json").encode("</s>")) == 4
    with pytest.raises(UserError, match=r"none.json does not exist; expected a tokenizer.json or a model folder"):
        read_text_tokenizer(folder / "none.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"tokenizer.json does not exist; .* Set model.tokenizer"):
        read_text_tokenizer(tmp_path / "empty")


def test_a_vocabulary_without_tokenizer_json_is_read_by_transformers(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "to", "be"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    assert read_text_tokenizer(tmp_path).encode("to be") == [2, 5, 6, 3]
    assert "vocab.txt" in TOKENIZER_FILES


@pytest.mark.parametrize("settings", ["no settings", "named"])
def test_added_tokens_that_would_get_other_ids_are_an_error(tmp_path: Path, settings: str) -> None:
    folder = _write(tmp_path / "t", "added", settings)
    described = json.loads((folder / "tokenizer.json").read_text())
    described["added_tokens"][-1]["id"] += 4  # the file as after tokens before it were removed
    (folder / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"the added token '<new>' has the id 265, but tokenizers reads it as 261, "):
        read_text_tokenizer(folder)


def test_token_files_hold_the_tokens_of_transformers(tmp_path: Path) -> None:
    folder = _write(tmp_path / "model", "bos", "named")
    file = tokenize_text(TEXTS, tmp_path / "tokens", tokenizer=folder / "tokenizer.json")
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    assert [file[n]["tokens"].tolist() for n in range(len(file))] == [auto(text).input_ids for text in TEXTS]
    assert file.manifest.about["tokenizer_identity"] == read_text_tokenizer(folder).identity()


def test_the_end_token_of_a_trained_tokenizer_is_its_own() -> None:
    assert TextTokenizer(train_tokenizer(["to be or not to be"], vocab_size=260)).end_id == 0
