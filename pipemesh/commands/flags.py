"""The layer that every command line is built on: flags in; values, `--help` and TOML out.

A command declares its flags as data: a `Command` with a tuple of `Flag`s. `parse` reads a command
line into `FLAGS`, which holds the values for the whole process: a process runs one command. Names
have underscores, and hyphens mean the same. A flag is given as `--name=value` or `--name value`, a
boolean one as `--name`, `--noname` or `--name=false`.

This module needs neither TensorFlow nor absl.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from pipemesh.errors import PipemeshError
from pipemesh.text import bytes_of, did_you_mean, nearest, nearest_text, toml_of

# The groups of flags that commands which train share, in the order of `--help`.
FILES, TEXTS, MODEL = "model and files", "texts", "size and optimizer of the model"
PLAN, TRAINING, WORKERS = "plan", "training", "workers"
_GROUPS = (FILES, TEXTS, PLAN, TRAINING, MODEL, WORKERS)
_REQUIRED, _OTHERS = "required", "options"
# The flag that names a file of flags.
CONFIG = "config"
_HELP = {"-h", "-?", "--?"} | {
    dashes + name for dashes in ("-", "--") for name in ("help", "helpshort", "helpfull")
}
_YES, _NO = ("true", "t", "1", "yes"), ("false", "f", "0", "no")
_WIDTH = 92
# An unknown flag is answered with the names of all if there are no more than these.
_MOST_LISTED = 16
_KINDS: dict[Any, str] = {int: "a whole number", float: "a number"}


class FlagError(PipemeshError, ValueError):
    """Invalid flag value."""


class ConfigError(PipemeshError, ValueError):
    """A file of flags cannot be read, or has a name that no flag has."""


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of a command, or an argument that is given without a name."""

    # With underscores.
    name: str
    # `str`, `int`, `float`, `bool`, or a function of the text that raises `ValueError` with a
    # message.
    kind: Callable[[str], Any] = str
    default: Any = None
    help: str = ""
    # The heading of `--help` above it.
    group: str = ""
    required: bool = False
    choices: Sequence[str] = ()
    # The smallest allowed number.
    least: float | None = None
    # The placeholder of the value in `--help`.
    value: str = "..."
    # One letter, such as `m` for `-m`.
    short: str = ""
    # The value is a list.
    repeated: bool = False
    # Given without a name: once, perhaps (`?`), at least once (`+`), or all words that are left.
    argument: Literal["", "once", "?", "+", "..."] = ""
    # Not in `--help`.
    hidden: bool = False

    def read(self, text: str) -> Any:
        """Returns the value that a text stands for."""
        given = f"--{self.name}={text!r}"
        if "\0" in text:
            raise FlagError(f"{given} has a NUL character; leave it out")
        if self.kind is bool:
            if text.lower() not in (*_YES, *_NO):
                raise FlagError(f"{given}: it must be true or false")
            return text.lower() in _YES
        if self.choices and text not in self.choices:
            meant = did_you_mean(text, self.choices)
            allowed = "|".join(self.choices)
            raise FlagError(f"{given}: it must be one of {allowed}; {meant}".rstrip("; "))
        try:
            value = self.kind(text)
        except ValueError as error:
            why = f"it must be {_KINDS[self.kind]}" if self.kind in _KINDS else str(error)
            raise FlagError(f"{given}: {why}") from error
        if self.least is not None and not value >= self.least:
            raise FlagError(f"--{self.name}={text}: it must be at least {self.least}")
        return value

    def usage(self) -> str:
        """Returns the flag as `--help` writes it."""
        if self.argument:
            return {"once": "{}", "?": "[{}]", "+": "{} ...", "...": "-- {} ..."}[
                self.argument
            ].format(self.name.upper())
        short = f"-{self.short}, " if self.short else ""
        if self.kind is bool:
            return f"{short}--[no]{self.name}"
        return f"{short}--{self.name}={'|'.join(self.choices) or self.value}"


def grouped(group: str, *flags: Flag) -> tuple[Flag, ...]:
    """Returns flags under one heading of `--help`, unless they have one."""
    return tuple(flag if flag.group else dataclasses.replace(flag, group=group) for flag in flags)


# Flags of several commands that plan.
NUM_MICROBATCHES = Flag("num_microbatches", int, value="M", help="Microbatches of a step.")
NUM_VIRTUAL_STAGES = Flag(
    "num_virtual_stages",
    int,
    value="V",
    help="Stages of each device; default: the schedule's.",
)
DEVICE_MEMORY = Flag(
    "device_memory",
    bytes_of,
    value="BYTES",
    help="Memory of a device, such as 16GiB or 80GB.",
)


