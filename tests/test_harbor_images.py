"""Harbor tasks with an image of their own, on a real engine: built or named, judged, or refused."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import docker
import pytest

from rollout.protocols import Sandbox
from rollout.sandbox import make_backend
from rollout.sandbox.engine import default_host
from rollout.sandbox.select import IMAGE_VARIABLE
from rollout.tasks.harbor import Step, open_dataset
from rollout.tasks.harbor.gates import check_task
from rollout.tasks.harbor.protocol import Attempt, attempt
from rollout.tasks.harbor.support import on_image, plan
from tests.harbor_tasks import TOML, write
from trsi_jax.cli.main import call

# Says nothing of a userland: what it needs is in its image.
ON_IMAGE = TOML.replace('[metadata.trsi]\nuserland = "host"\n', "")
TOOL = "#!/bin/sh\\nexpr 6 '*' 7\\n"
SOLVE = "test -f given.txt && tool > answer.txt && rm given.txt\n"
# What the agent deleted is gone for the verifier; what the image brought is there.
TESTS = """\
#!/bin/bash
cd /srv/work
if [ ! -e given.txt ] && [ "$(cat answer.txt)" = "$(tool)" ]; then echo 1; else echo 0; fi \
> /logs/verifier/reward.txt
"""


@pytest.fixture
def image(docker_engine) -> str:
    """Name of the tests' image."""
    return os.environ[IMAGE_VARIABLE]


def task(root: Path, base: str, files: dict[str, str] | None = None) -> Path:
    """A task that its Dockerfile alone can serve: a program and a directory with a file."""
    dockerfile = (
        f"FROM {base}\nCOPY given.txt /srv/work/\nWORKDIR /srv/work\n"
        f'RUN printf "{TOOL}" > /usr/bin/tool && chmod 755 /usr/bin/tool\n'
    )
    return write(
        root,
        {
            "task.toml": ON_IMAGE,
            "environment/Dockerfile": dockerfile,
            "environment/given.txt": "given\n",
            "solution/solve.sh": SOLVE,
            "tests/test.sh": TESTS,
            **(files or {}),
        },
    )


def gates(root: Path, name: str):
    async def main():
        backend = make_backend(name)
        try:
            return await check_task(root, backend)
        finally:
            await backend.aclose()

    return asyncio.run(main())


@pytest.mark.docker
@pytest.mark.parametrize("backend", ["auto", "docker"])
def test_a_dockerfile_is_built_and_its_task_passes_its_gates(tmp_path, image, backend, capsys):
    root = task(tmp_path / "t", image)
    assert call(["tasks", "check", str(root), "--backend", backend]) == 0
    assert "1 ok" in " ".join(capsys.readouterr().out.split())


@pytest.mark.docker
def test_a_named_image_is_taken_and_a_named_working_directory_too(tmp_path, image):
    client = docker.APIClient(base_url=default_host(), version="auto")
    try:
        digest = client.inspect_image(image)["Id"]
    finally:
        client.close()
    named = f'{ON_IMAGE}docker_image = "{digest}"\n'
    root = write(tmp_path / "t", {"task.toml": named})
    (root / "environment/Dockerfile").write_text("FROM never-looked-at\n")
    checked = gates(root, "auto")
    assert (checked.state, checked.reason) == ("ok", "")
    where = {
        "task.toml": f'{named}workdir = "/data/here"\n',
        "tests/test.sh": "cat /data/here/answer.txt >/logs/verifier/reward.txt ||"
        " echo 0 >/logs/verifier/reward.txt\n",
        "solution/solve.sh": "pwd | grep -c '^/data/here$' > answer.txt\n",
    }
    root = write(tmp_path / "w", where)
    checked = gates(root, "docker")
    assert (checked.state, checked.reason) == ("ok", "")


