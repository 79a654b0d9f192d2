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
    path.write_text("{}\n[]\n{", encoding="utf-8")
    with pytest.raises(UserError, match="byte 3: got a list; expected a JSON object"):
        JsonLines(path)[1]
    with pytest.raises(UserError, match=r"byte 6: .*; expected a JSON object. Correct the line"):
        JsonLines(path)[2]
