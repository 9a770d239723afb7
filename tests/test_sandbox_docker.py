"""What container sandboxes have beyond the common contract, on a real engine.

Where a defence is claimed, the attack is first shown to work without it.
"""

from __future__ import annotations

import asyncio
import io
import os
import socket
import tarfile
import time

import docker
import pytest

from rollout.errors import (
    ImageNotFound,
    LimitUnsupported,
    SandboxDead,
    SandboxUnavailable,
    TransferError,
)
from rollout.protocols import SandboxSpec
from rollout.records import Entry
from rollout.sandbox import container_driver, make_backend
from rollout.sandbox.archive import unpack
from rollout.sandbox.docker import BOOT_LABEL, OWNER_LABEL, DockerBackend, _boot_id, reap
from rollout.sandbox.egress import Egress, allowed_hosts, is_public
from rollout.sandbox.engine import Engine, default_host
from rollout.sandbox.images import bases_of
from rollout.sandbox.select import IMAGE_VARIABLE, AutoBackend

pytestmark = pytest.mark.docker


@pytest.fixture
def image(docker_engine):
    """Name of the tests' image."""
    return os.environ[IMAGE_VARIABLE]


@pytest.fixture
def client(docker_engine):
    client = docker.APIClient(base_url=default_host(), version="auto")
    yield client
    client.close()


def run(check, **options):
    async def main():
        backend = DockerBackend(**options)
        try:
            await check(backend)
        finally:
            await backend.aclose()

    asyncio.run(main())


def context(dockerfile: str, **files: str):
    """A build context: a Dockerfile and plain files."""
    named = {"Dockerfile": dockerfile, **files}
    return {path: Entry("file", 0o644, text.encode()) for path, text in named.items()}


# --- images -----------------------------------------------------------------------------------


def test_nothing_is_pulled_unasked(image):
    async def check(backend):
        for name in ("trsi-none:1", "trsi-none@sha256:" + "0" * 64):
            with pytest.raises(ImageNotFound, match="docker pull trsi-none"):
                await backend.start(SandboxSpec(image=name))
        with pytest.raises(ImageNotFound, match="trsi-none:2"):
            await backend.build(context("ARG V=2\nFROM trsi-none:$V\nRUN true\n"))
        with pytest.raises(ImageNotFound, match="trsi-none:3"):
            await backend.build(context(f"FROM {image}\nCOPY --from=trsi-none:3 /a /b\n"))

    run(check)


def test_bases_are_what_a_dockerfile_stands_on():
    text = (
        "ARG BASE=debian\nFROM --platform=linux/amd64 ${BASE}:12 AS build\nFROM build\n"
        "# FROM comment\nFROM scratch\nCOPY --from=build a b\nCOPY --from=0 a b\n"
        "COPY --from=alpine:3 \\\n a b\nfrom python:3.12\n"
    )
    assert bases_of(text) == ["debian:12", "alpine:3", "python:3.12"]


def test_a_dockerfile_is_built_once_and_its_files_are_the_agents(image, client):
    files = context(
        f"FROM {image}\nWORKDIR /app\nENV GREETING=hello\nCOPY note /app/d/\n", note="n"
    )

    async def check(backend):
        first = await asyncio.gather(backend.build(files), backend.build(files))
        assert first[0] == first[1] == await backend.build(files)
        box = await backend.start(SandboxSpec(image=first[0]))
        said = await box.exec("echo $GREETING; cat d/note; echo more >>d/note && cat d/note")
        assert said.output == b"hello\nnnmore\n"
        assert await box.snapshot() == {
            "d": Entry("directory", 0o755),
            "d/note": Entry("file", 0o644, b"nmore\n"),
        }
        # The same image by its id.
        other = await backend.start(SandboxSpec(image=client.inspect_image(first[0])["Id"]))
        assert (await other.exec("cat d/note")).output == b"n"
        with pytest.raises(SandboxUnavailable, match="can't be built"):
            await backend.build(context(f"FROM {image}\nRUN exit 3\n"))

    run(check)


def test_an_image_that_fills_the_disk_is_refused_with_the_reason(image):
    async def check(backend):
        big = context(f"FROM {image}\nCOPY big /app/\n", big="x" * 3_000_000)
        name = await backend.build(big)
        with pytest.raises(SandboxUnavailable, match="disk_mb"):
            await backend.start(SandboxSpec(image=name, disk_mb=2))

    run(check)


