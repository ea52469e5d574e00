"""Several policies on the same workload, one process each where there are cores."""

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from policies.registry import PolicySection
from simulator.fleet.options import FleetOptions
from simulator.fleet.result import ReplayResult
from simulator.fleet.run import Progress, replay
from simulator.workloads.workload import Workload

_LOOK: Final = 0.2
"""Seconds between two looks at how far the processes are."""
_COLLECT_AFTER: Final = 200_000
"""Objects allocated between two looks of the cyclic collector: a replay makes hundreds of thousands that live to its end, and no cycles."""

# What a process of the pool works on. Forked ones have it without a copy.
_work: "tuple[Workload, FleetOptions, Sequence[str], Mapping[str, PolicySection], Any] | None" = None


def side_by_side(
    workload: Workload,
    options: FleetOptions,
    policies: Sequence[str],
    *,
    sections: Mapping[str, PolicySection] | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[ReplayResult]:
    """Replay the workload once per policy, each on a fleet of its own; the results in the order of `policies`.

    Args:
        workload: what arrives.
        options: the fleet.
        policies: names.
        sections: policies of one's own, as in the configuration.
        jobs: processes; None: as many as there are cores.
        progress: told of the requests that have ended and of all, over all policies.

    Raises:
        Exception: what `replay` raises.
    """
    own = sections or {}
    total = len(policies) * len(workload.requests)
    jobs = min(len(policies), jobs or _cores())
    if jobs > 1:
        return _in_processes(workload, options, policies, own, jobs, progress)
    results = []
    with _seldom_collecting():
        for index, policy in enumerate(policies):
            before = index * len(workload.requests)
            report = None if progress is None else _shifted(progress, before, total)
            results.append(_timed(workload, options, policy, own, report))
    return results


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _in_processes(
    workload: Workload,
    options: FleetOptions,
    policies: Sequence[str],
    sections: Mapping[str, PolicySection],
    jobs: int,
    progress: Progress | None,
) -> list[ReplayResult]:
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if "fork" in methods else None)
    ended = context.Array("q", len(policies), lock=False)
    arguments = (workload, options, policies, sections, ended)
    with ProcessPoolExecutor(jobs, context, _prepare, arguments) as pool:
        futures = [pool.submit(_run, index) for index in range(len(policies))]
        waiting = set(futures)
        try:
            while waiting:
                done, waiting = wait(waiting, _LOOK, FIRST_COMPLETED)
                for future in done:
                    future.result()
                if progress is not None:
                    progress(sum(ended), len(policies) * len(workload.requests))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _prepare(*arguments: Any) -> None:
    global _work  # noqa: PLW0603 - this is how a pool's process keeps something
    _work = arguments


def _run(index: int) -> ReplayResult:
    assert _work is not None
    workload, options, policies, sections, ended = _work

    def report(done: int, _: int) -> None:
        ended[index] = done

    with _seldom_collecting():
        return _timed(workload, options, policies[index], sections, report)


def _timed(
    workload: Workload,
    options: FleetOptions,
    policy: str,
    sections: Mapping[str, PolicySection],
    progress: Progress | None,
) -> ReplayResult:
    start = time.perf_counter()
    result = replay(workload, options, policy, sections=sections, progress=progress)
    return replace(result, wall=time.perf_counter() - start)


def _shifted(progress: Progress, before: int, total: int) -> Callable[[int, int], None]:
    def report(done: int, _: int) -> None:
        progress(before + done, total)

    return report


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    """What is there now is not looked at by the cyclic collector meanwhile, and what comes seldom."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
