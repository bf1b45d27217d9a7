"""Which variables a chat template reads from outside: what is told to it and not set, looped over or defined in it."""

from __future__ import annotations

from functools import lru_cache

from jinja2 import Environment, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser

_FUNCTIONS = ("raise_exception", "strftime_now")
"""What transformers has for templates to call, beside jinja's own: nobody's to set."""


class _Generation(Extension):
    """The block that transformers adds to jinja: `{% generation %}` around what the assistant has said."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """What is in it, as if the block were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ENVIRONMENT = Environment(extensions=[_Generation, loopcontrols])
_ENVIRONMENT.globals.update(dict.fromkeys(_FUNCTIONS))


@lru_cache(maxsize=8)
def template_variables(template: str) -> frozenset[str]:
    """Their names. Raises jinja2.TemplateError for what is no template."""
    return frozenset(find_undeclared_variables(_ENVIRONMENT.parse(template)))
