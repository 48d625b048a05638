"""Sphinx's configuration of the site: `make docs` builds it, offline, from staged pages.

`stage.py` puts the pages where Sphinx finds them: as they lie in the repository, so that the links
that a forge follows are those of the site.
"""

import pathlib
import re
import sys

from pygments.lexers import special
from sphinx import errors

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1])]
import tff_dpftrl  # noqa: E402
from tff_dpftrl.execution import contexts  # noqa: E402

contexts.clean_up_at_exit()  # autodoc imports TFF, which prints a traceback at the end without it.

project = "tff_dpftrl"
author = "The tff_dpftrl maintainers"
copyright = author
version = release = tff_dpftrl.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_nb",
    "sphinx_external_toc",
    "markdown_docstrings",
]
external_toc_path = "docs/_toc.yml"
suppress_warnings = ["etoc.glob"]  # A folder may have no page yet.
exclude_patterns = ["benchmarks/peers", "tests"]

# Anchors as on a forge, at all depths of headings; notebooks are executed by `make notebooks`.
myst_heading_anchors = 6
myst_enable_extensions = ["tasklist"]
nb_execution_mode = "off"
nb_merge_streams = True
nb_output_stderr = "remove"  # Progress bars, and what libraries say about one another.

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "none"
autodoc_mock_imports = ["ray"]
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
default_role = "code"
smartquotes = False  # They would make one dash of the two of a flag.
toc_object_entries = False  # With them, each page takes twice as long.

html_theme = "furo"
html_title = f"tff_dpftrl {version}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_search_scorer = str(pathlib.Path(__file__).parent / "search_order.js")
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False


def _check_that_it_is_self_contained(app, exception):
    """Refuses a site that asks another machine for anything, or whose search needs a server."""
    if exception is not None or app.builder.name != "html":
        return
    out = pathlib.Path(app.outdir)
    for page in out.rglob("*.html"):
        text = page.read_text("utf-8")
        remote = re.search(r'<(script|link|img|iframe)[^>]*\s(src|href)="(https?:)?//', text)
        if remote:
            raise errors.SphinxError(f"{page} loads something from another machine: {remote[0]}")
    # Browsers let a page that was opened as a file load scripts, and read no other files.
    if '<script src="searchindex.js"' not in (out / "search.html").read_text("utf-8"):
        raise errors.SphinxError("The search does not load its index by a script tag.")


def setup(app):
    """Shows diagrams in Mermaid's language as text, as their source is readable."""
    app.add_lexer("mermaid", special.TextLexer)
    app.connect("build-finished", _check_that_it_is_self_contained)
