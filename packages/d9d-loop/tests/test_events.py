from functools import partial

import pytest

from d9d_loop import CheckpointSaved, EvaluationDone, Events


def test_handlers_are_called_in_the_order_of_subscription_with_their_kind_only() -> None:
    seen: list[str] = []
    events = Events()
    events.on(CheckpointSaved, lambda event: seen.append(f"a{event.step}"))
    events.on(EvaluationDone, lambda event: seen.append(f"evaluation {event.values['loss']}"))
    events.on(CheckpointSaved, lambda event: seen.append(f"b{event.step}"))
    events.emit(CheckpointSaved(3))
    events.emit(EvaluationDone(4, {"loss": 0.5}))
    assert seen == ["a3", "b3", "evaluation 0.5"]


def test_without_handlers_nothing_happens() -> None:
    Events().emit(CheckpointSaved(1))


def _fail(event: CheckpointSaved) -> None:
    raise RuntimeError(f"no room at step {event.step}")


def test_what_a_handler_raises_names_the_handler() -> None:
    events = Events()
    later: list[int] = []
    events.on(CheckpointSaved, _fail)
    events.on(CheckpointSaved, lambda event: later.append(event.step))
    with pytest.raises(RuntimeError, match="no room at step 3") as error:
        events.emit(CheckpointSaved(3))
    assert error.value.__notes__ == ["raised by the handler _fail of CheckpointSaved"]
    assert later == []


def test_a_handler_without_a_name_is_named_by_what_it_is() -> None:
    events = Events()
    events.on(CheckpointSaved, partial(_fail))
    with pytest.raises(RuntimeError) as error:
        events.emit(CheckpointSaved(3))
    assert error.value.__notes__[0].startswith("raised by the handler functools.partial(<function _fail")
