"""Colours of actions: readable, and paler for later stages."""

import pytest

from pipemesh.schedule.render.palette import fill, hexadecimal, ink, levels
from tests.schedule.render.drawings import contrast


@pytest.mark.parametrize("kind", "FBIW")
@pytest.mark.parametrize("level", [0, 0.25, 0.5, 1])
def test_text_on_every_colour_is_readable(kind, level):
    background = fill(kind, level)
    text = (0, 0, 0) if ink(background) == "#000000" else (255, 255, 255)
    assert contrast(background, text) >= 4.5  # WCAG level AA.


def test_later_stages_of_a_device_are_paler():
    assert levels((0, 1, 0, 1, 0, 1)) == (0, 0, 0.5, 0.5, 1, 1)


@pytest.mark.parametrize("rgb", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)])
def test_of_black_and_white_the_one_with_more_contrast_is_chosen(rgb):
    for value in range(256):
        background = tuple(value * part for part in rgb)
        black, white = (contrast(background, (grey,) * 3) for grey in (0, 255))
        assert ink(background) == ("#000000" if black > white else "#ffffff")


@pytest.mark.parametrize("kind", "FBIW")
def test_paler_is_nearer_to_white_in_every_part(kind):
    steps = [fill(kind, level / 8) for level in range(9)]
    for part in zip(*steps, strict=True):
        assert list(part) == sorted(part)
        # Six tenths of the way.
        assert part[-1] - part[0] == pytest.approx(0.6 * (255 - part[0]), abs=0.5)


def test_a_web_colour_reads_back():
    for colour in [(0, 0, 0), (255, 9, 16), fill("W", 0.5)]:
        text = hexadecimal(colour)
        assert tuple(bytes.fromhex(text.removeprefix("#"))) == colour
