"""Pool sizes from a file that somebody else keeps, such as a Kubernetes ConfigMap that is mounted.

    prefill: 3
    decode: 2
    generation: 7     # grows with each release; may be left out

A pool gets the file's size when the file says another one than it said last. What it said last is kept in Redis: so
neither a new controller nor a `tandem scale` in between is undone by a file that has not changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml
from redis.exceptions import RedisError

from tandem.errors import ConfigError
from tandem.pool_state import MAX_POOL_SIZE, FileSizes, PoolState
from tandem.types import Role

logger = logging.getLogger(__name__)

PERIOD_S = 2.0


def read_sizes(path: Path) -> FileSizes:
    """What the file says now. Raises ConfigError with what is wrong with it."""
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as exc:
        raise ConfigError(f"the sizes file {path} cannot be read: {exc.strerror}") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(f"the sizes file {path} is not YAML: {' '.join(str(exc).split())}") from exc
    if not isinstance(document, dict):
        raise ConfigError(f"the sizes file {path} must be like 'prefill: 3' and 'decode: 2' on lines of their own")
    if unknown := sorted(str(key) for key in set(document) - {*Role, "generation"}):
        raise ConfigError(f"the sizes file {path} has {', '.join(unknown)}; known are prefill, decode, generation")
    return FileSizes(
        sizes={role: _number(path, document, role, most=MAX_POOL_SIZE) for role in Role},
        generation=_number(path, {"generation": 0} | document, "generation", most=2**53),
    )


def _number(path: Path, document: Mapping[str, object], name: str, *, most: int) -> int:
    value = document.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ConfigError(f"the sizes file {path}: {name} must be 0 to {most}, got {value!r}", param=name)
    return value


def changed_sizes(last: FileSizes | None, said: FileSizes) -> dict[Role, int]:
    """Pools whose size the file has changed. An older generation is a view that has not caught up: it changes none."""
    if last is None:
        return dict(said.sizes)
    if said.generation < last.generation:
        return {}
    return {role: size for role, size in said.sizes.items() if last.sizes.get(role) != size}


class SizesFile:
    """Looks at the file again and again and writes its changes to the desired state, while `is_acting` says so."""

    def __init__(
        self, path: Path, state: PoolState, *, is_acting: Callable[[], bool], note: Callable[[str], None]
    ) -> None:
        self._path = path
        self._state = state
        self._is_acting = is_acting
        self._note = note
        self._last: FileSizes | None = None
        self._complaint = ""

    async def follow(self) -> None:
        """Until cancelled. A file that cannot be used changes nothing, and is complained of once."""
        while True:
            if self._is_acting():
                await self.look()
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Once."""
        try:
            await self._take(read_sizes(self._path))
        except ConfigError as exc:
            self._complain(exc.message)
        except RedisError as exc:
            self._complain(f"the sizes file is not followed, Redis is away: {exc}")
        else:
            self._complaint = ""

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            logger.warning("%s", text)
        self._complaint = text

    async def _take(self, said: FileSizes) -> None:
        last = await self._state.file_sizes() or await self._remind()
        changed = changed_sizes(last, said)
        if changed or last is None or said.generation > last.generation:
            await self._state.take_file_sizes(said, changed)
            last = said
        self._last = last
        if changed:
            sizes = ", ".join(f"{role}={size}" for role, size in changed.items())
            self._note(f"the sizes file asks for {sizes} (generation {said.generation})")

    async def _remind(self) -> FileSizes | None:
        """A Redis that lost its memory is told what the file said last."""
        if self._last is not None:
            await self._state.take_file_sizes(self._last, {})
        return self._last
