"""The example models: the folder `models` of a checkout, `pipemesh_models` in the wheel.

A wheel cannot contain a package called `models`, since many projects have a folder of that name.
Checkpoints and commands may use either name, so a missing name is replaced by the other.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
from types import ModuleType

from pipemesh.text import is_missing

CHECKOUT, WHEEL = "models", "pipemesh_models"


def import_model_module(name: str) -> ModuleType:
    """Imports a module by name, replacing `models` by `pipemesh_models` or back if it is missing.

    The ModuleNotFoundError of a missing module names that module or one of its packages; otherwise
    a module that it imports is missing.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        top, dot, rest = name.partition(".")
        if top not in (CHECKOUT, WHEEL) or not is_missing(name, error):
            raise
        other = f"{WHEEL if top == CHECKOUT else CHECKOUT}{dot}{rest}"
        try:
            return importlib.import_module(other)
        except ModuleNotFoundError as again:
            raise (error if is_missing(other, again) else again) from None


def example(name: str) -> str:
    """Returns the full name of an example module, such as `models.digits.params` for
    `digits.params`.

    It begins with `pipemesh_models` in the wheel, or if another package `models` hides that of the
    checkout.
    """
    own = pathlib.Path(__file__).parents[1] / CHECKOUT / "__init__.py"
    try:
        found = importlib.util.find_spec(CHECKOUT)
    except ValueError:
        found = None
    is_own = found is not None and found.origin is not None and own == pathlib.Path(found.origin)
    return f"{CHECKOUT if is_own else WHEEL}.{name}"


def same_class(one: str, other: str) -> bool:
    """Returns whether two names mean the same class of a model.

    Example:
        >>> same_class("models.digits.params.Digits", "pipemesh_models.digits.params.Digits")
        True
        >>> same_class("models.digits.params.Digits", "mine.Digits")
        False
    """
    return _without_wheel(one) == _without_wheel(other)


def _without_wheel(name: str) -> str:
    return CHECKOUT + name.removeprefix(WHEEL) if name.startswith(f"{WHEEL}.") else name
