"""A part of a job that a configuration file names by its import path, with the arguments to make it of."""

import importlib
import inspect
import re
import typing
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PydanticSchemaGenerationError, create_model, field_validator

from d9d_dist import UserError
from d9d_loop.config_source import validate_config
from d9d_loop.section import Section

_MISSING = object()
_IMPORT_PATH = r"^\w+(\.\w+)*:\w+(\.\w+)*$"


class Component(Section):
    """What to call, and with which arguments: `model = {use = "my_project.models:Decoder", hidden_size = 64}`.

    Arguments are checked against the signature, and made of what the file says by their annotations: a path of text, a
    pydantic model of a table.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    use: str = Field(
        pattern=_IMPORT_PATH,
        description="What to call, as package.module:name; other keys are its arguments.",
    )

    @field_validator("use", mode="before")
    @classmethod
    def _names_something(cls, value: Any) -> Any:
        if isinstance(value, str) and not re.match(_IMPORT_PATH, value):
            raise UserError(f"got {value!r}; expected package.module:name, such as my_project.models:Decoder")
        return value

    def build(self, key: str) -> Any:
        """Import what to call, and call it.

        Args:
            key: The key of the configuration that this is the value of, for messages.

        Raises:
            UserError: If it cannot be imported or called so.
        """
        factory = self._import(key)
        arguments = self._arguments(factory, key)
        return factory(**arguments)

    def _import(self, key: str) -> Callable[..., Any]:
        module_name, _, path = self.use.partition(":")
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # something that the module itself needs
            raise UserError(
                f"{key}.use = {self.use!r}: there is no module {error.name}. Install it, or start the job in the "
                "folder that holds it."
            ) from None
        for name in path.split("."):
            if getattr(found, name, _MISSING) is _MISSING:
                close = get_close_matches(name, dir(found), n=1)
                hint = f"; did you mean {close[0]}?" if close else "."
                raise UserError(f"{key}.use = {self.use!r}: there is no {name} in {module_name}{hint}")
            found = getattr(found, name)
        if not callable(found):
            raise UserError(f"{key}.use = {self.use!r} is {type(found).__name__}; expected a class or a function.")
        return found

    def _arguments(self, factory: Callable[..., Any], key: str) -> dict[str, Any]:
        given: Mapping[str, Any] = self.model_extra or {}
        try:
            signature = inspect.signature(factory)
        except ValueError:  # written in C, and says nothing of what it takes
            return dict(given)
        try:
            signature.bind(**given)
        except TypeError as error:
            raise UserError(
                f"{key}: {self.use} cannot be called with {', '.join(given) or 'no arguments'}: {error}. It takes "
                f"{signature.replace(return_annotation=inspect.Signature.empty)}."
            ) from None
        hints = _hints(factory)
        return {
            name: _convert(value, hints[name], f"{key}.{name}")
            if name in hints
            else _as_default(value, _type_of_default(signature, name))
            for name, value in given.items()
        }


def _type_of_default(signature: inspect.Signature, name: str) -> Any:
    """What an argument without an annotation is: as its default is, so that `false` on a command line is no text."""
    parameter = signature.parameters.get(name)
    default = None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default
    return type(default) if isinstance(default, bool | int | float) else Any


def _as_default(value: Any, kind: Any) -> Any:
    """An argument without an annotation: text is read as its default is, if it can be, as it may be more than that."""
    if isinstance(value, str):
        with suppress(UserError):
            return _convert(value, kind, "")
    return value


def _hints(factory: Callable[..., Any]) -> dict[str, Any]:
    """Annotations of its arguments; none where they cannot be had, as of names that only type checkers import."""
    try:
        return typing.get_type_hints(factory.__init__ if isinstance(factory, type) else factory)
    except (NameError, TypeError):
        return {}


def _convert(value: Any, annotation: Any, key: str) -> Any:
    """Make an argument what its annotation says, as strictly as any key of a configuration."""
    *sections, name = key.split(".")
    try:
        model = _model_of(name, annotation)
    except PydanticSchemaGenerationError:  # a type that pydantic does not know: left to what is called
        return value
    values = {name: value}
    for section in reversed(sections):
        model, values = _model_of(section, model), {section: values}
    checked: Any = validate_config(model, values)
    for part in (*sections, name):
        checked = getattr(checked, part)
    return checked


def _model_of(name: str, annotation: Any) -> type[BaseModel]:
    """A configuration with one key, so that messages name it in full."""
    fields: dict[str, Any] = {name: (annotation, ...)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an argument may have the name of a method of models
        return create_model("Arguments", __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)
