"""The strings that stand below the fields of a dataclass: Python keeps them in the source alone."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any


def field_docstrings(cls: type[Any]) -> dict[str, str]:
    """Each documented field's text, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    (definition,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    found = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                found[name] = " ".join(words.split())
    return found
