import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from d9d_dist.lazy_exports import paused_collection

_INIT = '''"""A package."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lazy_package.light import a as a
    from lazy_package.light import b as b
    from lazy_package.light import hidden
    from lazy_package.heavy import c as c
else:
    __getattr__, __dir__ = lazy_exports(__name__)
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    folder = tmp_path / "lazy_package"
    folder.mkdir()
    (folder / "__init__.py").write_text(_INIT)
    (folder / "light.py").write_text("a, b, hidden = [], 2, 3")
    (folder / "heavy.py").write_text("c = 4")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("lazy_package")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazy_package"]:
        del sys.modules[name]


def test_a_module_is_imported_at_the_first_use_of_its_name(package: ModuleType) -> None:
    assert "lazy_package.light" not in sys.modules
    assert package.b == 2
    assert "lazy_package.light" in sys.modules
    assert "lazy_package.heavy" not in sys.modules
    assert package.a is package.a


def test_public_names_are_listed_before_their_use(package: ModuleType) -> None:
    assert {"__all__", "a", "b", "c"} <= set(dir(package))
    assert package.__all__ == ["a", "b", "c"]
    names: dict[str, object] = {}
    exec("from lazy_package import *", names)  # noqa: S102
    assert [names[name] for name in ("a", "b", "c")] == [[], 2, 4]


def test_unknown_names_raise_the_usual_errors(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match="module 'lazy_package' has no attribute 'hidden'"):
        _ = package.hidden
    with pytest.raises(ImportError, match="cannot import name 'hidden' from 'lazy_package'"):
        exec("from lazy_package import hidden")  # noqa: S102
    exec("from lazy_package import heavy")  # noqa: S102 - a module
    assert "lazy_package.heavy" in sys.modules


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_are_paused_and_then_as_before(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with paused_collection():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_an_import_of_a_name_pauses_collections(package: ModuleType) -> None:
    assert package.__file__ is not None
    (Path(package.__file__).parent / "heavy.py").write_text("import gc\nc = gc.isenabled()")
    was_enabled = gc.isenabled()
    gc.enable()
    try:
        assert package.c is False
        assert gc.isenabled()
    finally:
        (gc.enable if was_enabled else gc.disable)()