def test_an_image_without_bash_is_refused_with_the_reason(image, client):
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("empty"))
    client.import_image_from_data(layer.getvalue(), repository="trsi-no-bash")

    async def check(backend):
        with pytest.raises(SandboxUnavailable, match="has no bash"):
            await backend.start(SandboxSpec(image="trsi-no-bash"))

    try:
        run(check)
    finally:
        client.remove_image("trsi-no-bash")


def test_auto_takes_docker_for_an_image_and_bubblewrap_else(image):
    async def check():
        backend = AutoBackend()
        try:
            embedded = await backend.start(SandboxSpec())
            contained = await backend.start(SandboxSpec(image=image))
            told = [(await box.exec("ls /")).output.split() for box in (embedded, contained)]
            assert b"root" not in told[0]
            assert b"root" in told[1]
        finally:
            await backend.aclose()

    asyncio.run(check())


# --- profiles ---------------------------------------------------------------------------------


def test_compat_is_the_images_own_user_with_few_capabilities(image):
    async def check(backend):
        box = await backend.start(SandboxSpec(image=image, profile="compat"))
        assert "disk" not in box.enforced
        said = await box.exec("id -u; echo x >/etc/new && cat /etc/new; cat /proc/self/status")
        status = said.output.decode()
        assert status.startswith("0\nx\n")
        assert "NoNewPrivs:\t1" in status
        bounding = int(status.split("CapBnd:\t")[1].split()[0], 16)
        # CAP_NET_RAW, CAP_SYS_ADMIN, CAP_SYS_PTRACE, CAP_MKNOD, CAP_AUDIT_WRITE, CAP_SETFCAP.
        assert not any(bounding >> number & 1 for number in (13, 21, 19, 27, 29, 31))
        # CAP_CHOWN, which package managers need.
        assert bounding & 1
        assert (await box.exec("mount -t tmpfs x /mnt")).exit_code != 0
        with pytest.raises(LimitUnsupported, match="disk"):
            await backend.start(SandboxSpec(profile="compat", require=frozenset({"disk"})))
        with pytest.raises(LimitUnsupported, match="strict, compat"):
            await backend.start(SandboxSpec(profile="loose"))

    run(check, image=image)


def test_memory_pids_and_cpu_are_what_was_asked_for(image, client):
    async def check(backend):
        spec = SandboxSpec(memory_mb=96, pids=20, cpus=0.5)
        box = await backend.start(spec)
        assert {"memory", "pids", "cpu", "network", "disk", "lifetime"} <= box.enforced
        host = client.inspect_container(box.container_id)["HostConfig"]
        assert (host["Memory"], host["MemorySwap"]) == (96 << 20, 96 << 20)
        assert (host["PidsLimit"], host["NanoCpus"]) == (28, 500_000_000)
        assert host["NetworkMode"] == "none"
        # Podman lists each: the contract's own tests look at what is left.
        assert host["CapDrop"] == ["ALL"] or {"CHOWN", "SETUID", "NET_RAW"} <= set(host["CapDrop"])
        assert host["SecurityOpt"] == ["no-new-privileges"]
        assert host["ReadonlyRootfs"]
        assert not host["Binds"]
        assert not host["Privileged"]

    run(check, image=image)


# --- the driver -------------------------------------------------------------------------------

FORGE = r"""
for pid in 1 $PPID; do for fd in /proc/$pid/fd/*; do
  printf 'reached %s\n' "$fd" 2>/dev/null; { printf '' >"$fd"; } 2>/dev/null && echo "wrote $fd"
done; done; head -c 20 /proc/1/environ /proc/1/mem 2>/dev/null
"""


def test_no_command_can_reach_the_driver(image, client):
    # Without the defence, an ordinary bash as process 1: its descriptors can be written to.
    container = client.create_container(
        image,
        ["bash", "-c", "exec 9>/dev/shm/log; while :; do read -t 9 <> <(:); done"],
        user="65500:65500",
        host_config=client.create_host_config(network_mode="none", cap_drop=["ALL"]),
    )["Id"]
    try:
        client.start(container)
        # The SDK's stream may lose what comes first, so it is asked more than once.
        made = (client.exec_create(container, ["bash", "-c", FORGE])["Id"] for _ in range(5))
        assert any(b"wrote /proc/1/fd/9" in client.exec_start(attack) for attack in made)
    finally:
        client.remove_container(container, force=True)

    async def check(backend):
        box = await backend.start(SandboxSpec())
        await box.put_files({"forge": FORGE.encode()})
        said = (await box.exec("bash forge")).output
        assert b"wrote" not in said
        assert (await box.exec("echo alive")).output == b"alive\n"

    run(check, image=image)


