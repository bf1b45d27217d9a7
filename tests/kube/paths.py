"""What a request to the API server is about: its path and query, read into one value."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

_RESOURCE = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<api>[^/]+/[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>status|log|scale|eviction))?"
)
_DOCUMENT = re.compile(r"/(?P<openapi>openapi/v3/)?(?:api/(?P<core>v1)|apis/(?P<api>[^/]+/[^/]+))")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A resource's path. `name` is empty for a collection, `namespace` where the path has none."""

    api: str
    plural: str
    namespace: str = ""
    name: str = ""
    subresource: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """The query parameters that are understood."""

    values: dict[str, str] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """A parameter, or the empty string."""
        return self.values.get(name, "")

    def flag(self, name: str) -> bool:
        """Whether it is there and not false."""
        return self.values.get(name, "false") not in ("false", "0", "")


def split_path(path: str) -> tuple[str, Query]:
    """The path without its query, and the query."""
    parts = urlsplit(path)
    values = {name: found[-1] for name, found in parse_qs(parts.query, keep_blank_values=True).items()}
    return parts.path.rstrip("/"), Query(values=values)


def document_of(path: str) -> tuple[str, bool] | None:
    """(group and version, whether OpenAPI) when the path is of a discovery document."""
    match = _DOCUMENT.fullmatch(path)
    return None if match is None else (match["core"] or match["api"], match["openapi"] is not None)


def target_of(path: str) -> Target | None:
    """The resource at a path, if it is one."""
    match = _RESOURCE.fullmatch(path)
    if match is None:
        return None
    return Target(
        api=match["core"] or match["api"],
        plural=match["plural"],
        namespace=match["namespace"] or "",
        name=match["name"] or "",
        subresource=match["sub"] or "",
    )
