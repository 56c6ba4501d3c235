"""The site of `make docs`: Sphinx, MyST and furo. Nothing is fetched."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

from docutils.nodes import SkipNode
from docutils.utils.math.latex2mathml import tex2mathml

project = "mx_driving, portable"
author = "the mx_driving portable contributors"
release = importlib.metadata.version("mx-driving-portable")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {release}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
highlight_language = "text"
html_math_renderer = "mathml"
default_role = "code"  # docstrings mark code with single backticks
myst_heading_anchors = 3
myst_fence_as_directive = ["math"]  # code hosts show such a fence as an equation, too
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
autosummary_generate = False
viewcode_line_numbers = True
napoleon_custom_sections = ["Outside", "Source"]


def block_equations(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """A docstring's indented block is an equation or a piece of code, unless a section such as "Args:" is above it."""
    above, done = "", []
    for line in lines:
        starts_block = line.startswith("    ") and done and not done[-1].strip()
        if starts_block and not above.startswith(" ") and not re.fullmatch(r"\w+:", above):
            done += ["::", ""]
            above = line
        elif line.strip() and not (line.startswith(" ") and above.startswith(" ")):
            above = line
        done.append(line)
    lines[:] = done


def inline(self: Any, node: Any) -> None:
    self.body.append(tex2mathml(node.astext()))
    raise SkipNode


def block(self: Any, node: Any) -> None:
    self.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise SkipNode


def break_names(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Let names in code break behind an underscore or a dot, and nowhere else."""
    for part in {"body", "toc"} & set(context):
        names = re.compile(r'(?<=<span class="pre">)[^<]+|(?<=<h1>)\w+(?=<)')
        context[part] = names.sub(lambda name: re.sub(r"([_.])(?=\w)", r"\1<wbr>", name[0]), context[part])
        context[part] = context[part].replace('<span class="pre">-', '<span class="pre option">-')


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    app.connect("html-page-context", break_names)
    app.connect("autodoc-process-docstring", block_equations, priority=100)  # before napoleon
