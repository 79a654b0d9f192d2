"""Event dispatch. Handlers are isolated, so they cannot change the training by accident."""

import dataclasses
import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar, final, runtime_checkable

import torch
from torch import Tensor, nn

from d9d_dist import UserError
from d9d_loop.events import Event
from d9d_loop.isolation import isolated_random

E = TypeVar("E", bound=Event)
P = ParamSpec("P")
_Handler = Callable[[Any], object]
_KINDS = "__d9d_events__"


@runtime_checkable
class StatefulSubscriber(Protocol):
    """Subscriber whose state is saved with each checkpoint, and loaded on a resume or rollback.

    The state is JSON, in which tensors are allowed. It may differ between ranks.
    """

    def state_dict(self) -> Any:
        """Return the state to save: JSON values and tensors."""

    def load_state_dict(self, state: Any) -> None:
        """Set the state to a saved one."""


def on_event(*kinds: type[Event]) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Mark a method as a handler of event classes, for `Events.subscribe`.

    For example, in the class of a subscriber:

        @on_event(StepDone)
        def look(self, event: StepDone) -> None: ...
    """
    for kind in kinds:
        _check_kind(kind)

    def mark(method: Callable[P, None]) -> Callable[P, None]:
        # Mark a wrapper: another class may use the same function for other events. Decorators may be stacked.
        @wraps(method)
        def handler(*args: P.args, **kwargs: P.kwargs) -> None:
            method(*args, **kwargs)

        vars(handler)[_KINDS] = (*vars(handler).get(_KINDS, ()), *kinds)
        return handler

    return mark


@final
class Events:
    """Dispatcher of events to their handlers, on every rank and in the order of subscription.

    Handlers are isolated from the training:

    - They run without gradients.
    - Each call has its own random stream, a function of the seed, the event class, its step and the handler's index.
      The stream is equal on all ranks.
    - The training modes of the event's modules are restored after each call.
    - Changing a tensor of the event in place is an error.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed
        self._handlers: dict[type[Event], list[_Handler]] = {}
        self._stateful: dict[str, StatefulSubscriber] = {}
        self._phase: Callable[[str], AbstractContextManager[None]] = nullcontext

    def on(self, kind: type[E], handler: Callable[[E], object]) -> None:
        """Register a handler for events of exactly this class, excluding subclasses."""
        _check_kind(kind)
        _check_handler(handler)
        self._handlers.setdefault(kind, []).append(handler)

    def subscribe(self, *subscribers: object) -> None:
        """Register the methods marked by `on_event`. An object without a marked method raises `UserError`.

        The state of a `StatefulSubscriber` is saved with the checkpoints of the job.
        """
        for subscriber in subscribers:
            marked = [
                (kind, name)
                for name, method in inspect.getmembers_static(type(subscriber), inspect.isfunction)
                for kind in vars(method).get(_KINDS, ())
            ]
            if not marked:
                raise UserError(
                    f"{type(subscriber).__name__} has no event handlers; expected at least one method "
                    "decorated with @on_event(StepDone), or another kind of event."
                )
            for kind, name in marked:
                self.on(kind, getattr(subscriber, name))
            if isinstance(subscriber, StatefulSubscriber):
                kind_name = type(subscriber).__qualname__
                number = sum(type(each) is type(subscriber) for each in self._stateful.values())
                self._stateful[f"{kind_name} {number + 1}" if number else kind_name] = subscriber

    @property
    def stateful(self) -> Mapping[str, StatefulSubscriber]:
        """Subscribers with state, by the name of their class, and by a number if several have the same class."""
        return self._stateful

    def watch(self, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        """Set the context manager that handlers run in, such as `HangWatchdog.phase`.

        `emit` calls it with a name such as "the handlers of StepDone". Without it, the handlers' time counts against
        the timeout of the surrounding phase.
        """
        self._phase = phase

    def emit(self, event: Event) -> None:
        """Call the handlers of an event.

        An exception of a handler propagates with a note that names the handler.

        Raises:
            UserError: If a handler changed a tensor of the event in place.
        """
        kind, handlers = type(event).__name__, self._handlers.get(type(event), ())
        if not handlers:
            return
        with self._phase(f"the handlers of {kind}"):
            for place, handler in enumerate(handlers):
                try:
                    with _read_only(event), isolated_random(self._seed, kind, event.step, place, device=True):
                        handler(event)
                except Exception as error:
                    name = getattr(handler, "__qualname__", repr(handler))
                    error.add_note(f"raised by the handler {name} of {kind}")
                    raise


def _check_kind(kind: object) -> None:
    if not (isinstance(kind, type) and issubclass(kind, Event)):
        raise UserError(f"got {kind!r}; expected an event class such as StepDone.")


def _check_handler(handler: Callable[..., object]) -> None:
    """Raise `UserError` if a handler cannot be called with one event, so that it does not fail at its first event."""
    if (why := why_not_called(handler)) is not None:
        name = getattr(handler, "__qualname__", repr(handler))
        raise UserError(
            f"the event handler {name} cannot be called with an event: {why}; expected a function of one argument, "
            "the event."
        )


def why_not_called(function: Callable[..., object]) -> TypeError | None:
    """Return why a function cannot be called with one argument; `None` if it can, or has no signature."""
    try:
        inspect.signature(function).bind(None)
    except ValueError:  # a function of C
        return None
    except TypeError as error:
        return error
    return None


@contextmanager
def _read_only(event: Event) -> Generator[None]:
    """Disable gradients, restore modules' modes on exit, and raise `UserError` if a tensor of the event was changed."""
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
                f"{name} of {type(event).__name__} was changed in place; expected handlers to only read it. Work "
                "on a copy: `.clone()`."
            )
