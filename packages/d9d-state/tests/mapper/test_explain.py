import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d9d_state import (
    TensorInfo,
    cast,
    concat,
    drop,
    identity,
    keep,
    parallel,
    rename,
    repeat,
    scope,
    sequential,
    split,
    stack,
    transpose,
)


def test_explain_shows_every_tensor_once() -> None:
    mapper = parallel(
        sequential(concat(["q", "k"], "qk", sizes=[1, 2]), transpose("qk")),
        rename("a", "b"),
        identity("c"),
        drop("d"),
        sequential(split("l", ["x", "y"], [1, 1]), parallel(drop("x"), identity("y"))),
        keep("e"),
        sequential(keep("f"), cast("f", dtype=torch.float16)),
    )
    assert mapper.explain().splitlines() == [
        "6 tensors -> 6 tensors, 7 groups",
        "  q, k -> concat(dim=0, sizes=[1, 2]) -> (value 2)",
        "  (value 2) -> transpose(0, 1) -> qk",
        "  a -> b",
        "  c -> c",
        "  d -> (dropped)",
        "  l -> split(dim=0, sizes=[1, 1]) -> (dropped), y",
        "  (kept) -> e",
        "  (kept) -> f",
    ]


def test_explain_folds_groups_that_differ_in_numbers() -> None:
    experts = sequential(stack([f"e.{index}.up" for index in range(4)], "s"), transpose("s", "up"))
    layer = scope("model.{i}.", "layers.{i}.", parallel(rename("w1", "w"), experts, rename("norm", "norm")))
    mapper = parallel(rename("emb", "emb"), repeat(layer, i=range(3)), *(rename(f"b{i}", f"c{i + 1}") for i in (0, 2)))
    assert mapper.explain().splitlines() == [
        "21 tensors -> 12 tensors, 12 groups",
        "  emb -> emb",
        "  model.{0..2}.w1 -> layers.{0..2}.w  (3 groups)",
        "  model.{0..2}.e.{0..3}.up -> stack(dim=0) -> (value 4)  (3 groups)",
        "  (value 4) -> transpose(0, 1) -> layers.{0..2}.up",
        "  model.{0..2}.norm -> layers.{0..2}.norm  (3 groups)",
        "  b{0,2} -> c{1,3}  (2 groups)",
    ]
    assert len(mapper.explain(fold=False).splitlines()) == 1 + 12 + 3
    assert "  model.1.e.0.up, model.1.e.1.up, model.1.e.2.up, model.1.e.3.up -> stack" in mapper.explain(fold=False)


def test_explain_does_not_fold_other_differences() -> None:
    mapper = parallel(
        concat(["a.0", "a.1"], "x.0"),
        concat(["a.2", "a.3"], "x.1", dim=1),
        concat(["a.4", "a.5", "a.7"], "x.2"),
        *(rename(f"w.{number}", f"{number}") for number in ("01", "02")),
        rename("c.{i}", "d.{i}"),
    )
    assert mapper.explain().splitlines()[1:] == [
        "  a.0, a.1 -> concat(dim=0) -> x.0",
        "  a.2, a.3 -> concat(dim=1) -> x.1",
        "  a.4, a.5, a.7 -> concat(dim=0) -> x.2",
        "  w.01 -> 01",
        "  w.02 -> 02",
        "  c.{i} -> d.{i}",
    ]


