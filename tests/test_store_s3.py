"""The same store on an object store: a local S3 server, a process of its own.

The server is moto's, which `.ci/store.sh` installs into an environment of its own and names in
TRSI_S3_SERVER. Without it these tests are skipped.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import uuid

import numpy as np
import pytest

from rollout.errors import StoreError
from rollout.store.compact import compact
from rollout.store.inspect import statistics, verify
from rollout.store.loader import Loader
from rollout.store.plan import Packed
from rollout.store.reader import SegmentReader
from rollout.store.segments import SegmentWriter
from tests.store_data import ROOT, VOCAB, assert_same, make

SERVER = os.environ.get("TRSI_S3_SERVER") or shutil.which("moto_server")
pytestmark = pytest.mark.skipif(SERVER is None, reason="no S3 server; .ci/store.sh brings one")


@pytest.fixture(scope="module")
def endpoint():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [SERVER, "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 90
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert server.poll() is None, "the server ended"
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def location(endpoint, monkeypatch):
    # The server takes any.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing-in-particular")
    bucket = f"b{uuid.uuid4().hex[:12]}"
    request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")
    urllib.request.urlopen(request, timeout=240).read()
    return {
        "driver": "s3",
        "bucket": bucket,
        "path": "runs/1/",
        "endpoint": endpoint,
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "environment"},
    }


def test_written_read_pinned_compacted_and_verified_as_on_a_disk(location) -> None:
    writer = SegmentWriter(location, vocab_size=VOCAB)
    for i in range(4):
        batch = [make(f"{i}#{k}", 300, i) for k in range(2)]
        writer.write(f"s/{i}", batch)
        writer.write_columns(f"s/{i}", "value_t", [np.full(300, i, np.float32)] * 2)
    pinned = SegmentReader(location).pinned()
    assert pinned.segments() == tuple(f"s/{i}" for i in range(4))
    writer.write("late", [make("late")])
    assert compact(location).segments == 5
    assert compact(location).segments == 0
    assert pinned.segments() == tuple(f"s/{i}" for i in range(4))
    for reader in (pinned, SegmentReader(location)):
        for i in range(4):
            for k in range(2):
                assert_same(make(f"{i}#{k}", 300, i), reader.get(f"{i}#{k}"))
            for column in reader.read_columns(f"s/{i}", "value_t"):
                np.testing.assert_array_equal(column, np.full(300, i, np.float32))
    assert list(verify(location, vocab_size=VOCAB)) == []
    found = statistics(location)
    assert (found.segments, found.sealed, found.trajectories) == (5, 5, 9)
    assert found.stored_bytes is None
    with Loader(location, plan=Packed(2, 700), seed=0) as loader:
        ids = [x.trajectory.id for s in loader.epochs(1) for row in s.rows for x in row]
    assert sorted(ids) == sorted([f"{i}#{k}" for i in range(4) for k in range(2)] + ["late"])


WRITER = """
import json, sys
from rollout.store.segments import SegmentWriter
from tests.store_data import VOCAB, make
location, worker, count = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
writer = SegmentWriter(location, vocab_size=VOCAB)
for i in range(count):
    writer.write(f"w{worker}/{i}", [make(f"w{worker}/{i}", 200, 100 * worker + i)])
    print(f"w{worker}/{i}", flush=True)
"""


def test_several_writers_of_one_store_lose_nothing(location) -> None:
    # What this rests on: tensorstore sends If-Match and If-None-Match with the manifest, and the
    # server holds to them, as Amazon's does.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, json.dumps(location), str(w), "6"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        for w in range(3)
    ]
    acknowledged = [line for p in writers for line in p.communicate(timeout=200)[0].split()]
    assert [p.returncode for p in writers] == [0, 0, 0]
    reader = SegmentReader(location)
    assert sorted(acknowledged) == sorted(reader.segments())
    assert len(acknowledged) == 18
    for w in range(3):
        for i in range(6):
            assert_same(make(f"w{w}/{i}", 200, 100 * w + i), reader.get(f"w{w}/{i}"))


def test_a_bucket_that_is_not_there_is_one_clear_line(location) -> None:
    missing = {**location, "bucket": "no-such-bucket"}
    with pytest.raises(StoreError, match="writing segment s") as caught:
        SegmentWriter(missing, vocab_size=VOCAB).write("s", [make("a")])
    assert "\n" not in str(caught.value)
