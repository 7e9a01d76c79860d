"""Values of a JSON file, checked when they are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pipemesh.errors import PipemeshError
from pipemesh.text import nearest

# The largest size of anything.
_MOST = 2**31 - 1


class WeightsError(PipemeshError, ValueError):
    """Unusable weights, or unusable files beside them."""


def json_object(path: str) -> dict[str, Any]:
    """Reads a JSON object; raises WeightsError for an unreadable file or another value."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise WeightsError(
            f"{path!r} cannot be read ({error.strerror}); give the one that came with the weights"
        ) from error
    return parse_object(content, path)


def parse_object(content: bytes, path: str) -> dict[str, Any]:
    """Parses a JSON object of the file `path`; raises WeightsError for another value, or for a name
    that an object has twice.
    """

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise WeightsError(f"{path!r} has {twice!r} twice; fetch it again")
        return values

    try:
        values = json.loads(content.decode("utf-8"), object_pairs_hook=unique)
    except WeightsError:
        raise
    except RecursionError as error:
        raise WeightsError(f"{path!r} is no JSON of a model (nested too deeply)") from error
    except ValueError as error:
        raise WeightsError(f"{path!r} is no JSON ({error})") from error
    if not isinstance(values, dict):
        raise WeightsError(f"{path!r} holds no object of JSON")
    return values


class Given:
    """The values of a file, checked when they are read, with notes about ignored ones.

    It remembers what was read, so that `check_rest` finds what was not.
    """

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values, self.path = values, path
        self.notes: list[str] = []
        self._names: set[str] = set()

    def get(self, name: str) -> Any:
        """Returns a value as it is, None if it is missing."""
        self._names.add(name)
        return self.values.get(name)

    def check_rest(self, ignored: Collection[str]) -> None:
        """Raises WeightsError if there is a value that was neither read nor is ignored.

        None is no value. False is one, since it may switch off what is on by default.
        """
        for name, value in self.values.items():
            if value is not None and name not in self._names and name not in ignored:
                near = nearest(name, self._names)
                hint = f"; did you mean {near!r}?" if near else "."
                raise WeightsError(
                    f"{self.path}: {name} is {value!r}, but this type of model has no such key"
                    f"{hint} Remove it if it changes nothing"
                )

    def whole(self, name: str, default: int | None) -> int:
        """Returns a whole number from 1 to the largest size of anything."""
        value = self._of(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
            raise self.error(name, value, f"it is a whole number from 1 to {_MOST:,}")
        return value

    def at_least_one(self, name: str) -> float:
        """Returns a number from 1 on."""
        value = self.number(name, None)
        if value < 1:
            raise self.error(name, value, "it is 1 or more")
        return value

    def number(self, name: str, default: float | None, *, zero: bool = False) -> float:
        """Returns a finite number above 0, or from 0 on."""
        value = self._of(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, value, "it is a number")
        if not (value > 0 or (zero and value == 0)):
            raise self.error(name, value, "it is above 0")
        if value > sys.float_info.max:
            raise self.error(name, value, "it is finite")
        return float(value)

    def optional(self, name: str, default: Any, read: Callable[[str, None], Any]) -> Any:
        """Returns a value as `read` does; null is None, and a missing key the default."""
        if self.get(name) is None:
            return None if name in self.values else default
        return read(name, None)

    def flag(self, name: str, default: bool) -> bool:
        """Returns true or false."""
        value = self._of(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "it is true or false")
        return value

    def choice(self, name: str, default: str, known: Mapping[str, str]) -> str:
        """Returns the known meaning of a name."""
        value = self._of(name, default)
        if not isinstance(value, str) or value not in known:
            raise self.error(name, value, f"there are {', '.join(sorted(known))}")
        return known[value]

    def only(self, name: str, allowed: Sequence[Any], why: str) -> None:
        """Checks that a value is an allowed one, the first by default."""
        value = self.get(name)
        value = allowed[0] if name not in self.values else value
        if value not in allowed:
            told = " or ".join(json.dumps(each) for each in allowed)
            raise self.error(name, value, f"{why}: it may be {told}")

    def tokens(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Returns the tokens of the vocabulary, and adds notes about others, which nothing can
        produce.
        """
        value = self.get(name)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(each) is int and each >= 0 for each in found):
            raise self.error(name, value, "it is the number of a token, or a list of them")
        beyond = [str(each) for each in found if each >= vocab_size]
        if beyond:
            self.notes.append(
                f"{self.path}: {name} {', '.join(beyond)} plays no part: the model has "
                f"the ids 0 to {vocab_size - 1}"
            )
        return tuple(each for each in found if each < vocab_size)

    def _of(self, name: str, default: Any) -> Any:
        # In `transformers`, too, null is no default.
        self._names.add(name)
        value = self.values.get(name, default)
        if value is None and name not in self.values:
            raise WeightsError(f"{self.path} has no {name!r}, which its model needs")
        return value

    def error(self, name: str, value: Any, told: str) -> WeightsError:
        """Returns the error for a value."""
        return WeightsError(f"{self.path}: {name} is {value!r}; {told}")
