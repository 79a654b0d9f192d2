"""Calls handlers with the events of a job, so that they can look on without the training being any different for it."""

import dataclasses
import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from d9d_dist import UserError
from d9d_loop.events import Event
from d9d_loop.own_random import own_random

E = TypeVar("E", bound=Event)
_Handler = Callable[[Any], object]


@final
class handles:  # noqa: N801  (a decorator)
    """Marks a method as a handler of events of some kinds, for `Events.subscribe`.

        class Watcher:
            @handles(StepDone)
            def look(self, event: StepDone) -> None: ...

    Args:
        kinds: The kinds of event.

    Raises:
        UserError: If one is no kind of event.
    """

    def __init__(self, *kinds: type[Event]) -> None:
        for kind in kinds:
            _check_kind(kind)
        self._kinds = kinds

    def __call__(self, method: Callable[[Any, Any], None]) -> "_MarkedMethod":
        """Mark a method."""
        return _MarkedMethod(method, self._kinds)


@final
class _MarkedMethod:
    """A method that knows which events it handles; otherwise like any other."""

    def __init__(self, method: Callable[[Any, Any], None], kinds: tuple[type[Event], ...]) -> None:
        self.method, self.kinds = method, kinds

    def __get__(self, instance: object | None, owner: type) -> Any:
        return self if instance is None else MethodType(self.method, instance)


@final
class Events:
    """Calls handlers with events, on every rank, in the order of subscription.

    A handler changes nothing by accident: it runs without gradients, draws random numbers from a stream of its own (a
    function of the seed, the kind of event, its step and the handler's place; equal on all ranks), modules that it
    switches between training and evaluation are switched back, and to change a tensor of the event itself is an error.

    Args:
        seed: Of the handlers' random numbers.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed
        self._handlers: dict[type[Event], list[_Handler]] = {}
        self._phase: Callable[[str], AbstractContextManager[None]] = nullcontext

    def on(self, kind: type[E], handler: Callable[[E], object]) -> None:
        """Call `handler` with every event of a kind.

        Raises:
            UserError: If that is no kind of event.
        """
        _check_kind(kind)
        self._handlers.setdefault(kind, []).append(handler)

    def subscribe(self, *subscribers: object) -> None:
        """Call the methods of objects that `handles` marks, with events of the kinds that it names.

        Raises:
            UserError: If an object has no such method.
        """
        for subscriber in subscribers:
            marked = [
                (name, method)
                for name, method in inspect.getmembers_static(type(subscriber))
                if isinstance(method, _MarkedMethod)
            ]
            if not marked:
                raise UserError(
                    f"{type(subscriber).__name__} has no method that handles an event; expected at least one that is "
                    "marked by @handles(StepDone), or another kind of event."
                )
            for _, method in marked:
                for kind in method.kinds:
                    self.on(kind, method.__get__(subscriber, type(subscriber)))

    def watch(self, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        """Call the handlers of each event within a phase such as "the handlers of StepDone", e.g. of a `HangWatchdog`.

        Without one of their own, handlers would run on the time limit of whatever the job does around them.
        """
        self._phase = phase

    def emit(self, event: Event) -> None:
        """Call the handlers of an event. What a handler raises ends the job, with a note that names the handler.

        Raises:
            UserError: If a handler changed a tensor of the event.
        """
        kind, handlers = type(event).__name__, self._handlers.get(type(event), ())
        if not handlers:
            return
        with self._phase(f"the handlers of {kind}"):
            for place, handler in enumerate(handlers):
                try:
                    with _looking_on(event), own_random(self._seed, kind, event.step, place, device=True):
                        handler(event)
                except Exception as error:
                    error.add_note(f"raised by the handler {_name_of(handler)} of {kind}")
                    raise


def _check_kind(kind: object) -> None:
    if not (isinstance(kind, type) and issubclass(kind, Event)):
        raise UserError(f"got {kind!r} as a kind of event; expected a class such as StepDone.")


def _name_of(handler: _Handler) -> str:
    return getattr(handler, "__qualname__", repr(handler))


@contextmanager
def _looking_on(event: Event) -> Generator[None]:
    """Without gradients; the event's tensors have to stay as they are, and modules' modes are put back."""
    values = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    versions = {name: value._version for name, value in values.items() if isinstance(value, Tensor)}
    modes = [
        (module, module.training)
        for value in values.values()
        if isinstance(value, nn.Module)
        for module in value.modules()
    ]
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
    for name, version in versions.items():
        if values[name]._version != version:
            raise UserError(
                f"{name} of {type(event).__name__} was changed in place; expected that handlers only look at it. Work "
                "on a copy: `.clone()`."
            )
