"""Background tasks with a name, an owner and an end.

Raw ``asyncio.create_task`` is banned by the linter: a task that nobody holds may be collected while it runs, and one
that nobody awaits hides its exception.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

_log = structlog.get_logger(__name__)


class TaskGroup:
    """The tasks of one owner, ended together.

    Unlike ``asyncio.TaskGroup`` it is no context manager and one task that fails does not end its siblings: the failure
    is logged with the task's name and the others go on.
    """

    __slots__ = ("_owner", "_tasks")

    def __init__(self, owner: str) -> None:
        """`owner` is the first part of each task's name, as ``owner/name``."""
        self._owner = owner
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start `coroutine` as a task of this owner and hold it until it ends."""
        task = asyncio.get_running_loop().create_task(coroutine, name=f"{self._owner}/{name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def cancel(self) -> None:
        """Cancel every task and wait until the last one has ended."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("task failed", task=task.get_name(), exc_info=error)