def test_explain_shows_known_shapes() -> None:
    mapper = parallel(
        sequential(stack(["a.0", "a.1", "a.2"], "s"), transpose("s", "b")),
        concat(["c", "d"], "e"),
        concat(["f.0", "f.1", "f.2"], "g"),
        *(rename(f"h.{index}", f"i.{index}") for index in range(4)),
    )
    infos = {f"a.{index}": TensorInfo((4, 2), torch.bfloat16) for index in range(3)}
    infos |= {"c": TensorInfo((2,), torch.int64)}
    infos |= {f"f.{index}": TensorInfo((1, index + 1), torch.int64) for index in range(3)}
    infos |= {f"h.{index}": TensorInfo((1 + index // 2,), torch.int64) for index in range(4)}
    assert mapper.explain(infos=infos).splitlines()[1:] == [
        "  a.{0..2} [4, 2] bfloat16 -> stack(dim=0) -> (value 3) [3, 4, 2] bfloat16",
        "  (value 3) [3, 4, 2] bfloat16 -> transpose(0, 1) -> b [4, 3, 2] bfloat16",
        "  c [2] int64, d -> concat(dim=0) -> e",
        "  f.0 [1, 1] int64, f.1 [1, 2] int64, f.2 [1, 3] int64 -> concat(dim=0) -> g",
        "  h.{0..1} [1] int64 -> i.{0..1} [1] int64  (2 groups)",
        "  h.{2..3} [2] int64 -> i.{2..3} [2] int64  (2 groups)",
    ]


def test_explain_writes_a_mermaid_flowchart() -> None:
    mapper = parallel(
        repeat(sequential(concat(["q.{i}", "k.{i}"], "qk"), transpose("qk", "qk.{i}")), i=range(3)),
        rename("a", "b"),
        drop("c"),
        keep("d"),
        sequential(split("l", ["x", "y"], [1, 1]), parallel(drop("x"), identity("y"))),
    )
    infos = {f"{name}.{index}": TensorInfo((2, 1), torch.int64) for name in "qk" for index in range(3)}
    assert mapper.explain("mermaid", infos=infos).splitlines() == [
        "flowchart LR",
        '  subgraph n0["3 groups"]',
        '    n3{{"concat(dim=0)"}}',
        '    n1["q.{0..2} [2, 1] int64"] --> n3',
        '    n2["k.{0..2} [2, 1] int64"] --> n3',
        '    n5{{"transpose(0, 1)"}}',
        '    n3 -- "[4, 1] int64" --> n5',
        '    n5 --> n4(["qk.{0..2} [1, 4] int64"])',
        "  end",
        '  n7["a"] --> n6(["b"])',
        '  n9["c"] --> n8[/"dropped"/]',
        '  n13{{"split(dim=0, sizes=[1, 1])"}}',
        '  n12["l"] --> n13',
        '  n13 --> n10(["y"])',
        '  n13 --> n11[/"dropped"/]',
        '  n15[/"kept"/] --> n14(["d"])',
    ]


# The subset of Mermaid's grammar in use: shapes with quoted text, arrows with optional text, subgraphs.
_TEXT = r'"(?:[^"#&<>`;%\\\n]|#\d+;)+"'
_SHAPE = rf"(?:\[{_TEXT}\]|\(\[{_TEXT}\]\)|\[/{_TEXT}/\]|\{{\{{{_TEXT}\}}\}})"
_LINE = re.compile(rf"n\d+{_SHAPE}?(?: (?:-- {_TEXT} )?--> n\d+{_SHAPE}?)?")


@given(st.text(min_size=1), st.text(min_size=1))
def test_mermaid_escapes_names(one: str, other: str) -> None:
    mapper = parallel(
        rename(f"a{one}", f"a{other}"),
        repeat(stack([f"b{one}{{x}}", f"c{other}{{x}}"], f"b{one}{{x}}"), x=range(2)),
        keep(f"d{one}"),
    )
    first, *lines = mapper.explain("mermaid").split("\n")
    assert first == "flowchart LR"
    for line in lines:
        assert line == "  end" or re.fullmatch(rf"  subgraph n\d+\[{_TEXT}\]", line) or _LINE.fullmatch(line.strip())
    shown = re.sub(r"#(\d+);", lambda match: chr(int(match[1])), "\n".join(lines))
    assert f'["a{one}"]' in shown
    assert f'(["a{other}"])' in shown


def test_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="got format 'html'; expected 'text' or 'mermaid'"):
        identity("a").explain("html")  # ty: ignore[invalid-argument-type]