@pytest.mark.docker
def test_nothing_but_the_working_directory_reaches_the_verifier(tmp_path, image):
    root = task(tmp_path / "t", image)

    async def forge(box: Sandbox, step: Step) -> None:
        done = await box.exec(
            "printf '#!/bin/sh\\necho forged\\n' >/usr/bin/tool; echo forged >answer.txt; "
            "rm given.txt; echo 1 >/logs/verifier/reward.txt; ln -s /usr/bin/tool /tests/test.sh; "
            "tool; id -u"
        )
        # It has its way with its own container.
        assert done.output == b"forged\n0\n"

    async def main() -> Attempt:
        backend = make_backend("auto")
        try:
            (read,) = open_dataset(root)
            how = await on_image(plan(read, images=True), read, backend)
            assert how.workdir == "/srv/work"
            return await attempt(read, how, backend, forge)
        finally:
            await backend.aclose()

    done = asyncio.run(main())
    assert (done.reward, done.success) == (0.0, False)
    assert any("reward.txt was there before" in flag for flag in done.outcomes[0].flags)


@pytest.mark.docker
def test_a_phase_gets_the_way_out_that_it_lists_and_the_others_none(tmp_path, image):
    """The proxy tells the agent that a host is not on the list; nothing answers the tests."""
    ask = "wget -O /dev/null http://elsewhere.example/ 2>&1 | grep -c '403 Forbidden'\n"
    files = {
        "solution/solve.sh": ask.replace("\n", " > answer.txt\n"),
        "tests/ask.sh": ask,
        "tests/test.sh": "cd /data; answered=$(bash /tests/ask.sh)\n"
        'if [ "$answered$http_proxy" = 0 ] && [ "$(cat answer.txt)" = 1 ]; then echo 1; '
        "else echo 0; fi >/logs/verifier/reward.txt\n",
    }
    listed = "network_mode = 'allowlist'\nallowed_hosts = ['listed.example']\n"
    toml = ON_IMAGE.replace("[agent]\n", f"[agent]\n{listed}")
    files["task.toml"] = f'{toml}docker_image = "{image}"\nworkdir = "/data"\n'
    checked = gates(write(tmp_path / "t", files), "docker")
    assert (checked.state, checked.reason) == ("ok", "")


@pytest.mark.docker
def test_a_program_that_outlives_the_tests_leaves_no_verdict(tmp_path, image):
    lives = {"tests/test.sh": TESTS + "setsid sleep 99 >/dev/null 2>&1 &\n"}
    checked = gates(task(tmp_path / "t", image, lives), "docker")
    assert (checked.state, "outlived the tests" in checked.reason) == ("faulty", True)


@pytest.mark.docker
def test_what_the_engine_does_not_have_is_refused_by_name(tmp_path, image):
    missing = gates(task(tmp_path / "a", "trsi-none:1"), "docker")
    assert missing.state == "unsupported"
    assert "environment/Dockerfile: image 'trsi-none:1' is not in the engine" in missing.reason
    assert "docker pull trsi-none:1" in missing.reason
    named = ON_IMAGE + 'docker_image = "trsi-none@sha256:' + "0" * 64 + '"\n'
    missing = gates(write(tmp_path / "b", {"task.toml": named}), "auto")
    assert "docker_image = 'trsi-none@sha256:0" in missing.reason
    files = {"environment/Dockerfile": f"FROM {image}\nRUN exit 3\n"}
    broken = gates(task(tmp_path / "c", image, files), "docker")
    assert (broken.state, "can't be built" in broken.reason) == ("unsupported", True)
    root = {"environment/Dockerfile": f"FROM {image}\nWORKDIR /usr\n"}
    broken = gates(task(tmp_path / "d", image, root), "docker")
    assert (broken.state, "'/usr' is one of the system's" in broken.reason) == ("unsupported", True)


def test_without_an_engine_a_task_with_an_image_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    monkeypatch.delenv("TRSI_DOCKER_HOSTS", raising=False)
    root = task(tmp_path / "t", "debian:12")
    refused = gates(root, "auto")
    assert refused.state == "unsupported"
    assert "environment/Dockerfile: no container engine at unix:" in refused.reason
    assert "sudo apt-get install docker.io" in refused.reason
    refused = gates(root, "bubblewrap")
    assert refused.state == "unsupported"
    assert "its image (no images here" in refused.reason
    neither = write(tmp_path / "n", {"task.toml": ON_IMAGE})
    (neither / "environment/Dockerfile").unlink()
    assert "neither docker_image nor environment/Dockerfile" in gates(neither, "auto").reason
    compose = task(tmp_path / "c", "debian:12", {"environment/docker-compose.yaml": "services: {}"})
    assert "docker-compose.yaml (services)" in gates(compose, "auto").reason
