import json
from pathlib import Path

import pytest

from d9d_dist import UserError
from d9d_loop.data import JsonLines


def test_lines_of_several_files_are_read_in_order(tmp_path: Path) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    one.write_text("\n".join(json.dumps({"n": n, "text": "é" * n}) for n in range(5)) + "\n\n", encoding="utf-8")
    other.write_text('{"n": 5}', encoding="utf-8")
    lines = JsonLines([one, other])
    assert [lines[index]["n"] for index in range(len(lines))] == list(range(6))
    assert lines[3]["text"] == "ééé"
    with pytest.raises(IndexError, match="line 6 is out of range: the files have 6 lines"):
        lines[6]


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with pytest.raises(UserError, match=r"a.jsonl does not exist; expected a .jsonl file"):
        JsonLines(path)
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(UserError, match="no lines; expected one JSON object in each line"):
        JsonLines(path)
    path.write_text("{}\n\n[]\n{", encoding="utf-8")
    with pytest.raises(UserError, match=r"a.jsonl, line 3: got a list; expected a JSON object"):
        JsonLines(path)


def test_a_bad_line_of_a_large_file_is_named_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d9d_loop.data.json_lines._PARSED_AT_ONCE", 0)
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    paths[0].write_text("{}\n" * 2, encoding="utf-8")
    paths[1].write_text("{}\n\n[]\n{", encoding="utf-8")
    lines = JsonLines(paths)
    assert len(lines) == 5
    with pytest.raises(UserError, match=r"b.jsonl, line 3: got a list; expected a JSON object"):
        lines[3]
    with pytest.raises(UserError, match=r"b.jsonl, line 4: Expecting .*; expected a JSON object. Correct the line"):
        lines[4]
    with pytest.raises(UserError, match=r"b.jsonl, line 3: got a list"):
        list(lines)


def test_contents_are_all_lines_in_any_files(tmp_path: Path) -> None:
    one, two, other = (tmp_path / f"{name}.jsonl" for name in ("one", "two", "other"))
    one.write_text('{"n": 1}\n{"n": 2}\n', encoding="utf-8")
    two.write_text('\n{"n": 3}', encoding="utf-8")
    other.write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n', encoding="utf-8")
    assert JsonLines([one, two]).contents_digest() == JsonLines(other).contents_digest()
    other.write_text('{"n": 1}\n{"n": 2}\n{"n": 4}\n', encoding="utf-8")
    assert JsonLines([one, two]).contents_digest() != JsonLines(other).contents_digest()
