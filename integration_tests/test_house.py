"""Repository rules that no tool checks."""

import ast
import graphlib
import importlib
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "packages").glob("*/src/**/*.py"))


def _names(sources: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in sources]


def names_cuda(text: str) -> bool:
    """Return True if a source names one vendor's device, in code or in a string."""
    return any(
        (isinstance(node, ast.Attribute) and node.attr == "cuda")
        or (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda"))
        for node in ast.walk(ast.parse(text))
    )


def test_no_source_names_cuda() -> None:
    assert names_cuda("x = torch.cuda.current_device()")
    assert names_cuda("x = torch.device('cuda:0')")
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    assert not [path for path, text in texts.items() if "cuda" in text and names_cuda(text)]


_USES_PICKLE = """
import pickle
import torch.distributed as dist
from torch.distributed import broadcast_object_list
from torch.distributed.distributed_c10d import gather_object
dist.all_gather_object([], 1)
"""


def test_ruff_refuses_pickle_between_ranks() -> None:
    name = "packages/d9d-dist/src/d9d_dist/x.py"
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--output-format", "concise"]
    command += ["--stdin-filename", name, "-"]
    run = subprocess.run(command, cwd=ROOT, input=_USES_PICKLE, capture_output=True, text=True, check=False)
    assert [line.split(":")[1] for line in run.stdout.splitlines() if line.startswith(name)] == ["2", "4", "5", "6"]


def test_no_source_pickles_between_ranks() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", *map(str, SOURCES)]
    assert not subprocess.run(command, cwd=ROOT, check=False).returncode
    # A process and its own workers on one host.
    assert _names([path for path in SOURCES if "noqa: TID251" in path.read_text(encoding="utf-8")]) == [
        "packages/d9d-dist/src/d9d_dist/testing/_worker.py",
        "packages/d9d-dist/src/d9d_dist/testing/pool.py",
        "packages/d9d-loop/src/d9d_loop/data/worker_pool.py",
    ]


def test_type_checkers_read_the_default_of_each_field() -> None:
    """Without pydantic's plug-in, `Field(1)` is a field without a default."""
    calls = [
        (path, node)
        for path in SOURCES
        if "import Field" in (text := path.read_text(encoding="utf-8")) or ", Field" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Field"
    ]
    assert len(calls) > 100
    assert not [f"{path}:{node.lineno}" for path, node in calls if node.args], "write Field(default=...)"


def test_sources_and_pages_call_an_error_an_error() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("packages/*/*.md")]
    found = [path for path in (*SOURCES, *pages) if re.search(r"\brefused\b", path.read_text(encoding="utf-8"))]
    assert not _names(found), "write: raises an error, or: is an error"


def test_every_module_has_a_docstring() -> None:
    assert not [path for path in SOURCES if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None]


def _folder(module: Sequence[str], package: Path) -> str:
    """Return the folder of a module below its package, or the module itself if it stands beside the folders."""
    return f"{module[1]}/" if (package / module[1]).is_dir() else module[1]


def imports_between_folders(package: Path) -> dict[str, set[str]]:
    """Return the folders, and modules beside them, that each one imports, also in functions and for type checkers."""
    found: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        inside = path.relative_to(package.parent).with_suffix("").parts
        if inside[1] == "__init__":  # exports everything
            continue
        here = _folder(inside, package)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (module := (node.module or "").split("."))[0] == package.name:
                modules = [module] if len(module) > 1 else [[package.name, name.name] for name in node.names]
                found.setdefault(here, set()).update(_folder(each, package) for each in modules)
    return {here: others - {here} for here, others in found.items()}


@pytest.mark.parametrize("package", sorted(path.parent for path in (ROOT / "packages").glob("*/src/*/__init__.py")))
def test_no_circles_between_folders(package: Path) -> None:
    order = graphlib.TopologicalSorter(imports_between_folders(package))
    order.prepare()  # raises CycleError, which shows the circle


