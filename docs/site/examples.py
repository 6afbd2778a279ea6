"""Examples in docstrings are shown as code: in Markdown, `>>>` would be a quotation."""

import re

import griffe

EXAMPLE = re.compile(r"(?:^[ \t]*>>> .*\n?(?:^[ \t]*\S.*\n?)*)+", re.MULTILINE)


class Examples(griffe.Extension):
    """Puts a fence around every example."""

    def on_object(self, *, obj, **_):
        """Change the docstring of an object."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(match):
    return f"\n```pycon\n{match.group().rstrip()}\n```\n"
