"""What a sandboxed episode costs: CPU and wall time of each part.

    python benchmarks/sandbox.py [--episodes N] [--at-once N]

CPU is user and system time of this process, of the launcher and of everything it reaped. What the
kernel does later for others (network namespaces are freed by a worker thread) is not in it, nor
are the programs that the commands themselves run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import time
from collections import defaultdict
from pathlib import Path

from rollout.protocols import SandboxSpec
from rollout.sandbox.bubblewrap import BubblewrapBackend

FILES = {"src/a.txt": b"alpha\n" * 20, "src/b.txt": b"beta\n" * 20, "README": b"read me\n"}
COMMANDS = ("cd src", "x=$(<a.txt); echo ${#x}", "echo done >c.txt", "cd ..; pwd")


def cpu_seconds(launcher: int) -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    fields = Path(f"/proc/{launcher}/stat").read_text().rpartition(") ")[2].split()
    ticks = sum(int(field) for field in fields[11:15])
    return own.ru_utime + own.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


async def episode(backend: BubblewrapBackend, times: dict[str, list[float]]) -> None:
    async def timed(part, awaitable):
        started = time.perf_counter()
        result = await awaitable
        times[part].append(time.perf_counter() - started)
        return result

    sandbox = await timed("start", backend.start(SandboxSpec()))
    await timed("put", sandbox.put_files(FILES, directories=("out",)))
    for command in COMMANDS:
        await timed("exec", sandbox.exec(command))
    await timed("snapshot", sandbox.snapshot())
    await timed("close", sandbox.close())


async def measure(episodes: int, at_once: int) -> None:
    backend = BubblewrapBackend()
    times: dict[str, list[float]] = defaultdict(list)
    await episode(backend, times)
    times.clear()
    gate = asyncio.Semaphore(at_once)

    async def gated() -> None:
        async with gate:
            await episode(backend, times)

    cpu, wall = cpu_seconds(backend.pid), time.perf_counter()
    await asyncio.gather(*(gated() for _ in range(episodes)))
    cpu = (cpu_seconds(backend.pid) - cpu) / episodes
    wall = (time.perf_counter() - wall) / episodes
    await backend.aclose()
    print(f"{at_once:4d} at once: {1e3 * cpu:6.2f} ms CPU, {1e3 * wall:6.2f} ms wall an episode")
    for part, values in times.items():
        print(f"     {part:9s} median {1e3 * statistics.median(values):8.2f} ms")


async def output(megabytes: int) -> None:
    backend = BubblewrapBackend()
    sandbox = await backend.start(SandboxSpec())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = await sandbox.exec(f"head -c {megabytes}000000 /dev/zero")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    await backend.aclose()
    print(
        f"{megabytes} MB of output: {result.duration_s:.3f} s, {grown / 1024:.1f} MiB more memory"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 16, 128])
    options = parser.parse_args()
    for at_once in options.at_once:
        asyncio.run(measure(max(options.episodes, at_once), at_once))
    asyncio.run(output(20))


if __name__ == "__main__":
    main()