@dataclasses.dataclass(frozen=True)
class Command:
    """A command line."""

    name: str
    # Begins `--help`; `more` ends it.
    about: str | None
    flags: tuple[Flag, ...]
    more: str = ""
    # Flags of other commands that this one does not use, with the reason. A file of flags may have
    # them, as one that a training wrote does.
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])

    def help(self) -> str:
        """Returns what `--help` prints."""
        shown = [f for f in self.flags if not f.hidden and f.name not in self.refused]
        arguments = [flag for flag in shown if flag.argument]
        named = [flag for flag in shown if not flag.argument]
        words = [
            self.name,
            *(flag.usage() for flag in named if flag.required),
            *(["[--flag=value ...]"] if any(not flag.required for flag in named) else []),
            *(flag.usage() for flag in arguments),
        ]
        usage = textwrap.fill(
            f"usage: {' '.join(words)}",
            _WIDTH,
            subsequent_indent=" " * 8,
            break_on_hyphens=False,
            break_long_words=False,
        )
        parts = [usage, (self.about or "").strip()]
        titles = {flag.name: flag.group or _OTHERS for flag in shown}
        is_required = {f.name for f in shown if f.required or f.argument in ("once", "+")}
        titles.update(dict.fromkeys(is_required, _REQUIRED))
        known = [title for title in _GROUPS if title in titles.values()]
        others = [title for title in dict.fromkeys(titles.values()) if title not in known]
        for title in dict.fromkeys([_REQUIRED, *known, *others]):
            lines = [_help_of(flag) for flag in shown if titles[flag.name] == title]
            if lines:
                parts.append("\n".join([f"{title}:", *lines]))
        return "\n\n".join([*parts, *([self.more.strip()] if self.more else [])])


def _help_of(flag: Flag) -> str:
    """Returns the lines of `--help` on one flag."""
    is_told = flag.default in (None, False, "", (), []) or "default:" in flag.help.lower()
    default = "" if is_told else f" (default: {flag.default})"
    lines = textwrap.wrap(f"{flag.help.rstrip('.')}{default}.", _WIDTH)
    return "\n".join([f"  {flag.usage()}", *(f"      {line}" for line in lines)])


