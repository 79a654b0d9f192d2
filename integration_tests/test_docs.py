"""Every Python snippet of the documentation and the READMEs runs; `snippets.py` says how."""

import ast
import re
from pathlib import Path

import pytest
import torch.distributed as dist
from commands import run_commands
from page_files import PAGE_FILES
from snippets import MAIN_GUARD, blocks, run_page

REHEARSES = True  # see quick_jobs.py

ROOT = Path(__file__).resolve().parents[1]
_WITHOUT_SNIPPETS = {"comparison.md", "glossary.md", "surprises.md"}
_WITH_OTHER_LIBRARIES = {"coming_from.md"}  # shows code of other libraries, which does not run
GUIDES = sorted(path for path in (ROOT / "docs").glob("*.md") if path.name not in _WITHOUT_SNIPPETS)
PAGES = [*GUIDES, *sorted(ROOT.glob("packages/*/README.md")), *sorted(ROOT.glob("README.md"))]


NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]
_SAMPLE_OF_COMMANDS = "docs/inference.md"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
@pytest.mark.sample(
    "docs/index.md", "docs/quickstart.md", _SAMPLE_OF_COMMANDS, *(name for name in NAMES if name.endswith("README.md"))
)
def test_snippets_run(page: Path, tmp_path: Path, exhaustive: bool) -> None:
    name = page.relative_to(ROOT).as_posix()
    has_commands = exhaustive or name == _SAMPLE_OF_COMMANDS
    if has_commands and name in PAGE_FILES:
        PAGE_FILES[name](tmp_path)
    run_page(page, tmp_path, run_shell=run_commands if has_commands else None)
    assert not dist.is_initialized(), "a snippet left its process group running"


@pytest.mark.parametrize("page", GUIDES, ids=[path.name for path in GUIDES])
def test_every_guide_has_snippets_and_all_of_them_run(page: Path) -> None:
    shown = [block for block in blocks(page.read_text(encoding="utf-8")) if block.is_python]
    assert shown
    if page.name not in _WITH_OTHER_LIBRARIES:
        assert all(block.runs for block in shown)


