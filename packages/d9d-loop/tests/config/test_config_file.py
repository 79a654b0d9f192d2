import builtins
import json
import re
from pathlib import Path
from typing import Any

import pytest

from d9d_dist import UserError
from d9d_loop import read_config_file

JOB = {"steps": 3, "batch": {"global_size": 8}}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("job.toml", "steps = 3\nbatch.global_size = 8\n"),
        ("job.json", json.dumps({"$schema": "job.schema.json", **JOB})),
        ("job.yaml", "steps: 3\nbatch:\n  global_size: 8\n"),
        ("job.yml", "{steps: 3, batch: {global_size: 8}}"),
    ],
)
def test_reads_every_format(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    assert read_config_file(file) == read_config_file(str(file)) == JOB


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.toml", None, r"absent\.toml cannot be read: .*No such file.*\. Check the path\."),
        ("job.ini", b"steps: 3", r"job\.ini: expected a \.toml, \.json or \.yaml file\."),
        ("torn.toml", b"steps = [1, ", r"torn\.toml cannot be parsed: .*"),
        ("torn.json", b'{"steps": ', r"torn\.json cannot be parsed: .*"),
        ("torn.yaml", b"steps: [1, ", r"torn\.yaml cannot be parsed: .*line 1.*"),
        ("list.json", b"[1]", r"list\.json contains a list; expected sections and keys\."),
        ("list.yaml", b"- 1", r"list\.yaml contains a list; expected sections and keys\."),
        ("binary.toml", b"\xff\xfe", r"binary\.toml cannot be read: .*decode.*\. Check the path\."),
        ("twice.toml", b"a = 1\na = 2", r"twice\.toml cannot be parsed: .*"),
        ("twice.json", b'{"x": {"a": 1, "a": 2}}', r"twice\.json cannot be parsed: the key a is duplicated"),
        ("twice.yaml", b"x:\n  a: 1\n  a: 2", r"twice\.yaml cannot be parsed: the key a is duplicated.*line 3.*"),
        ("number.yaml", b"3: 1", r"number\.yaml cannot be parsed: the key 3 is not a string; put it in quotes.*"),
        ("deep.json", b"[" * 100_000, r"deep\.json cannot be parsed: .*"),
        ("deep.yaml", b"[" * 10_000, r"deep\.yaml cannot be parsed: .*"),
        ("tag.yaml", b"a: !!python/object/apply:os.getcwd []", r"tag\.yaml cannot be parsed: tags are not allowed.*"),
        ("str.yaml", b"a: !!str 1", r"str\.yaml cannot be parsed: tags are not allowed.*"),
        ("alias.yaml", b"a: &x [1]\nb: *x", r"alias\.yaml cannot be parsed: anchors are not allowed.*line 1.*"),
        ("include.toml", b"include = 3", r"include\.toml: include = 3; expected a list of files\."),
        ("items.toml", b"include = [3]", r"items\.toml: include = \[3\]; expected a list of files\."),
    ],
)
def test_refuses_a_bad_file(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=f"^configuration file {re.escape(str(tmp_path))}/{message}$"):
        read_config_file(file)


def test_refuses_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "job.toml"
    folder.mkdir()
    with pytest.raises(UserError, match=r"job\.toml cannot be read: .*Is a directory"):
        read_config_file(folder)


def test_the_error_for_missing_yaml_support_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, found = tmp_path / "job.yaml", builtins.__import__

    def without_yaml(name: str, *rest: Any) -> Any:
        if name == "d9d_loop.config._strict_yaml":
            raise ImportError(name)
        return found(name, *rest)

    file.write_text("steps: 3", encoding="utf-8")
    monkeypatch.setattr(builtins, "__import__", without_yaml)
    with pytest.raises(UserError, match=r"needs PyYAML, which is not installed\. Install it: pip install 'pyyaml>=6"):
        read_config_file(file)


def _write(folder: Path, **files: str) -> None:
    (folder / "bases").mkdir()
    for name, text in files.items():
        (folder / name.replace("__", "/")).with_suffix(".toml").write_text(text, encoding="utf-8")


def test_a_file_overrides_its_included_files(tmp_path: Path) -> None:
    _write(
        tmp_path,
        job='include = ["bases/model.toml", "bases/long.toml"]\nmodel.layers = 4\nseeds = [1]',
        bases__model='include = "size.toml"\nsteps = 1\nmodel.hidden = 8\nmodel.layers = 2\nseeds = [1, 2]',
        bases__size="[model]\nhidden = 4\nheads = 2",
        bases__long="steps = 9",
    )
    expected = {"model": {"hidden": 8, "heads": 2, "layers": 4}, "seeds": [1], "steps": 9}
    assert read_config_file(tmp_path / "job.toml") == expected


def test_a_section_of_another_kind_is_replaced(tmp_path: Path) -> None:
    base = (
        '[optimizer]\nkind = "adamw"\nbetas = [0.9, 0.95]\n[model]\nuse = "my:Small"\nwidth = 3\n[tracker]\nkind = "a"'
    )
    job = 'include = ["bases/base.toml"]\n[optimizer]\nkind = "sgd"\n[model]\nuse = "my:Other"\n[tracker]\nfile = "f"'
    _write(tmp_path, job=job, bases__base=base)
    assert read_config_file(tmp_path / "job.toml") == {
        "optimizer": {"kind": "sgd"},
        "model": {"use": "my:Other"},
        "tracker": {"kind": "a", "file": "f"},
    }


def test_a_file_that_includes_itself_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, job='include = ["bases/base.toml"]', bases__base='include = ["../job.toml"]')
    with pytest.raises(UserError, match=r"includes itself: .*job\.toml -> .*base\.toml -> .*job\.toml\. Remove one"):
        read_config_file(tmp_path / "job.toml")


def test_one_file_may_be_included_twice(tmp_path: Path) -> None:
    names = '["bases/a.toml", "bases/b.toml"]'
    both = 'include = ["base.toml"]'
    _write(tmp_path, job=f"include = {names}", bases__a=both, bases__b=both, bases__base="steps = 1")
    assert read_config_file(tmp_path / "job.toml") == {"steps": 1}


def test_the_error_for_an_absent_include_names_both_files(tmp_path: Path) -> None:
    _write(tmp_path, job='include = ["bases/none.toml"]')
    with pytest.raises(UserError, match=r"bases/none\.toml, included by .*job\.toml, cannot be read: "):
        read_config_file(tmp_path / "job.toml")


def test_the_error_for_a_relative_path_names_the_base_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=re.escape(f"No such file or directory. Check the path, relative to {tmp_path}.")
    ):
        read_config_file("jobs/absent.toml")