# --- the end ----------------------------------------------------------------------------------


def test_a_container_removed_in_a_command_is_noticed_at_once(image, client):
    async def check(backend):
        box = await backend.start(SandboxSpec())
        command = asyncio.ensure_future(box.exec("sleep 99", timeout_s=99.0))
        await asyncio.sleep(0.3)
        begun = time.monotonic()
        await asyncio.to_thread(client.remove_container, box.container_id, force=True)
        with pytest.raises(SandboxDead):
            await command
        assert time.monotonic() - begun < 10.0
        for call in (box.exec("true"), box.put_files({"a": b""}), box.get_file("a")):
            with pytest.raises(SandboxDead):
                await call
        await box.close()

    run(check, image=image)


def test_the_reaper_takes_the_dead_owners_containers_only(image, client):
    backend = DockerBackend()
    prefix, namespace, pid, started, _ = backend.labels[OWNER_LABEL].split(".")
    dead = f"{prefix}.{namespace}.{pid}.{int(started) + 1}.00"
    foreign = {OWNER_LABEL: dead, BOOT_LABEL: "another-machine"}
    labels = {
        "live": backend.labels,
        "dead": {OWNER_LABEL: dead, BOOT_LABEL: _boot_id()},
        "foreign": foreign,
        "strange": {OWNER_LABEL: "garbage", BOOT_LABEL: _boot_id()},
        "other": {},
    }
    made = {
        name: client.create_container(image, ["bash"], labels=given)["Id"]
        for name, given in labels.items()
    }
    engine = Engine(default_host())
    try:
        engine.connect()
        # Tests beside this one may have left some, too.
        assert reap(engine) >= 1
        left = {found["Id"] for found in client.containers(all=True)}
        assert {name for name, container in made.items() if container in left} == (
            set(labels) - {"dead"}
        )
    finally:
        engine.close()
        for name in set(labels) - {"dead"}:
            client.remove_container(made[name])


def test_a_fleet_spreads_over_its_engines_and_passes_over_a_dead_one(image, tmp_path):
    nobody = f"unix://{tmp_path}/nobody.sock"

    async def check(backend):
        boxes = [await backend.start(SandboxSpec()) for _ in range(4)]
        busy = [place.live for place in backend._places]
        assert busy == [0, 2, 2]
        for box in boxes:
            await box.close()
        assert [place.live for place in backend._places] == [0, 0, 0]

    # The same engine under two names stands for two.
    run(check, image=image, hosts=[nobody, default_host(), default_host() + "/"])


def test_an_engine_that_is_not_there_names_the_remedy(tmp_path):
    async def check(backend):
        with pytest.raises(SandboxUnavailable, match=r"DOCKER_HOST"):
            await backend.start(SandboxSpec())

    run(check, hosts=[f"unix://{tmp_path}/nobody.sock"])


# --- the network ------------------------------------------------------------------------------

ASK = """python3 - <<'END'
import socket
for request in {requests!r}:
    peer = socket.create_connection(("127.0.0.1", 3128), timeout=5)
    peer.sendall(request.encode())
    print(peer.recv(200).decode().splitlines()[0], flush=True)
    peer.close()
for address in {addresses!r}:
    try:
        socket.create_connection(tuple(address), timeout=1)
        print("reached", address)
    except OSError as error:
        print("refused")
END"""


