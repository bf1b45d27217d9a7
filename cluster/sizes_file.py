"""Pool sizes from a file that somebody else keeps, such as a Kubernetes ConfigMap that is mounted.

    prefill: 3
    decode: 2
    generation: 7     # grows with each release; may be left out

A pool gets the file's size when the file says another one than it said last. What it said last is kept in Redis: so
neither a new controller nor a `tandem scale` in between is undone by a file that has not changed. A file that goes back
to an older generation is a rollback, unless it may be a copy that has not caught up yet.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml
from redis.exceptions import RedisError

from tandem.errors import ConfigError
from tandem.pool_state import MAX_POOL_SIZE, FileSizes, PoolState
from tandem.types import Role

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
CATCH_UP_S = 180.0
"""A copy of the file that is older for so long is no late one: a kubelet renews what is mounted every minute or two."""


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
    """Pools whose size the file has changed."""
    if last is None:
        return dict(said.sizes)
    return {role: size for role, size in said.sizes.items() if last.sizes.get(role) != size}


class View:
    """Whether an older generation is what the file says now, or a copy of it that may not have caught up.

    It is no late copy when this very copy has been newer before, or has been older for `CATCH_UP_S`.
    """

    def __init__(self) -> None:
        self._newest = 0
        self._late: tuple[int, float] | None = None

    def is_current(self, last: FileSizes | None, said: FileSizes, *, now_s: float) -> bool:
        """`last` is what anybody has read of the file, `said` what its copy here says now."""
        if last is None or said.generation >= last.generation:
            self._newest, self._late = said.generation, None
            return True
        self._newest = max(self._newest, said.generation)
        if self._late is None or self._late[0] != said.generation:
            self._late = (said.generation, now_s)
        return said.generation < self._newest or now_s - self._late[1] >= CATCH_UP_S


class SizesFile:
    """Looks at the file again and again and writes its changes to the desired state, while `is_acting` says so."""

    def __init__(
        self,
        path: Path,
        state: PoolState,
        *,
        is_acting: Callable[[], bool],
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._state = state
        self._is_acting = is_acting
        self._note = note
        self._clock = clock
        self._view = View()
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
        if not self._view.is_current(last, said, now_s=self._clock()):
            self._last = last
            return
        changed = changed_sizes(last, said)
        if said != last:
            await self._state.take_file_sizes(said, changed)
        self._last = said
        if changed:
            sizes = ", ".join(f"{role}={size}" for role, size in changed.items())
            self._note(f"the sizes file asks for {sizes} (generation {said.generation})")

    async def _remind(self) -> FileSizes | None:
        """A Redis that lost its memory is told what the file said last."""
        if self._last is not None:
            await self._state.take_file_sizes(self._last, {})
        return self._last