class Flags:
    """The values of the flags of a command, as attributes."""

    def __init__(self) -> None:
        self.declare([])

    def declare(self, flags: Iterable[Flag]) -> None:
        """Begins anew with these flags, none of which is given."""
        self._flags = {flag.name: flag for flag in flags}
        self._given: set[str] = set()
        self._values: dict[str, Any] = {
            name: [] if flag.repeated and flag.default is None else flag.default
            for name, flag in self._flags.items()
        }

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"the command has no flag {name!r}") from None

    def names(self) -> list[str]:
        """Returns the names of all flags."""
        return sorted(self._flags)

    def value(self, name: str, default: Any = None) -> Any:
        """Returns the value of a flag, or `default` if the command has no such flag."""
        return self._values.get(name, default)

    def is_given(self, name: str) -> bool:
        """Returns whether the command line, a file or a checkpoint has the flag."""
        return name in self._given

    def given(self) -> dict[str, Any]:
        """Returns the values of the flags that are given."""
        return {name: self._values[name] for name in self.names() if name in self._given}

    def set(self, name: str, value: Any, given: bool = True) -> None:
        """Changes a value."""
        self._values[name] = value
        if given:
            self._given.add(name)

    def take(self, name: str, text: str) -> None:
        """Sets a flag by its text; a repeated flag gets one more."""
        flag = self._flags[name]
        if flag.repeated:
            before: list[Any] = self._values[name] if name in self._given else []
            self.set(name, [*before, flag.read(text)])
        else:
            self.set(name, flag.read(text))

    def apply(self, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Sets flags that are not given yet, and returns their values; `where` is for errors."""
        for name, value in values.items():
            if name == CONFIG:
                raise ConfigError(
                    f"{where} has {name!r}: a file of flags includes no other one; copy its "
                    "lines, or give one --config on the command line"
                )
            if name not in self._flags:
                raise ConfigError(
                    f"{where} has {name!r}, which is no flag{nearest_text(name, self.names())}"
                )
            if not isinstance(value, str | int | float):
                kind = "a table" if isinstance(value, dict) else f"a {type(value).__name__}"
                raise ConfigError(
                    f"{where}: {name} is {kind}; give text, a number, true or false, outside of "
                    "tables"
                )
        taken = {name: value for name, value in values.items() if name not in self._given}
        for name, value in taken.items():
            try:
                self.take(name, str(value))
            except FlagError as error:
                raise ConfigError(f"{where}: {error}") from error
        return taken


FLAGS = Flags()
"""The flags of the command that this process runs."""


def parse(argv: Sequence[str], command: Command) -> Flags:
    """Reads a command line into `FLAGS`; prints help and ends the program if that is requested."""
    if is_help(argv):
        print(command.help())
        sys.exit(0)
    FLAGS.declare(command.flags)
    words = _take_named(list(argv[1:]), command)
    for flag in command.flags:
        if flag.argument in ("+", "...") and words:
            FLAGS.set(flag.name, words)
            words = []
        elif flag.argument and words:
            FLAGS.take(flag.name, words.pop(0))
    if words:
        raise FlagError(
            f"{words[0]!r} is one argument too many; `{command.name} --help` shows the usage"
            if any(flag.argument for flag in command.flags)
            else f"{words[0]!r} is no flag; flags begin with --"
        )
    for name, why in command.refused.items():
        if FLAGS.is_given(name):
            raise FlagError(f"--{name} {why}; leave it out")
    if path := FLAGS.value(CONFIG):
        values = read_toml(path)
        kept = {name: value for name, value in values.items() if name not in command.refused}
        FLAGS.apply(kept, f"--config={path!r}")
    missing = [
        flag.usage()
        for flag in command.flags
        if (flag.required or flag.argument in ("once", "+")) and not FLAGS.is_given(flag.name)
    ]
    if missing:
        raise FlagError(
            f"missing: {', '.join(missing)}; `{command.name} --help` describes all flags"
        )
    return FLAGS


def is_help(argv: Sequence[str]) -> bool:
    """Returns whether a command line requests help."""
    words = list(argv)
    return bool(_HELP.intersection(words[1 : words.index("--") if "--" in words else None]))


def _take_named(left: list[str], command: Command) -> list[str]:
    """Sets the flags of a command line that have names, and returns its other words."""
    named = {flag.name: flag for flag in command.flags if not flag.argument}
    short = {flag.short: flag for flag in named.values() if flag.short}
    takes_rest = any(flag.argument == "..." for flag in command.flags)
    others: list[str] = []
    while left:
        word = left.pop(0)
        if word == "--":
            return [*others, *left]
        if not word.startswith("-") or word == "-":
            others.append(word)
            if takes_rest:
                return [*others, *left]
            continue
        text, equals, value = word.lstrip("-").partition("=")
        name = text.replace("-", "_")
        flag = named.get(name)
        if flag is None and not word.startswith("--") and name[:1] in short:
            # -m VALUE and -mVALUE.
            flag = short[name[0]]
            if len(word) > 2 and text != flag.short:
                equals, value = "=", word[2:].removeprefix("=")
        denied = flag is None and not equals and name.startswith("no")
        if denied:
            flag = named.get(name[2:].removeprefix("_"))
            flag = flag if flag is not None and flag.kind is bool else None
        if flag is None:
            raise _unknown(name, command)
        if flag.kind is bool and not equals:
            value = "false" if denied else "true"
        elif not equals:
            if not left:
                raise FlagError(f"--{flag.name} has no value; write --{flag.name}={flag.value}")
            value = left.pop(0)
        FLAGS.take(flag.name, value)
    return others


def _unknown(name: str, command: Command) -> FlagError:
    known = [
        flag.name
        for flag in command.flags
        if not (flag.argument or flag.hidden or flag.name in command.refused)
    ]
    near = nearest(name, known)
    more = f"did you mean --{near}?" if near else f"`{command.name} --help` lists the flags"
    if not near and len(known) <= _MOST_LISTED:
        more = f"there are {', '.join(f'--{flag}' for flag in known)}"
    return FlagError(f"unknown flag --{name}; {more}")


def read_toml(path: str) -> dict[str, Any]:
    """Returns the flags of a file: `name = value` lines of TOML."""
    try:
        return toml_of(path)
    except OSError as error:
        raise ConfigError(f"--config={path!r} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config={path!r} is no TOML ({error})") from error


def as_toml(values: Mapping[str, Any]) -> str:
    """Writes flags as `read_toml` reads them."""
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


# The largest values of int32 and float32.
_LARGEST = {int: 2**31 - 1, float: 3.4e38}


def check_seed(seed: int) -> None:
    """Checks that TensorFlow accepts the value of `--seed`."""
    if not -(2**63) <= seed < 2**63:
        raise FlagError(f"--seed={seed}: it must fit into 64 bits, from -2**63 to 2**63 - 1")


def check_number(flag: str, value: float) -> None:
    """Checks that a flag's value is above 0, finite, and fits into a tensor."""
    largest = _LARGEST[type(value)]
    if not value > 0:
        raise FlagError(f"--{flag}={value}: it must be above 0")
    if not (math.isfinite(value) and value <= largest):
        raise FlagError(f"--{flag}={value}: it must be finite, at most {largest}")


def check_output(flag: str, path: str | None) -> None:
    """Checks that a file can be written, before work that would be lost; None is no file."""
    if path is None:
        return
    file = pathlib.Path(path)
    try:
        is_new = not file.exists()
        with file.open("a", encoding="utf-8"):
            pass
        if is_new:
            # What a link leads to, not the link.
            file.resolve().unlink()
    except (OSError, ValueError) as error:
        raise _refused(flag, path, error) from error


def write_output(flag: str, path: str | None, text: str) -> None:
    """Writes a file that a flag names; None is no file."""
    if path is None:
        return
    try:
        pathlib.Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _refused(flag, path, error) from error


def _refused(flag: str, path: str, error: OSError | ValueError) -> FlagError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return FlagError(f"{flag}={path!r} cannot be written ({reason}); give another file")
