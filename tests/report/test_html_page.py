"""HTML is sound, whatever text is in it."""

from html.parser import HTMLParser

from pipemesh.report.html_page import document, figure, note, section, side_by_side, table

ODD = "<script>alert('x')</script> & \"y\""


class Checked(HTMLParser):
    """Collects tags and text, and checks that tags are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_text_is_escaped_everywhere():
    parts = [section(ODD, table([ODD], [[ODD]]), note(ODD)), figure("<svg></svg>", ODD, fold="")]
    found = Checked(document(ODD, parts))
    assert "script" not in found.tags
    # Title, heading, heading of the section, head, cell, note and caption.
    assert found.words.count(ODD) == 7


def test_empty_parts_are_left_out():
    assert section("a", "", "") == "" and side_by_side([]) == ""
    assert "<h2>" not in document("a", [section("b")])
    assert "<th" not in table(["", ""], [["a", "b"]])


def test_document_loads_nothing():
    text = document("a", [])
    assert "http" not in text and "src=" not in text and "<script" not in text
