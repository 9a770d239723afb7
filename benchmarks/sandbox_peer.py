"""mini-swe-agent's environments, timed like ours; run by `benchmarks/sandbox.py` in their own venv.

Prints one JSON object: environment -> part -> milliseconds, one number a repeat.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict


def timed(times, part, call):
    begun = time.perf_counter()
    result = call()
    times[part].append(1e3 * (time.perf_counter() - begun))
    return result


def measure(make, repeats, output_bytes):
    times = defaultdict(list)
    for _ in range(repeats):
        environment = timed(times, "start", make)
        # Theirs starts nothing before the first command; it belongs to the start.
        times["start"][-1] += sum(first(environment))
        for _ in range(5):
            timed(times, "exec", lambda box=environment: run(box, "true"))
    fill = f"head -c {output_bytes} /dev/zero"
    timed(times, "20 MB of output", lambda: run(environment, fill))
    return times


def first(environment):
    begun = time.perf_counter()
    run(environment, "true")
    return [1e3 * (time.perf_counter() - begun)]


def run(environment, command):
    result = environment.execute({"command": command})
    assert result["returncode"] == 0, result
    return result


def main():
    repeats, output_bytes, bwrap, image = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5]
    os.environ["MSWEA_SILENT_STARTUP"] = "1"
    from minisweagent.environments.docker import DockerEnvironment
    from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment

    found = {
        "mini-swe-agent, bubblewrap": measure(
            lambda: BubblewrapEnvironment(executable=bwrap), repeats, output_bytes
        )
    }
    if image:
        found["mini-swe-agent, docker"] = measure(
            lambda: DockerEnvironment(image=image), repeats, output_bytes
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
