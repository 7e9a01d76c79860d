"""Chat templates: messages become text, in which the assistant's parts are known.

Templates are those of the package `transformers`: Jinja2 in a sandbox, with the same functions,
filters and tags.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from pipemesh.data.sources import line_of
from pipemesh.errors import DataError, needed

# The role whose messages are predicted.
_ASSISTANT = "assistant"
# Begin and end of a `{% generation %}` block while a text is rendered. No message can know them.
_MARKS = tuple(f"\0{secrets.token_hex(8)}{mark}\0" for mark in "[]")
_SPLIT = re.compile("|".join(map(re.escape, _MARKS)))


class ChatTemplate:
    """A template that turns messages into text.

    Args:
        text: the template.
        special: texts of special tokens by name, such as `bos_token`.
        date: the day that the template may write, as YYYY-MM-DD.

    Raises:
        DataError: the template is malformed, or the date is.
        MissingPackageError: jinja2 is not installed.
    """

    def __init__(self, text: str, special: Mapping[str, str], date: str) -> None:
        jinja2, environment = _environment()
        try:
            day = datetime.datetime.fromisoformat(date)
        except ValueError as error:
            raise DataError(f"date {date!r} must be a day, such as 2024-07-26") from error
        try:
            self._template = environment.from_string(
                text, globals={**special, "strftime_now": day.strftime}
            )
        except (jinja2.TemplateError, RecursionError) as error:
            raise DataError(f"the chat template is malformed ({line_of(error)})") from error
        # Jinja2 knows no other way to find a tag that is in a text or comment of the template.
        tags = [value for _, kind, value in environment.lex(text) if kind == "name"]
        self._has_blocks = "endgeneration" in tags

    def parts(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a chat, and begins and ends of the parts that the assistant wrote.

        They are the `{% generation %}` blocks of the template. Without these, each part is what a
        message of the assistant adds to the text of the messages before it, which ends with the
        prompt for it.
        """
        text = self._render(messages, tools)
        pieces, spans = _SPLIT.split(text), []
        whole = "".join(pieces)
        if self._has_blocks:
            ends = [0]
            for piece in pieces:
                ends.append(ends[-1] + len(piece))
            return whole, [*zip(ends[1::2], ends[2::2], strict=False)]
        for index, message in enumerate(messages):
            if message.get("role") != _ASSISTANT:
                continue
            try:
                before = self._render(messages[:index], tools, prompts=True)
            except DataError as error:
                if index:
                    raise
                raise DataError(
                    "message 1 is the assistant's, and the chat template refuses a chat without "
                    "messages, so its begin is unknown; let another one come before it, or put "
                    "{% generation %} and {% endgeneration %} around the assistant's messages in "
                    "the template"
                ) from error
            after = self._render(messages[: index + 1], tools)
            if not (whole.startswith(after) and after.startswith(before)):
                raise DataError(
                    f"message {index + 1} is written otherwise by the chat template if others "
                    "follow or a prompt comes before it, so its begin and end are unknown; put "
                    "{% generation %} and {% endgeneration %} around the assistant's messages in "
                    "the template"
                )
            spans.append((len(before), len(after)))
        return whole, spans

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, prompts: bool = False
    ) -> str:
        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompts
            )
        # A template is a program, which may fail in every way.
        except Exception as error:
            told = line_of(error)
            raise DataError(f"the chat template refuses the messages ({told})") from error


@functools.cache
def _environment() -> tuple[Any, Any]:
    """Returns the package jinja2, and the environment of templates."""
    jinja2, sandbox, ext = (
        needed(name, "a chat template", "data")
        for name in ("jinja2", "jinja2.sandbox", "jinja2.ext")
    )

    class Generation(ext.Extension):
        """The tag `{% generation %}`, which puts marks around its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("marked")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def marked(self, caller: Any) -> str:
            return caller().join(_MARKS)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def as_json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    made = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    made.filters["tojson"] = as_json
    made.globals["raise_exception"] = refuse
    return jinja2, made
