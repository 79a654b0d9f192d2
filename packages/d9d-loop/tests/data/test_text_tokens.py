import json
from pathlib import Path

import pytest

from d9d_dist import UserError
from d9d_loop.data import TextFiles, TokenFile, is_held_out, open_tokens, tokenize_text, train_tokenizer
from d9d_loop.data.__main__ import main

tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers, which is optional")

TEXTS = [f"This is document {number}, and it is not long: {'well ' * number}" for number in range(40)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(TEXTS, vocab_size=300).save(str(path))
    return path


def test_tokens_decode_to_the_text(tmp_path: Path, tokenizer: Path) -> None:
    texts, end_token = ["", *TEXTS, "größer ≠ 大"], "<|endoftext|>"
    file = tokenize_text(texts, tmp_path / "tokens", tokenizer=tokenizer, end_token=end_token)
    decoder = tokenizers.Tokenizer.from_file(str(tokenizer))
    end = decoder.token_to_id("<|endoftext|>")
    documents = [file[number]["tokens"].tolist() for number in range(len(file))]
    assert all(tokens[-1] == end and end not in tokens[:-1] for tokens in documents)
    assert [decoder.decode(tokens[:-1]) for tokens in documents] == ["", *TEXTS, "größer ≠ 大"]
    assert file.manifest.about["vocab_size"] == 300


def test_without_an_end_token_empty_documents_are_skipped(tmp_path: Path, tokenizer: Path) -> None:
    file = tokenize_text(["", "ab"], tmp_path / "tokens", tokenizer=tokenizer, end_token=None)
    assert len(file) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-length=9"], "--max-length without --chat; expected it only with --chat"),
        (["--too-long=drop"], "--too-long without --chat"),
        (["--date=2025-01-01"], "--date without --chat"),
        (["--show=1"], "--show without --chat"),
        (["--chat", "--end-token=x"], "--end-token with --chat; expected it only without --chat, because it has no"),
        (["--chat", "--train-vocab-size=300"], "--train-vocab-size with --chat"),
        (["--chat", "--field=body"], "--field with --chat"),
        (["--chat", "--held-out=1"], "--held-out 1.0; expected a fraction"),
    ],
)
def test_options_without_an_effect_are_an_error(options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(["x", "--output=y", "--tokenizer=z", *options])


def _write_texts(folder: Path) -> None:
    (folder / "texts" / "more").mkdir(parents=True)
    for number, text in enumerate(TEXTS[:30]):
        (folder / "texts" / ("more" if number % 2 else ".") / f"{number:02}.txt").write_text(text, encoding="utf-8")
    (folder / "texts" / "notes.md").write_text("not this one", encoding="utf-8")
    lines = [json.dumps({"body": text, "id": number}) for number, text in enumerate(["", *TEXTS[30:]])]
    (folder / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")


def test_command_trains_a_tokenizer_and_writes_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write_texts(tmp_path)
    tokenizer, output = tmp_path / "new" / "tokenizer.json", tmp_path / "tokens"
    paths = [str(tmp_path / "texts"), str(tmp_path / "texts.jsonl"), "--field", "body"]
    main([*paths, "--output", str(output), "--tokenizer", str(tokenizer), "--train-vocab-size=300", "--held-out=0.3"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(line["folder"]) for line in lines] == [output / "train", output / "held_out"]
    decoder = tokenizers.Tokenizer.from_file(str(tokenizer))
    found = {}
    for name in ("train", "held_out"):
        file = TokenFile(output / name)
        found[name] = {decoder.decode(file[number]["tokens"].tolist()) for number in range(len(file))}
    assert found["held_out"] == {text for text in TEXTS if is_held_out(text, 0.3)}
    assert found["train"] == set(TEXTS) - found["held_out"]
    assert 3 < len(found["held_out"]) < 25


def test_the_command_without_a_held_out_part(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_texts(tmp_path)
    main([str(tmp_path / "texts"), "--pattern=*.txt", f"--output={tmp_path / 't'}", f"--tokenizer={tokenizer}"])
    line = json.loads(capsys.readouterr().out)
    assert line["documents"] == len(TokenFile(tmp_path / "t")) == 15


def test_the_command_writes_the_formats_of_other_programs(tmp_path: Path, tokenizer: Path) -> None:
    _write_texts(tmp_path)
    common = [str(tmp_path / "texts"), f"--tokenizer={tokenizer}"]
    main([*common, f"--output={tmp_path / 'd9d'}"])
    own = TokenFile(tmp_path / "d9d")
    for name, count in (("megatron", len(own)), ("llm.c", 1), ("nanogpt", 1)):
        main([*common, f"--output={tmp_path / 'new' / name}", f"--output-format={name}"])
        file = open_tokens(tmp_path / "new" / f"{name}.bin")
        assert len(file) == count
        assert file.tokens(0, file.num_tokens or 0).tolist() == own.tokens(0, own.num_tokens).tolist()
    assert {each.name for each in (tmp_path / "new").iterdir()} == {
        *("megatron.bin", "megatron.idx", "llm.c.bin", "nanogpt.bin"),
    }
    with pytest.raises(UserError, match=r"megatron\.bin already exists; expected a new file"):
        main([*common, f"--output={tmp_path / 'new' / 'megatron'}", "--output-format=megatron"])
    with pytest.raises(UserError, match="--output-format with --chat; expected it only without --chat"):
        main([*common, "--chat", f"--output={tmp_path / 'c'}", "--output-format=megatron"])


def test_missing_texts_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing does not exist; expected a text file"):
        TextFiles([tmp_path / "nothing"]).files()
    with pytest.raises(UserError, match=r"no files match \*\*/\*\.txt in "):
        TextFiles([tmp_path]).files()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting property name .*; expected a JSON object"),
        ("[1]", "got a list; expected a JSON object"),
        ('{"other": "x"}', "expected a text in the field 'text'; got the fields other"),
        ('{"text": 1}', "expected a text in the field 'text'; got the fields text"),
    ],
)
def test_a_line_without_text_is_reported(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "a"}\n' + line, encoding="utf-8")
    with pytest.raises(UserError, match=r"texts.jsonl, line 2: " + message):
        list(TextFiles([path]))


def test_text_of_every_format_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"text": "c"}, {"text": ""}, {"text": "d"}])
    table.save_to_disk(str(tmp_path / "saved"))
    table.to_parquet(tmp_path / "table.parquet")
    (tmp_path / "list.json").write_text('[{"text": "e"}]', encoding="utf-8")
    (tmp_path / "table.csv").write_text("text\nNA\n", encoding="utf-8")
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "lines.jsonl").write_text('{"text": "f"}\n', encoding="utf-8")
    names = ("saved", "table.parquet", "list.json", "table.csv", "empty.jsonl", "lines.jsonl")
    assert list(TextFiles([tmp_path / name for name in names])) == ["c", "d", "c", "d", "e", "NA", "f"]
    (tmp_path / "lines.ndjson").write_text('{"text": "f"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"paths: .*lines.ndjson has the suffix .ndjson; expected .jsonl, .json"):
        list(TextFiles([tmp_path / "lines.ndjson"]))


def test_a_file_that_is_not_text_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(UserError, match=r"a.txt is not UTF-8 text \(byte 2\)"):
        list(TextFiles([tmp_path]))


def test_an_unusable_tokenizer_is_reported(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(UserError, match=r"the tokenizer .*none.json does not exist"):
        tokenize_text(TEXTS, tmp_path / "tokens", tokenizer=tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match=r"bad.json is not a tokenizer.json"):
        tokenize_text(TEXTS, tmp_path / "tokens", tokenizer=tmp_path / "bad.json")
    with pytest.raises(UserError, match=r"has no end token '</s>'"):
        tokenize_text(TEXTS, tmp_path / "tokens", tokenizer=tokenizer, end_token="</s>")  # noqa: S106
    with pytest.raises(UserError, match=r"tokenizer.json already exists; omit --train-vocab-size"):
        main([str(tmp_path), "--output=x", f"--tokenizer={tokenizer}", "--train-vocab-size=300"])
    with pytest.raises(UserError, match=r"vocab_size = 256; expected at least 257"):
        train_tokenizer(TEXTS, vocab_size=256)
    with pytest.raises(UserError, match=r"--held-out 1.0; expected a fraction of at least 0 and less than 1"):
        main([str(tmp_path), "--output=x", f"--tokenizer={tokenizer}", "--held-out=1"])


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d9d_loop.data.text_tokenizer.find_spec", lambda _name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tokenizers>=0"):
        train_tokenizer(TEXTS, vocab_size=300)