def test_an_allowlist_lets_nothing_else_out(image):
    """Names that are not listed, and listed ones that stand for the host, are refused."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        socket.create_connection(address, timeout=1).close()
        requests = [
            "CONNECT example.com:443 HTTP/1.1\r\n\r\n",
            "CONNECT localhost:443 HTTP/1.1\r\n\r\n",
            "GET http://localhost/ HTTP/1.1\r\nHost: example.org\r\n\r\n",
            "CONNECT 169.254.169.254:80 HTTP/1.1\r\n\r\n",
            "CONNECT localhost:22 HTTP/1.1\r\n\r\n",
        ]
        addresses = [address, ("169.254.169.254", 80)]

        async def check(backend):
            spec = SandboxSpec(network="allowlist:localhost,*.example.org,169.254.169.254")
            box = await backend.start(spec)
            said = await box.exec(ASK.format(requests=requests, addresses=addresses))
            assert said.output.decode() == "HTTP/1.1 403 Forbidden\n" * 5 + "refused\n" * 2
            told = await box.exec("echo $https_proxy; tail -n +3 /proc/net/dev | grep -c :")
            assert told.output == b"http://127.0.0.1:3128\n1\n"

        run(check, image=image)


def test_an_allowed_host_is_reached_by_name_and_asked_by_that_name():
    """A real server on the loopback; only the rule about addresses is set aside for it."""

    async def answer(reader, writer):
        asked = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + asked)
        await writer.drain()
        writer.close()

    async def ask(port, request):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        said = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return said

    async def main():
        web = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = web.sockets[0].getsockname()[1]
        listener = socket.create_server(("127.0.0.1", 0))
        proxy = Egress(("localhost",), permitted=lambda address: True, ports=(port,))
        await proxy.serve(listener)
        at = listener.getsockname()[1]
        plain = f"GET http://localhost:{port}/a?b HTTP/1.1\r\nHost: evil\r\nX: y\r\n\r\n"
        said = await ask(at, plain.encode())
        assert b"GET /a?b HTTP/1.1\r\nHost: localhost:%d\r\nX: y\r\n" % port in said
        assert b"evil" not in said
        tunnel = f"CONNECT localhost:{port} HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n"
        said = await ask(at, tunnel.encode())
        assert said.startswith(b"HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK")
        assert b"403" in await ask(at, b"CONNECT localhost:1 HTTP/1.1\r\n\r\n")
        assert proxy.refused == ["localhost:1 is not on the list"]
        await proxy.close()
        web.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("192.168.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00:ec2::254", False),
        ("::ffff:127.0.0.1", False),
    ],
)
def test_only_the_public_internet_is_public(address, public):
    assert is_public(address) is public


@pytest.mark.parametrize("network", ["public", "allowlist:", "allowlist:a b", "allowlist:http://x"])
def test_unknown_networks_are_refused(network):
    with pytest.raises(LimitUnsupported, match=r"allowlist:example\.org"):
        allowed_hosts(network)
    assert allowed_hosts("allowlist:A.org, *.b.net") == ("a.org", "*.b.net")
    assert allowed_hosts("none") is None
    assert make_backend("docker").name == "docker"


# --- archives ---------------------------------------------------------------------------------


def archive(*members: tuple[str, bytes, bytes], size: int | None = None) -> bytes:
    """An empty list of modes and a tar of (name, type, content or link target)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, kind, data in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            if kind == tarfile.REGTYPE:
                member.size = len(data)
            else:
                member.linkname = data.decode()
            tar.addfile(member, io.BytesIO(data))
    return b"\0" + out.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        archive(("../evil", tarfile.REGTYPE, b"x")),
        archive(("/etc/evil", tarfile.REGTYPE, b"x")),
        archive(("a/../../evil", tarfile.REGTYPE, b"x")),
        archive(("link", tarfile.SYMTYPE, b"/etc"), ("link/evil", tarfile.REGTYPE, b"x")),
        archive(("hard", tarfile.LNKTYPE, b"/etc/shadow")),
        archive(("big", tarfile.REGTYPE, b"x" * 1001)),
        archive(("deep/" * 70 + "x", tarfile.REGTYPE, b"")),
        b"\0garbage" * 100,
    ],
)
def test_a_hostile_archive_is_refused_and_touches_no_disk(data):
    with pytest.raises(TransferError):
        unpack(data, 1000)


def test_no_name_in_an_archive_leads_out(tmp_path):
    evil = archive(("../evil", tarfile.REGTYPE, b"x"))
    through = archive(("l", tarfile.SYMTYPE, b".."), ("l/evil2", tarfile.REGTYPE, b"x"))
    (tmp_path / "inside").mkdir()
    trusting = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
    for data in (evil, through):
        with tarfile.open(fileobj=io.BytesIO(data[1:])) as tar:
            tar.extractall(tmp_path / "inside", **trusting)
    assert {path.name for path in tmp_path.iterdir()} == {"inside", "evil", "evil2"}
    for data in (evil, through):
        with pytest.raises(TransferError):
            unpack(data, 1000)


def test_an_archive_keeps_links_as_data_and_modes_as_listed():
    tree = unpack(
        b"0 a\0"
        + archive(("./a", tarfile.REGTYPE, b"x"), ("./l", tarfile.SYMTYPE, b"/etc/shadow")),
        1000,
    )
    assert tree == {"a": Entry("file", 0, b"x"), "l": Entry("symlink", 0o777, b"/etc/shadow")}
    assert container_driver.VERSION