def test_a_circle_between_folders_is_found(tmp_path: Path) -> None:
    for name, text in {"a/one": "from p.b import two", "b/two": "def f():\n    from p.a.one import x"}.items():
        path = tmp_path / "p" / f"{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
    with pytest.raises(graphlib.CycleError, match="nodes are in a cycle"):
        graphlib.TopologicalSorter(imports_between_folders(tmp_path / "p")).prepare()


def test_at_most_one_folder_below_a_package() -> None:
    assert SOURCES
    assert not [name for name in _names(SOURCES) if len(Path(name).parts) > 6]


@pytest.mark.parametrize("package", sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml")))
def test_every_package_has_its_documents(package: str) -> None:
    folder = ROOT / "packages" / package
    for name in ("README.md", "CHANGELOG.md"):
        assert len((folder / name).read_text(encoding="utf-8")) > 100, name
    if package != "d9d-all":
        assert (folder / "src" / package.replace("-", "_") / "py.typed").exists()
    version = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert version in (folder / "CHANGELOG.md").read_text(encoding="utf-8")


def _dev_requirements() -> list[str]:
    projects = [
        tomllib.loads(path.read_text(encoding="utf-8"))
        for path in [ROOT / "pyproject.toml", *(ROOT / "packages").glob("*/pyproject.toml")]
    ]
    return [line for project in projects for group in project.get("dependency-groups", {}).values() for line in group]


def _texts() -> dict[str, str]:
    """Return the text of every file of the checkout; of a copy without `.git`, every file in no hidden folder."""
    if (ROOT / ".git").exists():
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    else:
        shown = [path for path in ROOT.iterdir() if path.name == ".ci" or not path.name.startswith(".")]
        names = [str(path.relative_to(ROOT)) for top in shown for path in [top, *top.rglob("*")]]
    suffixes = {".cfg", ".css", ".html", ".js", ".json", ".md", ".py", ".sh", ".svg", ".toml", ".txt", ".yaml", ".yml"}
    paths = [ROOT / name for name in names if name and Path(name).suffix in {*suffixes, ""}]
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8", errors="ignore")
        for path in paths
        if path.is_file()
    }


def test_nothing_names_our_packages_for_an_index_or_the_project_called_d9d() -> None:
    """Nothing is published: `d9d` on PyPI is another project, and anyone may register the other names."""
    installs = re.compile(r"\b(?:install|add)(?:\s+[^\s`(]+)*?\s+[`'\"]?d9d\b[^\s`'\"]*")
    elsewhere = re.compile(r"d9d-project|pypi\.org/(?:project/|simple/)?d9d|uv\s+publish|twine\s+upload", re.IGNORECASE)
    assert installs.search("pip install 'd9d-loop[plot]'")
    assert installs.search("RUN uv pip install --quiet d9d")
    assert not installs.search("pip install ./packages/d9d-loop './packages/d9d-all[plot]'")
    found = [
        f"{name}: {match[0]}"
        for name, text in _texts().items()
        if name not in {"uv.lock", "integration_tests/test_house.py"}
        for pattern in (installs, elsewhere)
        for match in pattern.finditer(text)
    ]
    assert not found


def test_every_distribution_is_named_d9d_and_something_and_has_no_address() -> None:
    for path in (ROOT / "packages").glob("*/pyproject.toml"):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        assert project["name"] == path.parent.name != "d9d"
        assert "urls" not in project


def test_every_development_dependency_has_a_lower_bound() -> None:
    assert _dev_requirements()
    assert all(">=" in requirement for requirement in _dev_requirements())


