"""What a sandbox costs, beside mini-swe-agent's environments, in one run.

    python benchmarks/sandbox.py [--repeats N] [--episodes N] [--at-once N ...]

First a table of medians: start until the first command has run, a command in a live sandbox, 20 MB
of output. The container rows need an engine (DOCKER_HOST) and an image in TRSI_DOCKER_IMAGE; "SDK
exec" is the Docker SDK's own `exec_run` in the same container. mini-swe-agent is installed into a
virtual environment of its own, below .cache. Then what whole episodes cost in bubblewrap: CPU is
user and system time of this process, of the launcher and of everything it reaped. What the kernel
does later for others (network namespaces are freed by a worker thread) is not in it, nor are the
programs that the commands themselves run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import time
import venv
from collections import defaultdict
from pathlib import Path

import docker

from rollout.errors import SandboxUnavailable
from rollout.protocols import SandboxSpec
from rollout.sandbox import make_backend
from rollout.sandbox.bubblewrap import BubblewrapBackend, find_bwrap

ROOT = Path(__file__).resolve().parent.parent
PEER = ROOT / ".cache/sandbox-bench"
PEER_PACKAGES = ("mini-swe-agent==2.4.6",)
PEER_NEEDS = ("pydantic>=2", "platformdirs", "rich", "python-dotenv")
OUTPUT_BYTES = 20_000_000

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


async def latencies(name: str, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each part, one number a repeat."""
    backend = make_backend(name)
    times: dict[str, list[float]] = defaultdict(list)
    try:
        # What a backend makes once (its launcher, the prepared image) is no part of a start.
        await (await backend.start(SandboxSpec())).close()
        for _ in range(repeats):
            begun = time.perf_counter()
            sandbox = await backend.start(SandboxSpec())
            await sandbox.exec("true")
            times["start"].append(1e3 * (time.perf_counter() - begun))
            for _ in range(20):
                begun = time.perf_counter()
                await sandbox.exec("true")
                times["exec"].append(1e3 * (time.perf_counter() - begun))
            if name == "docker":
                times["SDK exec"] += await asyncio.to_thread(sdk_exec, sandbox.container_id)
            begun = time.perf_counter()
            await sandbox.close()
            times["close"].append(1e3 * (time.perf_counter() - begun))
        sandbox = await backend.start(SandboxSpec())
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(3):
            result = await sandbox.exec(f"head -c {OUTPUT_BYTES} /dev/zero")
            assert result.total_bytes == OUTPUT_BYTES, result
            times["20 MB of output"].append(1e3 * result.duration_s)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        times["MiB more memory after it"].append(grown / 1024)
    finally:
        await backend.aclose()
    return times


def sdk_exec(container: str) -> list[float]:
    """Milliseconds of the SDK's own exec of `true`, three times."""
    client = docker.from_env()
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        code, _ = client.containers.get(container).exec_run(["true"])
        times.append(1e3 * (time.perf_counter() - begun))
        assert code == 0
    client.close()
    return times


async def many(count: int) -> None:
    """Hold sandboxes open together, and run a command in each."""
    backend = BubblewrapBackend()
    try:
        begun = time.perf_counter()
        boxes = await asyncio.gather(*(backend.start(SandboxSpec()) for _ in range(count)))
        started = time.perf_counter() - begun
        said = await asyncio.gather(
            *(box.exec(f"echo {n}") for n, box in enumerate(boxes)), return_exceptions=True
        )
        right = sum(getattr(result, "output", b"") == b"%d\n" % n for n, result in enumerate(said))
        print(f"{right} of {count} bubblewrap sandboxes live at once, started in {started:.2f} s")
    finally:
        await backend.aclose()


def peer(repeats: int, image: str) -> dict[str, dict[str, list[float]]]:
    """The same of mini-swe-agent, in its own environment."""
    python = PEER / "bin/python"
    if not python.exists():
        venv.create(PEER, with_pip=True)
        install = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, *PEER_NEEDS], check=True)
        # Without the model clients that it asks for, which its environments don't use.
        subprocess.run([*install, "--no-deps", *PEER_PACKAGES], check=True)
    arguments = [str(repeats), str(OUTPUT_BYTES), str(find_bwrap()), image]
    script = Path(__file__).with_name("sandbox_peer.py")
    ran = subprocess.run(
        [python, script, *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    # It talks before, too.
    return json.loads(ran.stdout.splitlines()[-1])


def table(rows: dict[str, dict[str, list[float]]]) -> None:
    for name, times in rows.items():
        for part, values in times.items():
            print(
                f"{name:28s} {part:26s} median {statistics.median(values):8.2f}"
                f"  min {min(values):8.2f}  ({len(values)} values)"
            )


def load() -> str:
    """How busy the machine was over 1, 5 and 15 minutes."""
    return "load " + " ".join(f"{load:.2f}" for load in os.getloadavg())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 16, 128])
    options = parser.parse_args()
    print(load(), f"{os.cpu_count()} cores")
    rows = {"bubblewrap": asyncio.run(latencies("bubblewrap", options.repeats))}
    image = os.environ.get("TRSI_DOCKER_IMAGE", "")
    try:
        rows["docker"] = asyncio.run(latencies("docker", options.repeats))
    except SandboxUnavailable as error:
        print(f"no container rows: {error}")
        image = ""
    rows |= peer(options.repeats, image)
    print("milliseconds")
    table(rows)
    asyncio.run(many(64))
    for at_once in options.at_once:
        asyncio.run(measure(max(options.episodes, at_once), at_once))
    print(load())


if __name__ == "__main__":
    main()
