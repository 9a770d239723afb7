"""What verification adds to an episode: CPU and wall time of each protocol.

    python benchmarks/verify.py [--each N] [--at-once N ...]

"host": the snapshot is judged on the host, with a sandbox only where a check runs a command.
"tests": a fresh sandbox, the agent's files restored, test.sh run, the result read strictly.
What the kernel does later for others (namespaces are freed by a worker thread) is in neither.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rollout.sandbox.bubblewrap import BubblewrapBackend
from rollout.tasks.catalog.generate import FAMILIES, generate
from rollout.tasks.harbor import open_dataset
from rollout.tasks.harbor.protocol import (
    run_solution,
    start_attempt,
    take,
    verify_checks,
    verify_step,
)
from rollout.tasks.harbor.source import as_task
from rollout.tasks.harbor.support import plan
from rollout.tasks.harbor.write import write_dataset

LIMIT_MS = 60.0


def cpu_seconds(launcher: int) -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    fields = Path(f"/proc/{launcher}/stat").read_text().rpartition(") ")[2].split()
    ticks = sum(int(field) for field in fields[11:15])
    return own.ru_utime + own.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


async def measure(
    name: str,
    backend: BubblewrapBackend,
    jobs: list[Callable[[], Awaitable[object]]],
    at_once: int,
) -> float:
    gate = asyncio.Semaphore(at_once)
    seconds: list[float] = []

    async def one(job: Callable[[], Awaitable[object]]) -> None:
        async with gate:
            begun = time.perf_counter()
            await job()
            seconds.append(time.perf_counter() - begun)

    await one(jobs[0])
    seconds.clear()
    cpu, wall = cpu_seconds(backend.pid), time.perf_counter()
    await asyncio.gather(*(one(job) for job in jobs))
    cpu = 1e3 * (cpu_seconds(backend.pid) - cpu) / len(jobs)
    wall = 1e3 * (time.perf_counter() - wall) / len(jobs)
    median = 1e3 * statistics.median(seconds)
    print(
        f"{name:6s} {at_once:3d} at once: {wall:6.1f} ms wall a task, {cpu:6.1f} ms CPU,"
        f" latency median {median:6.1f} ms"
    )
    return wall


async def run(each: int, at_once: list[int]) -> None:
    print(f"load average before: {' '.join(f'{x:.1f}' for x in os.getloadavg())}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        tasks = generate(0, dict.fromkeys(FAMILIES, each))
        write_dataset(out, "trsi/bench", tasks, {f.name: f.form for f in FAMILIES.values()})
        backend = BubblewrapBackend()
        host: list[Callable[[], Awaitable[object]]] = []
        tests: list[Callable[[], Awaitable[object]]] = []
        for task in open_dataset(out):
            how, step, record = plan(task), task.steps[0], as_task(task)
            box = await start_attempt(how, backend, task, step)
            await run_solution(task, box, step)
            left = await take(box, how, task, step)
            host.append(lambda r=record, x=left: verify_checks(r.checks, x.tree, backend))
            tests.append(lambda t=task, s=step, x=left, p=how: verify_step(t, s, x, p, backend))
        walls = []
        for n in at_once:
            walls.append(await measure("host", backend, host, n))
            walls.append(await measure("tests", backend, tests, n))
        await backend.aclose()
    print(f"load average after: {' '.join(f'{x:.1f}' for x in os.getloadavg())}")
    print(f"largest {max(walls):.1f} ms wall a task; the aim is {LIMIT_MS:g} on two quiet cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=4, help="tasks of each family")
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 2, 8])
    options = parser.parse_args()
    asyncio.run(run(options.each, options.at_once))


if __name__ == "__main__":
    main()
