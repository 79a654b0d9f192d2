import pytest

from d9d_dist import MeshConfig, UserError
from d9d_dist.testing import run_ranks
from d9d_state import StateError
from d9d_state._ranks import failing_together, is_main, num_ranks


def _place() -> tuple[bool, int]:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        return is_main(ctx), num_ranks(ctx)


def test_first_rank_is_the_main_process() -> None:
    assert run_ranks(_place) == [(True, 2), (False, 2)]


def test_one_process_is_the_main_process() -> None:
    assert is_main(None)
    assert num_ranks(None) == 1


_FAILURES: list[tuple[type[Exception], list[Exception | None]]] = [
    (StateError, [None, OSError("full")]),
    (StateError, [StateError("damaged"), OSError("full")]),
    (StateError, [UserError("wrong"), OSError("full")]),
    (UserError, [UserError("wrong"), None]),
    (UserError, [UserError("wrong"), UserError("wrong")]),
    (UserError, [UserError("a"), UserError("b")]),
]


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _fail() -> list[str]:
    messages = []
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        for kind, errors in _FAILURES:
            with pytest.raises(kind) as caught, failing_together(ctx, "writing"):
                _raise(errors[ctx.rank])
            messages.append(str(caught.value))
    return messages


def test_error_of_a_rank_is_raised_on_all_ranks() -> None:
    expected = [
        "rank 1: writing: full",
        "rank 0: damaged; rank 1: writing: full",
        "rank 0: wrong; rank 1: writing: full",
        "wrong",
        "wrong",
        "rank 0: a; rank 1: b",
    ]
    assert run_ranks(_fail) == [expected, expected]


def test_one_process_raises_its_own_error() -> None:
    with pytest.raises(StateError, match=r"^writing: full$"), failing_together(None, "writing"):
        raise OSError("full")
    with pytest.raises(KeyError), failing_together(None, "writing"):
        raise KeyError
    with failing_together(None, "writing"):
        pass
