import random
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from d9d_dist import UserError
from d9d_loop import (
    CheckpointSaved,
    CheckpointStarted,
    EvaluationDone,
    Events,
    Failed,
    GradientsReady,
    StepDone,
    on_event,
)
from d9d_loop.events import Event


def test_handlers_get_events_of_their_class_in_order_of_subscription() -> None:
    seen: list[str] = []
    events = Events()
    events.on(CheckpointSaved, lambda event: seen.append(f"a{event.step}"))
    events.on(EvaluationDone, lambda event: seen.append(f"evaluation {event.values['loss']}"))
    events.on(CheckpointSaved, lambda event: seen.append(f"b{event.step}"))
    events.emit(CheckpointSaved(3))
    events.emit(EvaluationDone(4, {"loss": 0.5}, lambda: None, lambda _: None))
    assert seen == ["a3", "b3", "evaluation 0.5"]


def test_without_handlers_nothing_happens() -> None:
    Events().emit(CheckpointSaved(1))


def _fail(event: CheckpointSaved) -> None:
    raise RuntimeError(f"no room at step {event.step}")


def test_errors_of_a_handler_name_it() -> None:
    events = Events()
    later: list[int] = []
    events.on(CheckpointSaved, _fail)
    events.on(CheckpointSaved, lambda event: later.append(event.step))
    with pytest.raises(RuntimeError, match="no room at step 3") as error:
        events.emit(CheckpointSaved(3))
    assert error.value.__notes__ == ["raised by the handler _fail of CheckpointSaved"]
    assert later == []


def test_a_handler_without_a_name_is_named_by_its_repr() -> None:
    events = Events()
    events.on(CheckpointSaved, partial(_fail))
    with pytest.raises(RuntimeError) as error:
        events.emit(CheckpointSaved(3))
    assert error.value.__notes__[0].startswith("raised by the handler functools.partial(<function _fail")


class _Watcher:
    def __init__(self) -> None:
        self.seen: list[str] = []

    @on_event(CheckpointSaved, CheckpointStarted)
    def look(self, event: Event) -> None:
        self.seen.append(f"{type(event).__name__} {event.step}")

    @on_event(Failed)
    def mourn(self, event: Failed) -> None:
        self.seen.append(str(event.error))


def test_marked_methods_are_subscribed_at_once() -> None:
    events, first, second = Events(), _Watcher(), _Watcher()
    events.subscribe(first, second)
    for event in (CheckpointStarted(2), CheckpointSaved(2), Failed(3, ValueError("lost"))):
        events.emit(event)
    assert first.seen == second.seen == ["CheckpointStarted 2", "CheckpointSaved 2", "lost"]
    first.look(CheckpointSaved(9))  # decorated methods can be called directly
    assert first.seen[-1] == "CheckpointSaved 9"


def test_decorators_of_a_handler_can_be_stacked() -> None:
    class Stacked:
        @on_event(CheckpointSaved)
        @on_event(CheckpointStarted)
        def look(self, event: Event) -> None:
            seen.append(type(event))

    seen: list[type[Event]] = []
    events = Events()
    events.subscribe(Stacked())
    events.emit(CheckpointStarted(2))
    events.emit(CheckpointSaved(2))
    assert seen == [CheckpointStarted, CheckpointSaved]


def test_classes_can_share_a_function_for_different_events() -> None:
    def note(self: object, event: Event) -> None:
        seen.append((type(self).__name__, event.step))

    class Saved:
        look = on_event(CheckpointSaved)(note)

    class Started:
        look = on_event(CheckpointStarted)(note)

    seen: list[tuple[str, int]] = []
    events = Events()
    events.subscribe(Saved(), Started())
    events.emit(CheckpointStarted(1))
    events.emit(CheckpointSaved(2))
    assert seen == [("Started", 1), ("Saved", 2)]