def _check_lock() -> Any:
    spec = importlib.util.spec_from_file_location("check_lock", ROOT / ".ci" / "check_lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _lock(source: dict[str, str], *urls: str) -> dict[str, Any]:
    return {"package": [{"name": "x", "source": source, "wheels": [{"url": url, "hash": "sha256:0"} for url in urls]}]}


@pytest.mark.parametrize(
    ("lock", "problem"),
    [
        (_lock({"registry": "https://mirror.invalid/simple"}), "expected the default index or the workspace"),
        (_lock({"git": "https://code.invalid/x"}), "expected the default index or the workspace"),
        (_lock({"editable": "."}, "https://a.invalid/1.whl", "https://b.invalid/2.whl"), "expected one host"),
        (_lock({"editable": "."}, "http://a.invalid/1.whl"), "expected https"),
        (_lock({"editable": "."}, "https://10.0.0.1:8080/1.whl"), "expected https and a plain public host name"),
        (_lock({"editable": "."}, "https://user:word@a.invalid/1.whl"), "expected https and a plain public host name"),
    ],
)
def test_the_lock_check_finds_each_problem(lock: dict[str, Any], problem: str) -> None:
    found = list(_check_lock().problems(lock, "https://index.invalid/simple"))
    assert len(found) == 1
    assert problem in found[0]


def test_the_lock_check_passes_a_clean_lock() -> None:
    lock = _lock({"registry": "https://index.invalid/simple"}, "https://a.invalid/1.whl", "https://a.invalid/2.whl")
    assert not list(_check_lock().problems(lock, "https://index.invalid/simple"))


def test_each_file_and_name_of_find_your_way_exists() -> None:
    """Each backticked name of a paragraph is in a file that the paragraph names, or is defined in another source."""
    text = (ROOT / "docs" / "find_your_way.md").read_text(encoding="utf-8")
    everything = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    questions = [paragraph for paragraph in text.split("\n\n") if paragraph.startswith("**")]
    assert len(questions) >= 20
    for paragraph in questions:
        quoted = re.findall(r"`([^`]+)`", paragraph)
        files: list[Path] = []
        for name in (each for each in quoted if each.endswith((".py", "/"))):
            package, slash, _ = name.partition("/")
            outside = name.startswith("integration_tests/")
            folder = ROOT if outside else ROOT / "packages" / package.replace("_", "-") / "src"
            if not slash or not (package.startswith("d9d_") or outside):  # a file beside the one before
                folder = files[-1].parent
            files.append(folder / name)
            assert files[-1].exists(), f"{name} of {paragraph}"
        sources = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
        for name in (each for each in quoted if re.fullmatch(r"\w+(\.(?!py$)\w+)?", each)):
            last = name.rpartition(".")[2]
            is_there = re.search(rf"\b{last}\b", sources) or re.search(rf"(def|class) {last}\b", everything)
            assert is_there, f"{name} of {paragraph}"


def test_no_name_is_exported_by_two_packages() -> None:
    owners: dict[str, list[str]] = {}
    for path in sorted(ROOT.glob("packages/*/src/*/__init__.py")):
        for name in importlib.import_module(path.parent.name).__all__:
            owners.setdefault(name, []).append(path.parent.name)
    assert not {name: packages for name, packages in owners.items() if len(packages) > 1}


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_no_lazy_name_equals_a_module_of_its_package() -> None:
    """Importing such a module would replace the name."""
    lazy = {}
    for path in (path for path in SOURCES if path.name == "__init__.py"):
        branches = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if _is_type_checking(node)]
        names = {
            each.name
            for branch in branches
            for node in ast.walk(branch)
            if isinstance(node, ast.ImportFrom)
            for each in node.names
        }
        if names:
            lazy[path.parent.name] = names & {each.stem for each in path.parent.iterdir()}
    assert len(lazy) >= 8
    assert not {package: names for package, names in lazy.items() if names}


def test_packages_compute_the_list_of_their_names() -> None:
    """A list would hide the names that are imported as themselves."""
    listed = [path for path in SOURCES if path.name == "__init__.py" and "__all__" in path.read_text(encoding="utf-8")]
    assert not listed, "expected `from ... import name as name` per public name, and no `__all__`"


