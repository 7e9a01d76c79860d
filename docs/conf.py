"""How Sphinx builds the documentation: `make docs`.

The source directory is the repository, so that READMEs are pages as they stand, and links between
them mean the same here and where the files are read.
"""

from __future__ import annotations

import pathlib
import sys

import pipemesh

sys.path.insert(0, str(pathlib.Path(__file__).with_name("extensions")))

project = "pipemesh"
project_copyright = "the authors of pipemesh"
version = release = pipemesh.__version__
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "pipemesh/**/README.md",
    "models/*/README.md",
    "benchmarks/*/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
# Nor are these folders walked through.
exclude_patterns = [".*", "**/.*", "**/__pycache__", "build", "dist", "docs/_build", "runs"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "command_help",
    "lingvo_params",
    "public_names",
]

# Links to headings, as GitHub makes them.
myst_heading_anchors = 4
# A single backtick of a docstring: a link if it is a public name, else just code.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"pipemesh {release}"
html_baseurl = ""
html_copy_source = False
html_show_sourcelink = False
# The first page is in docs/; this leads there from the root.
html_extra_path = ["root"]
html_static_path = ["static"]
html_css_files = ["pipemesh.css"]
