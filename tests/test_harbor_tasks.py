"""Reading Harbor's layout: both schema generations, refusals by name, and what may not happen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rollout.errors import ProtectedSplit, UnsupportedTask, UserError
from rollout.records import Entry
from rollout.tasks.catalog.generate import FAMILIES, generate, make_task
from rollout.tasks.harbor import open_dataset, read_task
from rollout.tasks.harbor.config import TaskConfig, read_config
from rollout.tasks.harbor.dataset import digest_of
from rollout.tasks.harbor.source import HarborSource, as_task
from rollout.tasks.harbor.support import network_of, plan
from rollout.tasks.harbor.task import read_folder
from rollout.tasks.harbor.write import task_files as files_of
from rollout.tasks.harbor.write import write_dataset, write_files
from tests.harbor_tasks import TOML, write

OLD = """\
version = "1.0"
[metadata]
author_name = "A"
author_email = "a@example.org"
difficulty = "medium"
category = "software-engineering"
tags = ["shell"]
expert_time_estimate_min = 5.0
[agent]
timeout_sec = 900.0
[verifier]
timeout_sec = 240.0
[environment]
build_timeout_sec = 600.0
docker_image = "example/task:1"
cpus = 2.0
memory = "2G"
storage = "512M"
"""
STEPS = """\
[metadata.trsi]
userland = "host"
[environment]
network_mode = "no-network"
[[steps]]
name = "one"
min_reward = 1.0
[[steps]]
name = "two"
min_reward = {reward = 0.5, style = 0.1}
[steps.agent]
timeout_sec = 5.0
"""


def config(tmp_path: Path, text: str) -> TaskConfig:
    path = tmp_path / "task.toml"
    path.write_text(text)
    return read_config(path)


# --- task.toml --------------------------------------------------------------------------------


def test_the_old_generation_loads(tmp_path):
    found = config(tmp_path, OLD)
    assert found.schema_version == "1.0"
    assert found.environment.cpus == 2
    assert found.environment.memory_megabytes == 2048
    assert found.environment.storage_megabytes == 512
    assert found.metadata["tags"] == ["shell"]
    assert found.unknown_keys == ()


def test_no_version_is_the_newest_and_defaults_are_harbors(tmp_path):
    found = config(tmp_path, "")
    assert found.schema_version == "1.4"
    assert found.verifier.timeout_sec == 600.0
    assert found.agent.timeout_sec is None
    assert found.environment.network is None
    assert found.multi_step_reward_strategy == "mean"


def test_unknown_keys_are_listed_and_not_fatal(tmp_path):
    found = config(
        tmp_path,
        'novel = 1\n[environment]\nflavour = "x"\n[environment.healthcheck]\ncommand = "true"\n'
        'colour = 1\n[[steps]]\nname = "a"\npriority = 3\n[future]\nx = 1\n[metadata]\nfree = 1\n',
    )
    assert set(found.unknown_keys) == {
        "novel",
        "future",
        "environment.flavour",
        "environment.healthcheck.colour",
        "steps[0].priority",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('schema_version = "2.0"', r"schema_version = '2.0': input should be '1.0', .* or '1.4'"),
        ('version = "1.0"\nschema_version = "1.0"', "say the same"),
        ("[agent]\ntimeout_sec = -1.0", r"agent.timeout_sec = -1.0: .* greater than 0"),
        ('[agent]\ntimeout_sec = "5"', r"agent.timeout_sec = '5': input should be a valid number"),
        ("[environment]\ncpus = nan", r"environment.cpus = None|environment.cpus"),
        ("[environment]\ncpus = 1.5", r"environment.cpus = 1.5"),
        ('[environment]\nos = "beos"', r"environment.os = 'beos': .* 'linux' or 'windows'"),
        ('[environment]\nmemory = "2 gigs"', r"environment: size '2 gigs' is not of the form"),
        ('[environment]\nmemory = "2G"\nmemory_mb = 1024', "contradict each other"),
        (
            '[environment]\nallow_internet = false\nnetwork_mode = "public"',
            "allow_internet = false and network_mode = 'public' contradict",
        ),
        (
            '[environment]\nnetwork_mode = "some"',
            r"environment.network_mode = 'some': .*'no-network', 'public' or 'allowlist'",
        ),
        ('[agent]\nallowed_hosts = ["a.org"]', 'only allowed with network_mode = "allowlist"'),
        (
            '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1',
            'environment_mode = "shared" has no',
        ),
        (
            '[[steps]]\nname = "Stra\u00dfe"\n[[steps]]\nname = "STRASSE"',
            "the same name up to case",
        ),
        ('[[steps]]\nname = "\uff41"\n[[steps]]\nname = "a"', "the same name up to case"),
        ('[[steps]]\nname = "../up"', "is no name of a directory"),
        ('[[steps]]\nname = ".."', "is no name of a directory"),
        ("[[steps]]\nmin_reward = 1.0", "key steps.0.name is missing"),
        ('[task]\nname = "nameless"', "task.name = 'nameless'"),
        ("[task]\nversion = '1'", "key task.name is missing"),
        ('multi_step_reward_strategy = "max"', "'mean' or 'final'"),
        ("[environment]\ncpus = ", "not valid TOML"),
    ],
)
def test_a_bad_value_names_file_key_and_what_is_allowed(tmp_path, text, message):
    with pytest.raises(UserError, match=message) as caught:
        config(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'task.toml'}: ")
    assert "\n" not in str(caught.value)


# --- directories ------------------------------------------------------------------------------


def test_canary_lines_are_taken_off_the_request(tmp_path):
    text = "<!-- BENCHMARK CANARY do not train -->\n# harbor-canary GUID 1234\n# Title\n\nDo it.\n"
    task = read_task(write(tmp_path / "t", {"instruction.md": text}))
    assert task.steps[0].instruction == "# Title\n\nDo it."


def test_step_tests_override_those_of_the_task(tmp_path):
    root = write(
        tmp_path / "t",
        {
            "task.toml": STEPS,
            "tests/shared.py": "task",
            "tests/test.sh": "task",
            "steps/one/instruction.md": "First.",
            "steps/two/instruction.md": "Second.",
            "steps/two/tests/test.sh": "own",
            "steps/two/solution/solve.sh": "own",
            "steps/two/workdir/data.txt": "x",
        },
    )
    task = read_task(root)
    one, two = task.steps
    assert (one.name, one.instruction, two.instruction) == ("one", "First.", "Second.")
    assert task.tests(one)["test.sh"].data == b"task"
    assert task.tests(two)["test.sh"].data == b"own"
    assert task.tests(two)["shared.py"].data == b"task"
    assert task.solution(one)["solve.sh"].data == b"echo 42 > answer.txt\n"
    assert task.solution(two)["solve.sh"].data == b"own"
    assert task.workdir(two) == {"data.txt": Entry("file", 0o644, b"x")}
    assert one.config.min_reward == 1.0
    assert two.config.min_reward == {"reward": 0.5, "style": 0.1}
    assert two.config.agent.timeout_sec == 5.0


@pytest.mark.parametrize("place", ["tests/link", "solution/link", "environment/link", "tests"])
def test_nothing_of_a_task_lies_outside_it(tmp_path, place):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "test.sh").write_text("key")
    root = write(tmp_path / "t")
    target = root / place
    if target.exists():
        (root / place / "test.sh").unlink()
        target.rmdir()
    target.symlink_to(tmp_path / "secret")

    def read_all() -> None:
        task = read_task(root)
        task.tests(task.steps[0])
        task.solution(task.steps[0])
        task.context()

    with pytest.raises(UserError, match="leads out of"):
        read_all()


def test_a_link_inside_the_task_is_read(tmp_path):
    root = write(tmp_path / "t", {"environment/data.txt": "42"})
    (root / "tests" / "expected").symlink_to("../environment/data.txt")
    task = read_task(root)
    assert task.tests(task.steps[0])["expected"].data == b"42"


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("task.toml", "has a task.toml"),
        ("instruction.md", "has an instruction.md"),
        ("tests/test.sh", "it is what verifies a task"),
    ],
)
def test_what_is_missing_is_named(tmp_path, missing, message):
    root = write(tmp_path / "t")
    (root / missing).unlink()
    with pytest.raises(UserError, match=message) as caught:
        read_task(root)
    assert missing in str(caught.value)


def test_a_task_for_windows_is_named(tmp_path):
    root = write(tmp_path / "t", {"tests/test.bat": "x"})
    (root / "tests/test.sh").unlink()
    with pytest.raises(UserError, match=r"has a test.bat; only test.sh"):
        read_task(root)


# --- what the embedded sandbox can't give ------------------------------------------------------


def refusal(root: Path, **options: bool) -> str:
    with pytest.raises(UnsupportedTask) as caught:
        plan(read_task(root), **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ('docker_image = "a/b:1"', ""),
        ('os = "windows"', "environment.os = 'windows'"),
        ("gpus = 1", "environment.gpus = 1"),
        ("cpus = 9999", "environment.cpus = 9999"),
        ("memory_mb = 99999999", "environment.memory_mb = 99999999"),
        ("storage_mb = 10240", "environment.storage_mb = 10240"),
        ('tpu = {type = "v5p"}', "environment.tpu"),
        ('mcp_servers = [{name = "x"}]', "environment.mcp_servers"),
        ('skills_dir = "skills"', "environment.skills_dir"),
        ('healthcheck = {command = "true"}', "environment.healthcheck"),
        ("[agent]\nuser = 'root'", "agent.user = 'root'"),
        ("[verifier]\nuser = 0", "verifier.user = 0"),
        ("[verifier]\nnetwork_mode = 'public'", "verifier.network_mode = 'public'"),
        (
            "[verifier]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['mirror.example']",
            "verifier.network_mode = 'allowlist'",
        ),
        ("[[verifier.collect]]\ncommand = 'true'", "verifier.collect"),
        (
            "[verifier.environment]\ndocker_image = 'a/b:2'",
            "verifier.environment.docker_image = 'a/b:2'",
        ),
        ("[verifier.environment]\nenv = {A = '1'}", "verifier.environment.env = {'A': '1'}"),
        ("[verifier.environment]\nworkdir = '/w'", "verifier.environment.workdir = '/w'"),
        (
            "[verifier.environment]\nnetwork_mode = 'public'",
            "verifier.environment.network_mode = 'public'",
        ),
        ("[verifier.environment]\nnetwork_mode = 'no-network'\nos = 'linux'", ""),
        (
            "[[artifacts]]\nsource = 'out'\nexclude = ['*.log']",
            "artifacts.exclude = ['*.log']",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path, change, named):
    base = '[metadata.trsi]\nuserland = "host"\n[environment]\nnetwork_mode = "no-network"\n'
    root = write(tmp_path / "t", {"task.toml": base + change + "\n"})
    if not named:
        plan(read_task(root))
    else:
        assert named in refusal(root)


def test_a_network_is_refused_and_silence_is_not_consent(tmp_path):
    said = TOML.replace('"no-network"', '"allowlist"\nallowed_hosts = ["example.org"]')
    assert "environment.network_mode = 'allowlist'" in refusal(
        write(tmp_path / "a", {"task.toml": said})
    )
    silent = write(
        tmp_path / "b", {"task.toml": TOML.replace('network_mode = "no-network"', "cpus = 1")}
    )
    assert "public by Harbor's default" in refusal(silent)
    plan(read_task(silent), offline=True)


ON_IMAGE = 'docker_image = "a/b:1"\nnetwork_mode = "%s"\n'
LISTED = "network_mode = 'allowlist'\nallowed_hosts = ['b.example', '*.c.example']\n"


@pytest.mark.parametrize(
    ("environment", "rest", "agent", "verifier"),
    [
        ("no-network", "", "none", "none"),
        ("allowlist", "", "none", "none"),
        ("allowlist", "allowed_hosts = ['a.example']", "a.example", "a.example"),
        ("no-network", f"[agent]\n{LISTED}", "b.example,*.c.example", "none"),
        (
            "public",
            f"[agent]\n{LISTED}[verifier]\nnetwork_mode = 'no-network'",
            "b.example,*.c.example",
            "none",
        ),
        ("no-network", f"[verifier.environment]\n{LISTED}", "none", "b.example,*.c.example"),
        (
            "allowlist",
            "allowed_hosts = ['a.example']\n[verifier.environment]\nnetwork_mode = 'no-network'",
            "a.example",
            "none",
        ),
        (
            "allowlist",
            f"allowed_hosts = ['a.example']\n[agent]\nnetwork_mode = 'no-network'\n"
            f"[verifier]\n{LISTED}",
            "none",
            "b.example,*.c.example",
        ),
    ],
)
def test_a_phase_reaches_what_it_lists_else_what_its_environment_does(
    tmp_path, environment, rest, agent, verifier
):
    text = f"[environment]\n{ON_IMAGE % environment}{rest}\n"
    task = read_task(write(tmp_path / "t", {"task.toml": text}))
    how, (step,) = plan(task, images=True), task.steps
    for phase, hosts in ((step.config.agent, agent), (step.config.verifier, verifier)):
        network = network_of(task, phase)
        assert network == ("none" if hosts == "none" else f"allowlist:{hosts}")
        assert replace(how, workdir="/w").spec({}, 1.0, network).network == network


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (ON_IMAGE % "public", "environment.network_mode = 'public'"),
        (ON_IMAGE % "no-network" + "[agent]\nnetwork_mode = 'public'", "agent.network_mode"),
        (
            ON_IMAGE % "allowlist" + "allowed_hosts = ['a.example', '10.0.0.0/8']",
            "environment.allowed_hosts: '10.0.0.0/8'",
        ),
        ("docker_image = 'a/b:1'\n[agent]\nnetwork_mode = 'no-network'", "public by Harbor's"),
        (ON_IMAGE % "no-network" + "[agent]\nuser = 'agent'", "agent.user = 'agent'"),
    ],
)
def test_on_an_image_too_what_cannot_be_honoured_is_refused_by_name(tmp_path, text, named):
    root = write(tmp_path / "t", {"task.toml": f"[environment]\n{text}\n"})
    assert named in refusal(root, images=True)


def test_a_verifier_may_fetch_from_hosts_that_it_lists(tmp_path):
    fetches = {"tests/test.sh": "curl -o x https://b.example/x\n"}
    silent = write(
        tmp_path / "n", {"task.toml": f"[environment]\n{ON_IMAGE % 'no-network'}", **fetches}
    )
    assert "line 1: 'curl'" in refusal(silent, images=True)
    text = f"[environment]\n{ON_IMAGE % 'no-network'}[verifier]\n{LISTED}"
    plan(read_task(write(tmp_path / "l", {"task.toml": text, **fetches})), images=True)


def test_images_services_and_steps_of_a_build_are_refused_by_name(tmp_path):
    docker = (
        "FROM a:1\nWORKDIR /app\nRUN apt-get install -y \\\n  jq\nUSER root\nCOPY --chown=1 a b\n"
    )
    root = write(
        tmp_path / "t",
        {"environment/Dockerfile": docker, "environment/docker-compose.yaml": "services: {}"},
    )
    said = refusal(root)
    for part in ("line 3: RUN apt-get install -y", "line 5: USER root", "line 6: COPY --chown=1"):
        assert part in said
    assert "docker-compose.yaml (services)" in said
    foreign = write(tmp_path / "f", {"task.toml": OLD})
    assert "docker_image = 'example/task:1' (no images here" in refusal(foreign, offline=True)


def test_where_there_are_images_a_task_is_planned_on_its_own(tmp_path):
    named = plan(read_task(write(tmp_path / "n", {"task.toml": OLD})), offline=True, images=True)
    assert (named.image, named.dockerfile, named.workdir) == ("example/task:1", None, "")
    built = TOML.replace('userland = "host"\n', "") + "storage_mb = 10240\nworkdir = '/w'\n"
    task = read_task(write(tmp_path / "b", {"task.toml": built}))
    found = plan(task, images=True)
    assert (found.image, found.files, found.workdir) == (None, {}, "/w")
    assert found.dockerfile["Dockerfile"].data == b"FROM debian:12\nWORKDIR /app\n"
    # The container's own disk has no bound; what is mounted beside it has.
    assert found.disk_mb == 1024
    # One that the host serves needs none.
    host = plan(read_task(write(tmp_path / "h")), images=True)
    assert (host.image, host.dockerfile, host.workdir) == (None, None, "/app")
    assert host.spec({}, 1.0).profile == "strict"


def test_a_dockerfile_of_files_is_done_as_docker_would(tmp_path):
    root = write(
        tmp_path / "t",
        {
            "environment/Dockerfile": "# comment\nFROM a:1\nENV A=1 B='two words'\nWORKDIR /app\n"
            "COPY data/ /app/\nCOPY one.txt renamed.txt\nCOPY one.txt \\\n  two.txt sub/\nCMD x\n",
            "environment/data/a/b.txt": "b",
            "environment/one.txt": "1",
            "environment/two.txt": "2",
        },
    )
    found = plan(read_task(root))
    contents = {p: e.data for p, e in found.files.items() if e.kind == "file"}
    assert contents == {
        "a/b.txt": b"b",
        "renamed.txt": b"1",
        "sub/one.txt": b"1",
        "sub/two.txt": b"2",
    }
    assert found.env == {"A": "1", "B": "two words"}
    outside = "FROM a\nWORKDIR /app\nCOPY one.txt /etc/\nCOPY none.txt .\n"
    (root / "environment/Dockerfile").write_text(outside)
    assert "COPY to /etc/, outside /app" in refusal(root)
    assert "none.txt (no such file" in refusal(root)


def test_variables_of_the_host_are_passed_on_by_name_only(tmp_path, monkeypatch):
    text = TOML + 'env = {KEY = "${TRSI_TEST_KEY}", MODE = "${TRSI_TEST_MODE:-quiet}"}\n'
    task = read_task(write(tmp_path / "t", {"task.toml": text}))
    monkeypatch.setenv("TRSI_TEST_KEY", "of this machine")
    with pytest.raises(UserError, match="pass it on with --pass-env TRSI_TEST_KEY"):
        plan(task)
    found = plan(task, host_env={"TRSI_TEST_KEY": "given"})
    assert found.env == {"KEY": "given", "MODE": "quiet"}


@pytest.mark.parametrize("value", ["[1, 0]", "[0]", '"high"', "[false, true]", "[0, '1']"])
def test_a_bad_reward_range_names_file_and_key(tmp_path, value):
    text = TOML.replace('userland = "host"', f'userland = "host"\nreward_range = {value}')
    task = read_task(write(tmp_path / "t", {"task.toml": text}))
    with pytest.raises(UserError, match=r"task.toml: metadata.trsi.reward_range = "):
        plan(task)


# --- datasets ---------------------------------------------------------------------------------


def test_a_directory_of_tasks_and_a_single_task_are_datasets(tmp_path):
    for name in ("b", "a"):
        write(tmp_path / "set" / name)
    (tmp_path / "set" / "notes").mkdir()
    found = open_dataset(tmp_path / "set")
    assert [task.name for task in found] == ["a", "b"]
    assert [task.name for task in open_dataset(tmp_path / "set" / "a")] == ["a"]
    with pytest.raises(UserError, match="holds no task"):
        open_dataset(tmp_path / "set" / "notes")
    with pytest.raises(UserError, match="no such file"):
        open_dataset(tmp_path / "missing")


def registry(tmp_path: Path, *entries: dict[str, object]) -> Path:
    path = tmp_path / "registry.json"
    path.write_text(json.dumps(entries))
    return path


def test_a_local_registry_gives_the_newest_version(tmp_path):
    for name in ("old", "new", "head"):
        write(tmp_path / name)
    entries = [
        {"name": "set", "version": v, "description": "", "tasks": [{"name": t, "path": t}]}
        for v, t in (("1.9", "old"), ("1.10", "new"))
    ]
    path = registry(tmp_path, *entries)
    assert [t.name for t in open_dataset(path)] == ["new"]
    assert [t.name for t in open_dataset(path, "set@1.9")] == ["old"]
    path = registry(
        tmp_path, *entries, {"name": "set", "version": "head", "tasks": [{"path": "head"}]}
    )
    assert [t.name for t in open_dataset(path, "set")] == ["head"]
    with pytest.raises(UserError, match=r"name one of its datasets: set@1.10, set@1.9, set@head"):
        open_dataset(path, "other")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"path": "a", "git_url": "https://example.org/x"}, "nothing is downloaded here"),
        ({"path": "../../etc"}, "leads out of"),
        ({"path": "none"}, "no task at"),
        ({}, "key path is missing"),
    ],
)
def test_a_registry_is_read_strictly(tmp_path, task, message):
    write(tmp_path / "a")
    with pytest.raises(UserError, match=message):
        open_dataset(registry(tmp_path, {"name": "set", "tasks": [task]}))


def test_a_manifest_of_ours_is_held_against_its_digests(tmp_path):
    tasks = [make_task("copy_file", seed) for seed in (1, 2)]
    write_dataset(tmp_path / "set", "trsi/two", tasks, {})
    found = open_dataset(tmp_path / "set")
    assert (found.name, len(found), found.notes) == ("trsi/two", 2, ())
    changed = tmp_path / "set" / tasks[0].id / "tests" / "checks.json"
    changed.write_text(changed.read_text().replace("effective", "guard"))
    with pytest.raises(UserError, match="has digest sha256:"):
        open_dataset(tmp_path / "set" / "dataset.toml")


def test_a_foreign_manifest_says_that_its_digests_are_not_checked(tmp_path):
    write(tmp_path / "a")
    (tmp_path / "dataset.toml").write_text(
        '[dataset]\nname = "org/set"\n[[tasks]]\nname = "org/a"\ndigest = "sha256:00"\n'
    )
    found = open_dataset(tmp_path)
    assert found.notes == ("digests are of a kind that is not checked here",)
    assert [t.root.name for t in found] == ["a"]


# --- generated tasks --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Path:
    """Two tasks of every family as directories."""
    root = tmp_path_factory.mktemp("pool") / "set"
    tasks = generate(0, dict.fromkeys(FAMILIES, 2))
    write_dataset(root, "trsi/pool", tasks, {f.name: f.form for f in FAMILIES.values()})
    return root


def test_a_generated_task_survives_the_way_to_disk_and_back(pool):
    tasks = {task.id: task for task in generate(0, dict.fromkeys(FAMILIES, 2))}
    for read in open_dataset(pool):
        assert read.unknown_keys == ()
        assert as_task(read) == tasks[read.root.name]


def test_what_is_written_is_what_was_hashed(pool, tmp_path):
    task = make_task("nested_dir", 5)
    write_files(tmp_path / "t", files_of(task))
    assert digest_of(read_folder(tmp_path / "t", tmp_path / "t")) == digest_of(files_of(task))
    with pytest.raises(UserError, match="is there already"):
        write_files(tmp_path / "t", files_of(task))
    with pytest.raises(UserError, match="not an empty directory"):
        write_dataset(pool, "trsi/x", [task], {})


@pytest.mark.parametrize("purpose", ["train", "select", "evaluate"])
def test_a_purpose_sees_its_own_split_of_a_directory_and_no_other(pool, purpose):
    own = {"train": "train", "select": "validation", "evaluate": "test"}[purpose]
    source = HarborSource(pool, purpose=purpose)
    tasks = source.tasks(own)
    assert tasks
    assert {task.split for task in tasks} == {own}
    for other in {"train", "validation", "test"} - {own}:
        with pytest.raises(ProtectedSplit, match=f"{other!r} can't be opened"):
            source.tasks(other)


def test_a_test_task_that_claims_to_be_for_training_is_an_error(tmp_path):
    task = make_task("two_branch", 1)
    assert task.split == "test"
    write_dataset(tmp_path / "set", "trsi/x", [task], {})
    path = tmp_path / "set" / task.id / "task.toml"
    path.write_text(path.read_text().replace('split = "test"', 'split = "train"'))
    (tmp_path / "set" / "dataset.toml").unlink()
    with pytest.raises(ProtectedSplit, match="belongs to 'test'"):
        HarborSource(tmp_path / "set", purpose="train").tasks("train")


def test_a_task_of_another_origin_is_no_training_data(tmp_path):
    write(tmp_path / "set" / "a")
    with pytest.raises(UserError, match="needs family, seed and split"):
        HarborSource(tmp_path / "set").tasks("train")
