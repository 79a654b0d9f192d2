"""Configuration section that names a class or function by import path, with its arguments."""

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
from d9d_loop.config.config_source import validate_config
from d9d_loop.section import Section

_MISSING = object()
IMPORT_PATH = r"^\w+(\.\w+)*:\w+(\.\w+)*$"


class Component(Section):
    """Class or function to call, with its arguments: `model = {use = "my_project.models:Decoder", hidden_size = 64}`.

    Arguments are checked against the signature and converted to their annotated types: text to a `Path`, a table to a
    pydantic model.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    use: str = Field(
        pattern=IMPORT_PATH,
        description="Class or function to call, as package.module:name; the other keys are its arguments.",
    )

    @field_validator("use", mode="before")
    @classmethod
    def _check_import_path(cls, value: Any) -> Any:
        if isinstance(value, str) and not re.match(IMPORT_PATH, value):
            raise UserError(f"got {value!r}; expected package.module:name, such as my_project.models:Decoder")
        return value

    def build(self, key: str) -> Any:
        """Import the class or function that `use` names, call it with the arguments, and return the result.

        Args:
            key: Configuration key of this section, for messages.

        Raises:
            UserError: If `use` cannot be imported or is not callable, or the arguments do not match its signature and
                annotations.
        """
        factory = import_function(self.use, f"{key}.use")
        return factory(**self._arguments(factory, key))

    def _arguments(self, factory: Callable[..., Any], key: str) -> dict[str, Any]:
        given: Mapping[str, Any] = self.model_extra or {}
        try:
            signature = inspect.signature(factory)
        except ValueError:  # a C function without a signature
            return dict(given)
        try:
            signature.bind(**given)
        except TypeError as error:
            raise UserError(
                f"{key}: {self.use} cannot be called with {', '.join(given) or 'no arguments'}: {error}. Its signature "
                f"is {signature.replace(return_annotation=inspect.Signature.empty)}."
            ) from None
        hints = _hints(factory)
        return {
            name: _convert(value, hints[name], f"{key}.{name}")
            if name in hints
            else _as_default(value, _type_of_default(signature, name))
            for name, value in given.items()
        }


def import_function(use: str, key: str) -> Callable[..., Any]:
    """Return the class or function that a configuration key names, as package.module:name.

    Raises:
        UserError: If it cannot be imported or is not callable.
    """
    module_name, _, path = use.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its own imports is missing
        raise UserError(
            f"{key} = {use!r}: no module named {error.name}. Install it, or start the job in the folder that contains "
            "it."
        ) from None
    for name in path.split("."):
        if getattr(found, name, _MISSING) is _MISSING:
            close = get_close_matches(name, dir(found), n=1)
            hint = f"; did you mean {close[0]}?" if close else "."
            raise UserError(f"{key} = {use!r}: no {name} in {module_name}{hint}")
        found = getattr(found, name)
    if not callable(found):
        raise UserError(f"{key} = {use!r} is {type(found).__name__}; expected a class or a function.")
    return found


def _type_of_default(signature: inspect.Signature, name: str) -> Any:
    """Return the type of a bool, int or float default, else `Any`.

    The type lets `false` on the command line be parsed as a bool.
    """
    parameter = signature.parameters.get(name)
    default = None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default
    return type(default) if isinstance(default, bool | int | float) else Any


def _as_default(value: Any, kind: Any) -> Any:
    """Convert text to the type of the argument's default; return other or invalid values unchanged."""
    if isinstance(value, str):
        with suppress(UserError):
            return _convert(value, kind, "")
    return value


def _hints(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of the arguments; empty if they cannot be resolved, as with `TYPE_CHECKING` imports."""
    try:
        return typing.get_type_hints(factory.__init__ if isinstance(factory, type) else factory)
    except (NameError, TypeError):
        return {}


def _convert(value: Any, annotation: Any, key: str) -> Any:
    """Convert an argument to its annotated type, validated like a configuration key; errors name the full key."""
    *sections, name = key.split(".")
    try:
        model = _model_of(name, annotation)
    except PydanticSchemaGenerationError:  # a type that pydantic does not know; the factory receives the raw value
        return value
    values = {name: value}
    for section in reversed(sections):
        model, values = _model_of(section, model), {section: values}
    checked: Any = validate_config(model, values)
    for part in (*sections, name):
        checked = getattr(checked, part)
    return checked


def _model_of(name: str, annotation: Any) -> type[BaseModel]:
    """Return a configuration class with one key. Nested classes give error messages the full key."""
    fields: dict[str, Any] = {name: (annotation, ...)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydantic warns if an argument has the name of a `BaseModel` method
        return create_model("Arguments", __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)
