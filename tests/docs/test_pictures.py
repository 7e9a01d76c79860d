"""The pictures in the repository are what the command draws, and READMEs show them all."""

import re
from pathlib import Path

from docs.pictures import IMAGES, main, pictures

ROOT = Path(__file__).parents[2]


def test_pictures_are_up_to_date(tmp_path, capsys):
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("wrote") == len(pictures())
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in IMAGES.iterdir()}
    assert drawn == kept, "run python -m docs.pictures"


def test_readmes_show_every_picture():
    pages = [ROOT / "README.md", IMAGES.parent / "README.md"]
    text = "".join(page.read_text() for page in pages)
    shown = re.findall(r"!\[[^\]]+\]\([\w/]*\bimages/([^)]+)\)", text)
    assert sorted(shown) == sorted(pictures())
