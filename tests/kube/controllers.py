"""The control plane's loop: with every change, and every half second, each controller makes its next step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tests.kube.store import ApiError, Store

_LOOK_S = 0.5
Controller = Callable[[], None]


class ControllerManager:
    """Runs controllers, one after the other, in one thread. An error ends it, and is raised by `stop`."""

    def __init__(self, store: Store, controllers: Sequence[Controller]) -> None:
        self._store = store
        self._controllers = controllers
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kube-controller-manager")
        self._error: BaseException | None = None

    def start(self) -> None:
        """In a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Raises what ended it early, if anything did."""
        self._stopping.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                version = self._store.version
                for step in self._controllers:
                    self._step(step)
                self._store.events_since(version, timeout_s=_LOOK_S)
        except BaseException as exc:  # kept for `stop`: a thread has nobody to raise it to
            self._error = exc

    def _step(self, step: Controller) -> None:
        try:
            step()
        except ApiError as exc:
            if exc.code != 404:  # what it was about has just been deleted; the next turn sees that
                raise
