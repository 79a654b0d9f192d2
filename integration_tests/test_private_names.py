"""Each private name of torch in a source stands in one table, and exists in the installed version of torch."""

import tomllib
from pathlib import Path

import pytest
from private_names import defined_names, has_attribute, nodes_of, private_names, resolve

ROOT = Path(__file__).resolve().parents[1]
LISTED = tomllib.loads((ROOT / "integration_tests" / "private_names.toml").read_text(encoding="utf-8"))
TABLE = {f"{owner}.{name}" for owner, names in LISTED["torch"].items() for name in names}
OTHERS = {name for names in LISTED["other_libraries"].values() for name in names}


@pytest.fixture(scope="module")
def used() -> dict[str, set[str]]:
    """Return the private names of the sources, each with the files that use it."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "packages").glob("*/src/**/*.py"))}
    ours = set().union(*map(defined_names, texts.values()))
    found: dict[str, set[str]] = {}
    for path, text in texts.items():
        for name in private_names(text, ours=ours):
            found.setdefault(name, set()).add(path.relative_to(ROOT).as_posix())
    nodes_of.cache_clear()  # garbage collection visits what is cached
    return found


def test_each_private_name_stands_in_the_table(used: dict[str, set[str]]) -> None:
    known = TABLE | OTHERS | {name.rpartition(".")[2] for name in TABLE}
    unknown = {name: sorted(files) for name, files in used.items() if name not in known}
    assert not unknown, "use a public name, or add the name to integration_tests/private_names.toml"


def test_each_name_of_the_table_is_used(used: dict[str, set[str]]) -> None:
    assert not {name for name in TABLE if not used.keys() & {name, name.rpartition(".")[2]}}
    assert not OTHERS - used.keys()


@pytest.mark.parametrize("owner", LISTED["torch"])
def test_each_private_name_exists(owner: str) -> None:
    for name in LISTED["torch"][owner]:
        try:
            resolve(f"{owner}.{name}")
        except AttributeError:
            assert has_attribute(resolve(owner), name), f"{owner}.{name} is gone from this version of torch"


def test_the_table_names_the_lowest_and_the_locked_version_of_torch() -> None:
    project = tomllib.loads((ROOT / "packages/d9d-dist/pyproject.toml").read_text(encoding="utf-8"))["project"]
    locked = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
    versions = [each["version"] for each in locked if each["name"] == "torch"]
    lowest, newest = LISTED["checked_with"]
    assert f"torch>={lowest}" in project["dependencies"]
    assert {version.rpartition(".")[0] for version in versions} == {newest}, "check the names with this version"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\ntorch._dynamo.reset()", {"torch._dynamo"}),
        ("import torch._inductor as inductor\ninductor.config", {"torch._inductor"}),
        ("from torch.utils import _pytree as tree", {"torch.utils._pytree"}),
        (
            "import torch.distributed as dist\ndist.distributed_c10d._world",
            {"torch.distributed.distributed_c10d._world"},
        ),
        ("def f(x): return x.untyped_storage()._cdata", {"_cdata"}),
        ("def f(x): return getattr(x, '_local_tensor', None)", {"_local_tensor"}),
        ("import sys\n'torch._dynamo' in sys.modules", {"torch._dynamo"}),
        ("class A:\n  def f(self, x):\n    self._own = 1\n    return x._own", set()),
        ("class A:\n  def f(self, x):\n    self._own = 1\n    x._own = 2", {"_own"}),
        ("from torch import optim\nclass A(optim.AdamW):\n  def _init_group(self): pass", {"_init_group"}),
        ("from torch import nn\nclass A(nn.Module):\n  def f(self): return self._modules", {"_modules"}),
    ],
)
def test_a_private_name_is_found(source: str, expected: set[str]) -> None:
    assert private_names(source) == expected
