"""One more thread for copying: memory is copied faster by two cores than by one, and the other one is often idle.

Whoever has something to copy offers it and begins; the helper joins when it is free and takes pieces of it until none
is left. Where it is not free, or gets no core, the one who offered does all of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Thing = TypeVar("Thing")


class Task:
    """Work that two may do: each calls `act` with one thing after another until there are none."""

    def __init__(self, act: Callable[[Any], None], things: Iterable[Any]) -> None:
        self.is_helped = False
        """Whether the helper is at it."""
        self.error: BaseException | None = None
        self._act, self._things = act, iter(list(things))
        """A list's iterator gives each thing to one thread only."""

    def work(self) -> None:
        """Do what is left."""
        for thing in self._things:
            self._act(thing)


class Helper:
    """The helping thread of one worker; it starts with the first work. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._offered: deque[Task] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def share(self, act: Callable[[Thing], None], things: Iterable[Thing]) -> None:
        """Do something with each of some things, in any order and from two threads; return when all is done."""
        task = Task(act, things)
        with self._changed:
            if self._thread is None and not self._is_closed:
                self._begin()
            self._offered.append(task)
            self._changed.notify_all()
        try:
            task.work()
        finally:
            with self._changed:
                if task in self._offered:
                    self._offered.remove(task)
                while task.is_helped:
                    self._changed.wait()
        if task.error is not None:
            raise task.error

    def _begin(self) -> None:
        thread = threading.Thread(target=self._help, name="halocline-helper", daemon=True)
        with contextlib.suppress(RuntimeError):  # the system has no thread now; the next one who copies asks again
            thread.start()
            self._thread = thread

    def close(self) -> None:
        """Let the thread end; what is offered later is done without it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _help(self) -> None:
        while (task := self._next()) is not None:
            try:
                task.work()
            except BaseException as error:
                task.error = error
            with self._changed:
                task.is_helped = False
                self._changed.notify_all()

    def _next(self) -> Task | None:
        with self._changed:
            while not self._offered:
                if self._is_closed:
                    return None
                self._changed.wait()
            task = self._offered.popleft()
            task.is_helped = True
            return task