def test_every_exported_name_exists() -> None:
    for path in sorted(ROOT.glob("packages/*/src/*/__init__.py")):
        package = importlib.import_module(path.parent.name)
        assert not [name for name in package.__all__ if not hasattr(package, name)], package


_MODULES_OF = {"pillow": "PIL", "pydantic": "pydantic pydantic_core", "pyyaml": "yaml", "torch": "torch triton"}
_MODULES_OF |= {"fla-core": "fla", "mlflow-skinny": "mlflow", "s3fs": "s3fs fsspec"}
_WITHOUT_EXTRA = {  # found by `find_spec`; their errors name how each is installed
    "d9d-loop": {"lm_eval", "peft", "timm"},
    "d9d-metrics": {"trackio"},
    "d9d-moe": {"deep_ep"},
}


def _modules_of(requirements: list[str]) -> set[str]:
    names = [re.split(r"[\[<>=~!; ]", requirement)[0].lower() for requirement in requirements]
    return {module for name in names for module in _MODULES_OF.get(name, name.replace("-", "_")).split()}


def _calls(tree: ast.AST, name: str) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if name in (getattr(call.func, "id", ""), getattr(call.func, "attr", ""))]


def _constants(nodes: list[ast.expr]) -> list[str | None]:
    return [str(node.value) if isinstance(node, ast.Constant) else None for node in nodes]


def imported_modules(text: str) -> set[str]:
    """Return the top-level modules that a source imports when it runs, at import or later.

    `import_module` counts if its argument is a constant, and calls of methods that need NumPy count as its import.
    Imports for type checkers do not count, nor do those of a function that only looks for the module in `sys.modules`.
    """
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    skipped = {id(below) for node in nodes if _is_type_checking(node) for below in ast.walk(node)}
    names: set[str] = set()
    looks_up = "not in sys.modules" in text  # to unparse is slow
    for node in nodes:
        if looks_up and isinstance(node, ast.FunctionDef) and "not in sys.modules" in ast.unparse(node):
            skipped |= {id(below) for below in ast.walk(node)}
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    if "import_module" in text:
        calls = _calls(tree, "import_module")
        names |= {name for call in calls for name in _constants(call.args[:1]) if name is not None}
    if "numpy" in text and any(_calls(tree, name) for name in ("numpy", "from_numpy")):
        names.add("numpy")
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


def _undeclared(project: dict[str, Any], texts: dict[str, str]) -> list[str]:
    """Return imports, as `file: module`, without a dependency, and without a hint that installs an extra with it."""
    name, extras = project["name"], project.get("optional-dependencies", {})
    known = _modules_of([name, *project["dependencies"]]) | _WITHOUT_EXTRA.get(name, set())
    for text in texts.values():
        for call in _calls(ast.parse(text), "install_hint") if "install_hint" in text else ():
            match _constants(call.args):
                case [distribution]:
                    known |= _modules_of([str(distribution)])
                case [_, extra]:
                    # The trackers' hint is one call, for all of their extras.
                    known |= _modules_of([line for key in extras for line in extras[key] if extra in (key, None)])
    return [f"{file}: {module}" for file, text in texts.items() for module in sorted(imported_modules(text) - known)]


def test_every_import_of_a_package_is_a_dependency_or_has_an_install_hint() -> None:
    """An import inside a function fails only for users who have nothing else installed."""
    project = {"name": "d9d-x", "dependencies": ["torch>=2"], "optional-dependencies": {"y": ["pillow>=1"]}}
    hint = "raise UserError(install_hint('d9d-x', 'y'))"
    assert _undeclared(project, {"a.py": "import torch.nn\nfrom d9d_x.b import b\nimport json"}) == []
    assert _undeclared(project, {"a.py": "def f():\n  import PIL.Image"}) == ["a.py: PIL"]
    assert _undeclared(project, {"a.py": "def f():\n  import PIL.Image", "b.py": hint}) == []
    assert _undeclared(project, {"a.py": "def f(x):\n  import_module('z.w'); x.cpu().numpy()"}) == [
        "a.py: numpy",
        "a.py: z",
    ]
    assert _undeclared(project, {"a.py": "if TYPE_CHECKING:\n  import z"}) == []
    for path in sorted((ROOT / "packages").glob("*/pyproject.toml")):
        sources = {file.name: file.read_text(encoding="utf-8") for file in path.parent.glob("src/**/*.py")}
        found = _undeclared(tomllib.loads(path.read_text(encoding="utf-8"))["project"], sources)
        assert not found, f"{path.parent.name}: add a dependency, or an extra and an error with install_hint"


