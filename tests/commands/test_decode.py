"""Text on a terminal as it comes."""

import io

from pipemesh.commands.decode import Stream
from pipemesh.commands.model_kind import Tokens

STOP = 0
# Tokens are bytes: some characters have several.
TOKENS = Tokens(
    lambda text: list(text.encode()),
    lambda ids: bytes(ids).decode(errors="replace"),
    frozenset([STOP]),
    99,
    256,
)


def shown(texts, most, order):
    """What is on the terminal after each token; `order` says whose token comes next."""
    out = io.StringIO()
    stream = Stream(TOKENS, [b"<"] * len(texts), most, out)
    left, found = [list(text) for text in texts], []
    for number in order:
        stream.take(number, left[number].pop(0))
        found.append(out.getvalue())
    return found


def test_a_text_comes_token_by_token_and_ends_its_line():
    assert shown([b"abc"], 3, [0] * 3) == ["<a", "<ab", "<abc\n"]


def test_what_ends_a_text_is_not_shown():
    assert shown([b"a\0"], 9, [0, 0]) == ["<a", "<a\n"]


def test_a_character_comes_as_a_whole():
    assert shown(["é!".encode()], 3, [0] * 3) == ["<", "<é", "<é!\n"]


def test_half_a_character_at_the_end_is_said_so():
    assert shown(["aé".encode()[:2]], 2, [0, 0])[-1] == "<a\ufffd\n"


def test_texts_come_in_their_order():
    found = shown([b"ab", b"\0", b"xy"], 2, [2, 0, 1, 2, 0])
    assert found == ["", "<a", "<a", "<a", "<ab\n<\n<xy\n"]


def test_text_that_changes_is_said_again():
    """Some ways to spell have more tokens change what was said before."""
    spell = TOKENS.__class__(
        TOKENS.encode,
        lambda ids: "".join(map(chr, ids)).replace("ab", "Z"),
        TOKENS.stop,
        99,
        256,
    )
    out = io.StringIO()
    stream = Stream(spell, [[]], 2, out)
    stream.take(0, ord("a"))
    stream.take(0, ord("b"))
    assert out.getvalue() == "a\nZ\n"
