from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_dist import UserError
from d9d_state import (
    StateMapper,
    TensorInfo,
    cast,
    concat,
    identity,
    identity_of,
    keep,
    parallel,
    rename,
    sequential,
    split,
    stack,
    transform,
    transpose,
    unstack,
)
from d9d_state.mapper.convert import permute
from d9d_state.mapper.cut import narrow, pad, select
from d9d_state.mapper.reshape import reshape


def _info(*shape: int, dtype: torch.dtype = torch.float32) -> TensorInfo:
    return TensorInfo(shape, dtype)


def test_one_report_lists_every_mismatch() -> None:
    mapper = parallel(
        identity("shape", "dtype", "absent"),
        rename("stray", "not_in_model"),
        stack(["left", "right"], "stacked"),
        keep("kept"),
    )
    source = {
        "shape": _info(2, 3),
        "dtype": _info(2, dtype=torch.int64),
        "stray": _info(1),
        "left": _info(1),
        "right": _info(2),
        "extra": _info(1),
    }
    target = {name: _info(2) for name in ("shape", "dtype", "absent", "stacked", "kept", "unfilled")}
    with pytest.raises(UserError) as caught:
        mapper.check(source=source, target=target)
    lines = str(caught.value).splitlines()
    assert lines == [
        "the checkpoint, the mapper and the model do not match:",
        "  missing in the file:",
        "    absent",
        '  in the file, but unused; drop() them, or pass unused="ignore":',
        "    extra",
        "  produced, but not in the model:",
        "    not_in_model",
        "  in the model, but not produced; keep() them if this is intended:",
        "    unfilled",
        "  wrong shape or dtype:",
        "    shape: got [2, 3] float32 from shape; expected [2] float32",
        "    dtype: got [2] int64 from dtype; expected [2] float32",
        "    stack(dim=0) on left, right failed: got shapes [1] and [2]; expected the same shape.",
    ]


def _arranged(f: str, g: str) -> StateMapper:
    return parallel(
        sequential(permute(f, dims=[1, 0]), select(f, dim=-1, index=0)),
        sequential(
            pad(g, dim=0, size=3, padded_size=5),
            narrow(g, start=1, length=4),
            reshape(g, g, [8]),
            cast(g, dtype=torch.float16),
        ),
    )


class _NoOperators(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise AssertionError(f"{func} ran")


def test_check_runs_only_user_functions() -> None:
    mapper = parallel(
        sequential(stack(["a.0", "a.1"], "b"), transpose("b"), unstack("b", ["c.0", "c.1"], dim=1)),
        sequential(concat(["d.0", "d.1"], "e"), split("e", ["f", "g"], [1, 3]), _arranged("f", "g")),
    )
    source = {name: _info(2, 2) for name in mapper.inputs}
    target = {"c.0": _info(2, 2), "c.1": _info(2, 2), "f": _info(2), "g": _info(8, dtype=torch.float16)}
    with _NoOperators():
        mapper.check(source=source, target=target)
        with pytest.raises(AssertionError, match="ran"):
            transform(["a"], ["a"], lambda a: [a + 1]).check(source={"a": _info(1)}, target={"a": _info(1)})


def test_check_returns_the_mapper() -> None:
    mapper = identity("a")
    assert mapper.check(source={"a": _info(2, dtype=torch.bfloat16)}, target={"a": _info(2)}) is mapper


def test_unused_tensors_can_be_ignored() -> None:
    identity("a").check(source={"a": _info(2), "b": _info(2)}, target={"a": _info(2)}, unused="ignore")


def test_reads_headers_of_a_folder_and_a_meta_model(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(3)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    with pytest.raises(UserError, match=r"bias: got \[3\] float32 from bias; expected \[2\] float32"):
        identity_of(model).check(source=tmp_path, target=model)


def test_a_tied_tensor_needs_one_name_only() -> None:
    one, two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    two.weight = one.weight
    model = nn.ModuleDict({"one": one, "two": two})
    both = identity("one.weight", "two.weight")
    both.check(source={"one.weight": _info(2, 2)}, target=model)
    both.check(source={"two.weight": _info(2, 2)}, target=model)
    with pytest.raises(UserError, match=r"missing in the file:\n    one\.weight\n    two\.weight"):
        both.check(source={}, target=model)
