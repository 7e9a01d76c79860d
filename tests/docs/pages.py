"""The documents: their snippets of Python and their shell commands."""

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "docs/*.ipynb", "docs/[!_]*/*.md", "[!.]*/**/README.md")
    for path in ROOT.glob(pattern)
    if not {"build", "dist", "runs"} & set(path.relative_to(ROOT).parts)
)
FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
# What lines of an indented block begin with that are commands.
_PROGRAMS = "python|pipemesh|printf|pip|make|git|hf|apt-get|cmake|tar|kill"


def name_of(page):
    """The path of a page, as ids of tests have it."""
    return str(page.relative_to(ROOT))


# Runs a snippet that has prompts and answers.
_DOCTEST = """
def _check(text):
    import doctest
    test = doctest.DocTestParser().get_doctest(text, globals(), "snippet", None, 0)
    assert not doctest.DocTestRunner().run(test, clear_globs=False).failed
    globals().update(test.globs)
"""


def python_of(page):
    """All snippets of Python as one program; empty if there is none."""
    found = [code for kind, code in FENCED.findall(text_of(page)) if kind == "python"]
    lines = [f"_check({code!r})" if code.startswith(">>>") else code for code in found]
    return "\n".join([*([_DOCTEST] if lines != found else []), *lines])


def programs_of(page):
    """Snippets of Python that begin with the name of their file, by that name."""
    found = [code for kind, code in FENCED.findall(text_of(page)) if kind == "python"]
    named = [(re.match(r"# (\w+\.py)\n", code), code) for code in found]
    return {name[1]: code for name, code in named if name}


def commands_of(page):
    """The shell commands, in their order."""
    text = text_of(page)
    lines = []
    for kind, code in FENCED.findall(text):
        if kind == "sh":
            lines += code.splitlines()
        elif kind == "console":
            lines += re.findall(r"^\$ ((?:.*\\\n)*.*)", code, re.MULTILINE)
    indented = rf"^    (?:\$ )?((?:{_PROGRAMS}) (?:.*\\\n)*.*)"
    lines += re.findall(indented, FENCED.sub("", text), re.MULTILINE)
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [re.sub(r"\s+# .*", "", line) for line in joined if line.strip()]


def text_of(page):
    """The text of a page; of a notebook with its cells of Python as snippets."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return "\n".join(f"```python\n{c}\n```\n" if kind == "code" else f"{c}\n" for kind, c in cells)
