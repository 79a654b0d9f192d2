from pathlib import Path

import pytest

from d9d_dist import UserError
from d9d_loop.data import open_samples

EXPECTED = (
    r"expected \.jsonl, \.json, \.parquet, \.csv, a text such as \.txt or \.md, or a folder of datasets\.save_to_disk"
)


@pytest.mark.parametrize(
    ("name", "found", "remedy"),
    [
        ("a.ndjson", "the suffix .ndjson", "If its lines are JSON objects, rename it to .jsonl"),
        ("a.JSONL", "the suffix .JSONL", "Rename it to .jsonl"),
        ("a.Txt", "the suffix .Txt", "Rename it to .txt"),
        ("a.tsv", "the suffix .tsv", "Convert it to .csv or .jsonl"),
        ("a.jsonl.gz", "the suffix .gz", "Decompress it: gunzip"),
        ("a.jsonl.bak", "the suffix .bak", "If it is one text, rename it to .txt"),
        ("a", "no suffix", "If it is one text, rename it to .txt"),
    ],
)
def test_a_file_of_unknown_format_is_refused(name: str, found: str, remedy: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"text": "a"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=rf"files: .*{name} has {found}; {EXPECTED}. {remedy}."):
        open_samples([tmp_path / name], key="files")


def test_every_file_of_a_list_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    paths: dict[str, list[Path]] = {kind: [] for kind in ("jsonl", "json", "parquet", "csv", "saved", "txt")}
    for part, letters in (("a", "abc"), ("b", "defgh")):
        rows = [{"text": letter} for letter in letters]
        table = datasets.Dataset.from_list(rows)
        paths = {kind: [*before, tmp_path / f"{part}.{kind}"] for kind, before in paths.items()}
        table.to_json(tmp_path / f"{part}.jsonl")
        table.to_json(tmp_path / f"{part}.json", lines=part == "a")
        table.to_parquet(tmp_path / f"{part}.parquet")
        table.to_csv(tmp_path / f"{part}.csv")
        table.save_to_disk(str(tmp_path / f"{part}.saved"))
        (tmp_path / f"{part}.txt").write_text(letters, encoding="utf-8")
    for kind, both in paths.items():
        samples = open_samples(both, key="files")
        texts = [samples[index]["text"] for index in range(len(samples))]
        assert (
            texts == [sample["text"] for sample in samples] == (["abc", "defgh"] if kind == "txt" else list("abcdefgh"))
        )
        last = "line 5" if kind == "jsonl" else "sample 0" if kind == "txt" else "sample 4"
        assert samples.place(len(samples) - 1) == f"{both[1]}, {last}"
        with pytest.raises(IndexError, match="out of range"):
            samples[len(samples)]
        digests = {str(open_samples(each, key="files").contents_digest()) for each in (both, both[:1], both[::-1])}
        assert len(digests) == 3


def test_folders_that_are_no_dataset_are_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"text": "a"}])
    datasets.DatasetDict(test=table, train=table).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(
        UserError, match=r"splits has the splits test, train; .*Name the folder of a split: .*splits/train"
    ):
        open_samples([tmp_path / "splits"], key="files")
    with pytest.raises(UserError, match=r"is a folder without state.json; expected a folder of datasets.save_to_disk"):
        open_samples([tmp_path], key="files")
    with pytest.raises(UserError, match=r"files: .*absent does not exist; expected a file or folder"):
        open_samples([tmp_path / "absent"], key="files")


def test_values_of_csv_and_json_files_are_those_of_the_file(tmp_path: Path) -> None:
    """Readers of tables guess types: NA becomes null, 007 becomes 7, and 2020-01-01 a date."""
    pytest.importorskip("datasets")
    values = ["NA", "null", "", "007", "True", "1e5", "2020-01-01", "two\nlines", "é"]
    path = tmp_path / "a.csv"
    path.write_text("text,other\n" + "".join(f'"{each}",x\n' for each in values), encoding="utf-8-sig")
    assert [sample["text"] for sample in open_samples([path], key="files")] == values
    path = tmp_path / "a.json"
    path.write_text('[{"text": "2020-01-01", "x": 1}, {"text": null}]', encoding="utf-8")
    assert list(open_samples([path], key="files")) == [{"text": "2020-01-01", "x": 1}, {"text": None}]
    path.write_text("[{}, 1]", encoding="utf-8")
    with pytest.raises(UserError, match=r"a.json, item 1: got a int; expected a JSON object"):
        open_samples([path], key="files")


def test_a_byte_order_mark_is_not_a_part_of_a_text(tmp_path: Path) -> None:
    for name, text in (("a.txt", "hi"), ("a.json", '[{"text": "hi"}]'), ("a.jsonl", '{"text": "hi"}\n')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert list(open_samples([tmp_path / name], key="files")) == [{"text": "hi"}]


def test_classes_of_a_table_have_their_names(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["yes", "no"])})
    table = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, -1]}, features=features)
    table.to_parquet(str(tmp_path / "a.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    table.with_format("torch", columns=["text"]).save_to_disk(str(tmp_path / "formatted"))  # stored without effect
    for name in ("a.parquet", "saved", "formatted"):
        samples = open_samples([tmp_path / name], key="files")
        assert [samples[index]["label"] for index in range(3)] == ["no", "yes", None]  # -1 is no class
        assert list(samples)[1] == {"text": "b", "label": "yes"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"a\.csv is empty; expected a first line with the names of the columns"),
        ("text,label,text\na,1,b\n", r"a\.csv has more than one column 'text'; expected different names"),
    ],
)
def test_columns_of_csv_files_have_names_of_their_own(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        open_samples([path], key="dataset.files", text_field="text")
