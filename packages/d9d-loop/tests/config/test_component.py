import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from d9d_dist import UserError
from d9d_loop import validate_config
from d9d_loop.config.component import Component

_HERE = "parts_of_a_test:"


@pytest.fixture(autouse=True)
def _can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "parts_of_a_test", sys.modules[__name__])


@dataclass
class Options:
    width: int = 1


def with_options(options: Options) -> Options:
    return options


class Sizes(BaseModel):
    width: int
    depth: int = 2


class Maker:
    def __init__(self, path: Path, sizes: Sizes, *, scale: float = 1.0, device: torch.device | None = None) -> None:
        self.made = (path, sizes, scale, device)

    class Inner:
        pass


def untyped(value, other=3):  # noqa: ANN001, ANN201
    return value, other


CONSTANT = 3


def _build(use: str, **arguments: Any) -> Any:
    return validate_config(Component, {"use": use, **arguments}).build("model")


def test_arguments_are_converted_to_their_annotations() -> None:
    made = _build(_HERE + "Maker", path="a/b", sizes={"width": "8"}, scale="0.5").made
    assert made == (Path("a/b"), Sizes(width=8), 0.5, None)


def test_functions_without_annotations_get_raw_values() -> None:
    assert _build(_HERE + "untyped", value="8") == ("8", 3)
    assert _build("builtins:dict", a=1) == {"a": 1}


def _guess(size=3, shuffle=True, name="x", rate=0.5):  # noqa: ANN001, ANN202
    return size, shuffle, name, rate


def test_arguments_without_annotations_get_the_type_of_their_default() -> None:
    assert _build(_HERE + "_guess", size="8", shuffle="false", name="7", rate="1e-3") == (8, False, "7", 1e-3)
    # A default may have a narrower type than the argument.
    assert _build(_HERE + "_guess", size=0.5, shuffle="batches", name=None, rate=None) == (0.5, "batches", None, None)


class Lazy:
    @classmethod
    def made(cls, size: int) -> tuple[type, int]:
        return cls, size


class Inherits(Lazy):
    pass


def test_inherited_arguments_can_be_set() -> None:
    assert _build(_HERE + "Inherits.made", size="3") == (Inherits, 3)


def test_use_may_refer_to_a_nested_class() -> None:
    assert isinstance(_build(_HERE + "Maker.Inner"), Maker.Inner)


@pytest.mark.parametrize(
    ("use", "arguments", "message"),
    [
        ("nowhere.at.all:X", {}, r"^model\.use = 'nowhere\.at\.all:X': no module named nowhere\. Install it"),
        ("json.nothing:X", {}, r"no module named json\.nothing\."),
        (_HERE + "Makr", {}, r"no Makr in parts_of_a_test; did you mean Maker\?$"),
        (_HERE + "zzzz", {}, r"no zzzz in parts_of_a_test\.$"),
        (_HERE + "CONSTANT", {}, r"is int; expected a class or a function\.$"),
        (
            _HERE + "Maker",
            {"path": "a"},
            r"cannot be called with path: missing a required argument: 'sizes'\. Its signature is \(",
        ),
        (_HERE + "Maker.Inner", {"size": 1}, r"^model: .*Inner cannot be called with size: .*'size'"),
        (
            _HERE + "Maker",
            {"path": "a", "sizes": {"width": "x"}},
            r"^model\.sizes\.width = 'x'; expected a valid integer",
        ),
        (
            _HERE + "with_options",
            {"options": {"widht": 1}},
            r"^model\.options\.widht is not a configuration key; did you mean model\.options\.width\?",
        ),
        (
            _HERE + "Maker",
            {"path": "a", "sizes": {"width": 1}, "scale": "x"},
            r"^model\.scale = 'x'; expected a valid number.*--model\.scale VALUE",
        ),
    ],
)
def test_invalid_components_are_refused(use: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _build(use, **arguments)


def test_import_errors_inside_a_module_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy_component.py").write_text("import absent_library", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="absent_library"):
        _build("needy_component:X")


@pytest.mark.parametrize("use", ["os.system", "a:b:c", "a b:c", ":x", ".:x", "a:b."])
def test_import_paths_in_other_forms_are_refused(use: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"use: got {use!r}; expected package.module:name")):
        _build(use)
