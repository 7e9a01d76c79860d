"""The example models: the folder `models` of a checkout, `pipemesh_models` in the wheel.

A wheel cannot carry a package called `models`, since many projects have a folder of that name.
Checkpoints and commands may name either, so a name that is missing is looked for under the other.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
from types import ModuleType

from pipemesh.text import is_missing

CHECKOUT, WHEEL = "models", "pipemesh_models"


def import_model_module(name: str) -> ModuleType:
    """Imports a module of a model, whichever of the two names the example models have here.

    Args:
        name: of the module, such as `models.digits.params`, or one of a user's own.

    Raises:
        ModuleNotFoundError: there is no such module; its `name` begins `name`, or is of a package
            that the module imports.
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
    """Returns the full name of a module of the example models.

    Args:
        name: without its first part, such as `digits.params`.

    Returns:
        `models.digits.params` in a checkout, unless another package `models` hides that one, else
        `pipemesh_models.digits.params`.
    """
    own = pathlib.Path(__file__).parents[1] / CHECKOUT / "__init__.py"
    try:
        found = importlib.util.find_spec(CHECKOUT)
    except ValueError:
        found = None
    is_own = found is not None and found.origin is not None and own == pathlib.Path(found.origin)
    return f"{CHECKOUT if is_own else WHEEL}.{name}"


def same_class(one: str, other: str) -> bool:
    """Whether two names are of one class of a model.

    Example:
        >>> same_class("models.digits.params.Digits", "pipemesh_models.digits.params.Digits")
        True
        >>> same_class("models.digits.params.Digits", "mine.Digits")
        False
    """
    return _without_wheel(one) == _without_wheel(other)


def _without_wheel(name: str) -> str:
    return CHECKOUT + name.removeprefix(WHEEL) if name.startswith(f"{WHEEL}.") else name