def test_objects_without_handlers_cannot_be_subscribed() -> None:
    with pytest.raises(UserError, match=r"^list has no event handlers; expected at least one .* @on_event"):
        Events().subscribe([])


@pytest.mark.parametrize("kind", [int, "StepDone", CheckpointSaved(1)])
def test_only_event_classes_can_be_subscribed_to(kind: Any) -> None:
    for wait in (lambda: Events().on(kind, print), lambda: on_event(kind)):
        with pytest.raises(UserError, match=r"^got .*; expected an event class such as StepDone\.$"):
            wait()


@pytest.mark.parametrize("handler", [lambda: None, lambda event, step: None], ids=["none", "two"])
def test_a_handler_that_cannot_take_an_event_is_an_error_at_once(handler: Any) -> None:
    message = r"^the event handler .*<lambda> cannot be called with an event: .*; expected a function of one argument"
    with pytest.raises(UserError, match=message):
        Events().on(StepDone, handler)
    Events().on(StepDone, print)
    Events().on(StepDone, partial(lambda step, event: None, 1))


def _draw() -> tuple[float, float, float]:
    return random.random(), torch.rand(()).item(), float(np.random.rand())  # noqa: S311


def test_handlers_have_their_own_random_streams() -> None:
    drawn: list[tuple[float, ...]] = []
    expected = []
    for emits in (False, True):
        random.seed(1)
        torch.manual_seed(1)
        np.random.seed(1)
        for step in range(2):
            if emits:
                events = Events(seed=5)  # as in a resumed job
                for _ in range(2):
                    events.on(CheckpointSaved, lambda _event: drawn.append(_draw()))
                events.emit(CheckpointSaved(step))
            expected.append(_draw())
    assert expected[:2] == expected[2:]
    assert len(set(drawn)) == 4  # one per step and handler
    again, first = Events(seed=5), drawn[0]
    again.on(CheckpointSaved, lambda _event: drawn.append(_draw()))
    again.emit(CheckpointSaved(0))
    assert drawn[-1] == first


def test_handlers_change_neither_modes_nor_gradients() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()
    events = Events()

    def use(event: GradientsReady) -> None:
        event.model.eval()
        event.model.get_submodule("1").train()
        assert not event.model(torch.ones(2)).requires_grad

    events.on(GradientsReady, use)
    events.emit(GradientsReady(1, model, torch.ones(())))
    assert [module.training for module in model.modules()] == [True, True, False]


def test_handlers_run_in_their_own_watchdog_phase() -> None:
    events, seen = Events(), []

    @contextmanager
    def phase(doing: str) -> Generator[None]:
        seen.append(f"begin {doing}")
        yield
        seen.append(f"end {doing}")

    events.watch(phase)
    for name in ("a", "b"):
        events.on(CheckpointSaved, lambda _event, name=name: seen.append(name))
    events.emit(CheckpointSaved(0))
    events.emit(StepDone(1, torch.ones(()), torch.ones(()), 0.1, nullcontext))  # without handlers
    assert seen == ["begin the handlers of CheckpointSaved", "a", "b", "end the handlers of CheckpointSaved"]


def test_gradients_may_be_changed() -> None:
    model, events = nn.Linear(1, 1, bias=False), Events()
    model.weight.grad = torch.ones(1, 1)

    def triple(event: GradientsReady) -> None:
        for parameter in event.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(3)

    events.on(GradientsReady, triple)
    events.emit(GradientsReady(1, model, torch.ones(())))
    assert model.weight.grad.item() == 3


def test_event_tensors_are_read_only() -> None:
    loss, events = torch.ones(()), Events()
    event = StepDone(1, loss, torch.ones(()), 0.1, nullcontext)
    events.on(StepDone, lambda event: event.loss.mul_(2))
    with pytest.raises(UserError, match=r"^loss of StepDone was changed in place; expected .* `\.clone\(\)`") as error:
        events.emit(event)
    assert "raised by the handler" in error.value.__notes__[0]