_IMPORT_ALL = """
import sys
import d9d_dist, d9d_state, d9d_modules, d9d_moe, d9d_pipeline, d9d_peft, d9d_metrics, d9d_loop
heavy = {"torch", "numpy", "sympy", "triton", "transformers", "torchao", "matplotlib"}
print(sorted(heavy & set(sys.modules)))
import torch
from d9d_dist import MeshConfig, DistributedContext
from d9d_pipeline import GPipe, build
from d9d_metrics import Metric
from d9d_loop import TrainerConfig
heavy = {"sympy", "triton", "transformers", "torchao", "matplotlib", "torch.distributed.tensor", "torch._dynamo"}
print(sorted(heavy & set(sys.modules)))
from d9d_loop import Loss, ModelProvider, StepDone, Task, Trainer
from d9d_loop.data import DataProvider
print(sorted(({"torch.distributed.fsdp"} | heavy) & set(sys.modules)))
from d9d_modules import Qwen3ForCausalLM
heavy = {"triton", "transformers", "torchao", "matplotlib", "torch._dynamo", "torch.distributed.checkpoint"}
print(sorted(heavy & set(sys.modules)))
"""


@pytest.mark.slow
def test_imports_are_light() -> None:
    """A package imports nothing heavy; configurations, the Trainer and base classes no DTensor; models no compiler."""
    run = subprocess.run([sys.executable, "-c", _IMPORT_ALL], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["[]"] * 4


def test_the_ci_finds_both_commands_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (search,) = re.findall(r"^commands=.*$", script, re.MULTILINE)
    found = subprocess.run(
        ["bash", "-c", f'{search}; echo "$commands"'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [line.partition(" && ")[0] for line in found.stdout.splitlines()] == ["pip install uv"] * 2


PUBLIC_NAMES = {
    "d9d_dist": 72,
    "d9d_loop": 58,
    "d9d_metrics": 53,
    "d9d_modules": 89,
    "d9d_moe": 37,
    "d9d_peft": 19,
    "d9d_pipeline": 32,
    "d9d_state": 60,
}
"""Budget of names that each package lists. A new name takes the place of one that no page and no example uses."""


@pytest.mark.parametrize("package", PUBLIC_NAMES)
def test_the_public_names_of_a_package_are_within_its_budget(package: str) -> None:
    names = importlib.import_module(package).__all__
    assert len(names) <= PUBLIC_NAMES[package], "export a name from its module only, or remove a name without users"
    assert sum(PUBLIC_NAMES.values()) <= 420


LINES = {
    "d9d-dist": 9227,
    "d9d-loop": 40298,
    "d9d-metrics": 3975,
    "d9d-modules": 9356,
    "d9d-moe": 3152,
    "d9d-peft": 2833,
    "d9d-pipeline": 2827,
    "d9d-state": 8600,
}
"""Budget of source lines of each package. A new feature pays by a simplification."""


@pytest.mark.parametrize("package", LINES)
def test_the_source_of_a_package_is_within_its_budget(package: str) -> None:
    sources = (ROOT / "packages" / package / "src").rglob("*.py")
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources)
    assert lines <= LINES[package], "remove a mechanism that exists twice, or code without users"


def test_the_pages_are_within_their_budget() -> None:
    pages = list((ROOT / "docs").glob("*.md"))
    assert len(pages) <= 45, "merge a page, or write a section instead"
