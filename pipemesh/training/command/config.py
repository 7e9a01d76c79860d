"""Flags that are not on the command line: from a TOML file, or those a training was begun with."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from absl import flags

from pipemesh.errors import PipemeshError
from pipemesh.text import nearest_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

FLAGS = flags.FLAGS

# The flag that names such a file.
_CONFIG = "config"


class ConfigError(PipemeshError, ValueError):
    """A file of flags cannot be read, or has what no flag has."""


def read(path: str) -> dict[str, Any]:
    """The flags of a file: `name = value` lines of TOML.

    Args:
        path: of the file.

    Raises:
        ConfigError: there is no such file, or it is no TOML.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            return tomllib.loads(file.read())
    except OSError as error:
        raise ConfigError(f"--config={path!r} cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--config={path!r} is no TOML ({error})") from error


def apply(values: Mapping[str, Any], where: str, program: ModuleType) -> dict[str, Any]:
    """Sets flags that are not on the command line.

    Args:
        values: text, a number, true or false by the name of the flag.
        where: they come from, for errors.
        program: the module that defines the flags.

    Returns:
        Those that were set.

    Raises:
        ConfigError: a name is no flag of the program, or a value is none for it; or it names
            another file of flags.
    """
    known = names(program)
    for name, value in values.items():
        if name == _CONFIG:
            raise ConfigError(
                f"{where} has {name!r}: a file of flags takes up no other one; copy its lines, or "
                "give one --config on the command line"
            )
        if name not in known:
            raise ConfigError(f"{where} has {name!r}, which is no flag{nearest_text(name, known)}")
        if not isinstance(value, str | int | float):
            kind = "a table" if isinstance(value, dict) else f"a {type(value).__name__}"
            raise ConfigError(
                f"{where}: {name} is {kind}; give text, a number, true or false, outside of tables"
            )
    taken = {name: value for name, value in values.items() if not FLAGS[name].present}
    for name, value in taken.items():
        try:
            FLAGS[name].parse(str(value).lower() if isinstance(value, bool) else str(value))
        except flags.Error as error:
            raise ConfigError(f"{where}: {error}") from error
    return taken


def given(program: ModuleType) -> dict[str, Any]:
    """The flags that have been given, wherever, with their values.

    Args:
        program: the module that defines the flags.
    """
    return {name: FLAGS[name].value for name in names(program) if FLAGS[name].present}


def names(program: ModuleType) -> list[str]:
    """The names of a program's flags."""
    return sorted(flag.name for flag in FLAGS.get_key_flags_for_module(program))


def as_toml(values: Mapping[str, Any]) -> str:
    """What `read` reads.

    Args:
        values: text, numbers, True or False by name.

    Example:
        >>> print(as_toml({"mesh_shape": "layers:2", "plain": False, "learning_rate": 0.4}), end="")
        mesh_shape = "layers:2"
        plain = false
        learning_rate = 0.4
    """
    return "".join(f"{_line(name, value)}\n" for name, value in values.items())


def _line(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{name} = {value!r}"
    # Of text, whole numbers, true and false JSON's spelling is TOML's, but for one character.
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"# {name} is not UTF-8, which TOML has to be: {value!a}"
    return f"{name} = {text}"