@pytest.mark.parametrize("page", ["find_your_way.md", "comparison.md"])
def test_files_that_a_page_names_exist_and_define_the_names(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    sources = [*ROOT.glob("packages/*/src/**/*"), *ROOT.glob("integration_tests/**/*.py")]
    files = set(re.findall(r"`([\w/*]+\.(?:py|cpp))`", text))
    assert len(files) > 10
    assert not [file for file in files if not any(path.match(file) for path in sources)]
    for name, file in re.findall(r"`([A-Za-z_][\w.]*)` in\s+`(d9d_\w+/[\w/]+\.py)`", text):
        (path,) = ROOT.glob(f"packages/*/src/{file}")
        defined = re.findall(r"^ *(?:class |def )?(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert name.rpartition(".")[2] in defined, f"{file} does not define {name}"


def test_each_surprise_names_a_script_of_its_version() -> None:
    _, _, text = (ROOT / "docs/surprises.md").read_text(encoding="utf-8").partition("## Adapters")
    rows = [
        line.split(" | ")
        for line in text.splitlines()
        if line.startswith("| ") and "Library" not in line and "---" not in line
    ]
    assert len(rows) > 20
    for row in rows:
        script = ROOT / "findings" / f"{row[-1].strip(' |`')}.sh"
        assert row[0].strip("| ").partition(",")[0] in script.read_text(encoding="utf-8")


def test_the_layouts_of_vision_language_models_are_tested() -> None:
    """The table of the page names families and layouts of the test that compares all of them."""
    tests = ROOT / "packages" / "d9d-loop" / "tests"
    found = {}
    for name, path in {"FAMILIES": "vision_cases.py", "MESHES": "jobs/test_vision_layouts.py"}.items():
        tree = ast.parse((tests / path).read_text(encoding="utf-8"))
        (values,) = [
            each.value for each in tree.body if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == name
        ]
        assert isinstance(values, ast.Dict)
        found[name] = {key.value for key in values.keys if isinstance(key, ast.Constant)}
    lines = (ROOT / "docs" / "vision_language_models.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.count("|") > 6]
    assert set(rows[0][2:]) <= found["MESHES"]
    assert {row[1].strip("`") for row in rows[2:]} <= found["FAMILIES"]
    assert len(rows) > 7


def test_guides_and_other_pages_are_found() -> None:
    assert len(GUIDES) >= 12
    assert len(PAGES) >= len(GUIDES) + 9


def _page(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def test_blocks_share_a_namespace_and_titled_blocks_are_files(tmp_path: Path) -> None:
    page = _page(
        tmp_path,
        '```toml title="conf/a.toml"\nx = 1\n```\ntext\n```python\nfrom pathlib import Path\nx = 2\n```\n'
        '```python\nassert x == 2\nassert Path("conf/a.toml").read_text() == "x = 1\\n"\nPath("ran").touch()\n```\n',
    )
    assert run_page(page, tmp_path) == 2
    assert (tmp_path / "ran").exists()


def test_a_script_runs_as_main(tmp_path: Path) -> None:
    page = _page(tmp_path, f'```python\n{MAIN_GUARD}\n    raise SystemExit("ran as a script")\n```\n')
    with pytest.raises(SystemExit, match="ran as a script"):
        run_page(page, tmp_path)


def test_a_titled_snippet_is_a_file_and_shares_the_namespace(tmp_path: Path) -> None:
    page = _page(
        tmp_path,
        "```python\nx = 2\ndef here(): ...\n```\n"
        '```python title="there.py"\ndef there(): return x\n```\n'
        "```python\nimport inspect\nassert there() == 2\n"
        'assert inspect.getsourcefile(there).endswith("/there.py")\n'
        'assert inspect.getsourcefile(here).endswith("_page.py")\n'
        'assert inspect.getsource(there) == "def there(): return x\\n"\n'
        "assert inspect.getmodule(there) is not None\n```\n",
    )
    assert run_page(page, tmp_path) == 3


def test_commands_run_in_the_order_of_the_page(tmp_path: Path) -> None:
    page = _page(
        tmp_path,
        '```python title="a.py"\nimport os, sys\nprint(os.environ.get("D9D_X"), sys.argv, file=open("out", "a"))\n```\n'
        '```sh\nD9D_X=1 python a.py "b c" \\\n    $(echo d)  # comment\npython a.py\n```\n'
        "```python\nfound = open('out').read().splitlines()\n"
        """assert found[1:] == ["1 ['a.py', 'b c', 'd']", "None ['a.py']"]\n```\n"""
        "```bash exit=2\nd9d-plan missing.toml\n```\n",
    )
    run_page(page, tmp_path, run_shell=run_commands)
    failing = _page(tmp_path, "```sh\nd9d-plan missing.toml\n```\n")
    with pytest.raises(AssertionError, match=r"^d9d-plan missing\.toml exited with \[.*2.*\]; expected 0"):
        run_page(failing, tmp_path, run_shell=run_commands)
    with pytest.raises(ValueError, match=r"expected one simple command in a line\. Mark the block `no-run`"):
        run_page(_page(tmp_path, "```sh\nls | wc\n```\n"), tmp_path, run_shell=run_commands)
    with pytest.raises(ValueError, match=r"line 1: expected the reason above the block: <!-- not run: \.\.\. -->"):
        run_page(_page(tmp_path, "```sh no-run\nls\n```\n"), tmp_path)


def test_pages_with_files_exist_and_run_commands() -> None:
    with_commands = {
        name
        for name, page in zip(NAMES, PAGES, strict=True)
        if any(block.is_shell and block.runs for block in blocks(page.read_text(encoding="utf-8")))
    }
    assert PAGE_FILES.keys() <= with_commands
    others = {path for path in (ROOT / "docs").glob("*.md") if path not in PAGES}
    for path in others:
        shown = blocks(path.read_text(encoding="utf-8"))
        assert not [block for block in shown if block.is_shell and block.runs], f"{path}: no test runs its commands"
    assert len(with_commands) >= 7


def test_a_failing_snippet_fails_with_its_line(tmp_path: Path) -> None:
    page = _page(tmp_path, "# Title\n\n```python\nx = 1\n```\n\n```python\nx = 2\nassert x == 3\n```\n")
    with pytest.raises(AssertionError) as failure:
        run_page(page, tmp_path)
    assert failure.traceback[-1].lineno + 1 == 9
    assert failure.value.__notes__[-1] == f"in the snippet at {page}:8"


def test_a_snippet_that_does_not_compile_fails(tmp_path: Path) -> None:
    with pytest.raises(SyntaxError):
        run_page(_page(tmp_path, "```python\nx = \n```\n"), tmp_path)


def test_a_failing_test_on_a_page_fails(tmp_path: Path) -> None:
    page = _page(tmp_path, "```python\ndef test_it():\n    raise AssertionError('it does not hold')\n```\n")
    with pytest.raises(AssertionError, match="it does not hold"):
        run_page(page, tmp_path)


def test_a_skipped_block_needs_a_reason(tmp_path: Path) -> None:
    block = "```python no-run\nraise RuntimeError\n```\n"
    assert run_page(_page(tmp_path, f"<!-- not run: it needs a cluster -->\n{block}"), tmp_path) == 0
    with pytest.raises(ValueError, match=r"line 2: expected the reason above the block: <!-- not run: \.\.\. -->"):
        run_page(_page(tmp_path, f"text\n{block}"), tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- item\n\n    ```python\n    x = 1\n    ```\n", "line 3: expected a fence of three backticks"),
        ("> ```python\n> x = 1\n> ```\n", "line 1: expected a fence of three backticks"),
        ("````python\nx = 1\n````\n", "line 1: expected a fence of three backticks"),
        ("~~~python\nx = 1\n~~~\n", "line 1: expected a fence of three backticks"),
        ("```python\nx = 1\n", "line 1: the block is never closed"),
    ],
)
def test_no_block_is_skipped_silently(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_page(_page(tmp_path, text), tmp_path)
