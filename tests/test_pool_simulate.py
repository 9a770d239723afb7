"""The model of the shell gives what bash and coreutils give, byte for byte."""

import os
import stat
import subprocess

import pytest

from rollout.records import Entry
from rollout.tasks.pool import simulate
from rollout.tasks.pool.demonstrations import Teaching, demonstrations
from rollout.tasks.pool.families import FAMILIES
from rollout.tasks.pool.generate import make_task
from rollout.tasks.verifier import verify

FILES = {
    "olive": b"tiger\nplum\ntiger\napple\n",
    "cedar": b"3\n",
    "maple": b"",
    "birch": b"heron\n",
    "copper": b"".join(b"%d\n" % i for i in range(15)),
}
DIRECTORIES = ("island", "harbor")

EDGES = """
echo tiger
echo tiger plum
echo heron > nectar
echo heron >> birch
echo heron > island
echo heron > island/nectar
echo heron > missing/nectar
echo heron > birch/nectar
touch nectar
touch birch
touch island
touch missing/nectar
mkdir nectar
mkdir island
mkdir birch
mkdir missing/nectar
rmdir island
rmdir birch
rmdir missing
rm birch
rm island
rm missing
rm birch/nectar
mv birch nectar
mv birch olive
mv birch island
mv birch missing/nectar
mv birch birch
mv missing nectar
mv island nectar
mv island harbor
mv island birch
mv island island
mv birch birch/nectar
cp birch nectar
cp birch olive
cp birch island
cp birch birch
cp birch missing/nectar
cp missing nectar
cp island nectar
cp birch birch/nectar
cat olive
cat maple
cat island
cat missing
ls
wc -l olive
wc -l < olive
wc -l < maple > nectar
wc -l olive > nectar
wc -l island
wc -l missing
wc -l < missing > nectar
wc -l > nectar < missing
sort olive
sort copper
sort -u olive
sort -u olive > nectar
sort missing > nectar
sort island
grep tiger olive
grep tiger olive > nectar
grep heron olive
grep olive tiger > nectar
grep tiger island
grep -rl apple
grep -rl nothing
sed s/tiger/lotus/ olive
sed -i s/tiger/lotus/ olive
sed -i s/nothing/lotus/ olive
sed s/tiger/lotus/ missing
sed -i s/tiger/lotus/ missing
sed s/tiger/lotus/ island
sed -i s/tiger/lotus/ island
sed -i s/e/lotus/ olive
chmod 600 olive
chmod 755 olive
chmod olive 600
chmod 600 missing
chmod 689 olive
head -2 olive
head -2 olive > nectar
head -3 cedar
head copper
head island
head -2 missing
""".strip().splitlines()


ENVIRONMENT = {"PATH": os.environ["PATH"], "LC_ALL": "C"}


def plant(workdir, files, directories):
    workdir.mkdir(parents=True)
    workdir.chmod(0o755)
    for directory in directories:
        (workdir / directory).mkdir()
        (workdir / directory).chmod(0o755)
    for path, data in files.items():
        (workdir / path).write_bytes(data)
        (workdir / path).chmod(0o644)


def bash(workdir, command):
    """(standard output, exit code) of one command."""
    done = subprocess.run(
        ["bash", "-c", f"umask 022\n{command}"],
        cwd=workdir,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=20,
    )
    return done.stdout, done.returncode


def snapshot(workdir):
    tree = {}
    for path in sorted(workdir.rglob("*")):
        status = path.lstat()
        name, mode = path.relative_to(workdir).as_posix(), stat.S_IMODE(status.st_mode)
        if stat.S_ISDIR(status.st_mode):
            tree[name] = Entry("directory", mode)
        elif stat.S_ISLNK(status.st_mode):
            tree[name] = Entry("symlink", mode, os.fsencode(path.readlink()))
        else:
            tree[name] = Entry("file", mode, path.read_bytes())
    return tree


def compare(workdir, tree, command):
    outcome = simulate.run(tree, command)
    assert (outcome.stdout, outcome.exit_code) == bash(workdir, command), command
    assert outcome.tree == snapshot(workdir), command
    return outcome.tree


@pytest.mark.parametrize("command", EDGES)
def test_single_commands_on_every_kind_of_operand(command, tmp_path):
    plant(tmp_path / "w", FILES, DIRECTORIES)
    compare(tmp_path / "w", simulate.initial_tree(FILES, DIRECTORIES), command)


def test_sequences_keep_modes_and_contents(tmp_path):
    plant(tmp_path / "w", FILES, DIRECTORIES)
    tree = simulate.initial_tree(FILES, DIRECTORIES)
    for command in (
        "chmod 600 olive",
        "cp olive nectar",
        "cp birch nectar",
        "chmod 755 birch",
        "sed -i s/heron/lotus/ birch",
        "mv birch island",
        "rmdir island",
        "mv island harbor",
        "echo lotus >> nectar",
        "echo lotus > olive",
        "grep -rl nothing",
        "ls",
    ):
        tree = compare(tmp_path / "w", tree, command)


def test_demonstrations_show_what_a_real_shell_gives(tmp_path):
    """A few hundred commands of noisy transcripts, many of them mistaken."""
    stream = demonstrations(17, Teaching(random_argument=0.3))
    n_commands = n_failed = 0
    for i in range(150):
        document = next(stream)
        workdir = tmp_path / str(i)
        plant(workdir, document.files, document.directories)
        for turn in document.turns:
            if turn.exit_code is not None:
                assert bash(workdir, turn.command) == (turn.stdout, turn.exit_code), turn
                n_commands += 1
                n_failed += turn.exit_code != 0
    assert n_commands > 200
    assert n_failed > 15


@pytest.mark.parametrize(
    "command",
    [
        "",
        "python x",
        "ls island",
        "cat < olive > olive",
        "sort olive > olive",
        "wc -l < island",
        "wc -l",
        "wc olive",
        "grep -rl tiger > nectar",
        "grep -rl e",
        "head -x olive",
        "sed s/a/b/g olive",
        "sed s/a.b/c/ olive",
        "cp birch olive island",
        "echo tiger >",
        "echo tiger > nectar > lotus",
        "chmod 600 island",
    ],
)
def test_what_the_model_does_not_know_is_refused(command):
    with pytest.raises(simulate.UnsupportedCommand):
        simulate.run(simulate.initial_tree(FILES, DIRECTORIES), command)


def test_the_given_tree_is_left_alone():
    tree = simulate.initial_tree(FILES, DIRECTORIES)
    before = dict(tree)
    for command in ("rm birch", "sed -i s/tiger/lotus/ olive", "mv olive island", "mkdir nectar"):
        simulate.run(tree, command)
    assert tree == before


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_solutions_pass_in_a_real_shell(family, tmp_path):
    for seed in range(100, 102):
        task = make_task(family, seed)
        workdir = tmp_path / str(seed)
        plant(workdir, task.files, task.directories)
        assert verify(task, snapshot(workdir)).progress == 0.0
        for command in task.oracle:
            assert bash(workdir, command)[1] == 0, command
        assert verify(task, snapshot(workdir)).strict_success
