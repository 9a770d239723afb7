"""The image of the container tests: busybox, and what the suite types that busybox lacks.

    python -m tests.docker_image >image.tar

Made of this machine's own files, so nothing is fetched: the static busybox with a link for each of
its programs, over them the GNU programs whose output the suite knows, bash, tmux, Python with its
library, and the shared libraries that these are linked with.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = (
    *("bash", "tmux", "cat", "chmod", "chroot", "cp", "env", "grep", "head", "id", "ln", "ls"),
    *("mkdir", "mkfifo", "mount", "mv", "nohup", "pgrep", "readlink", "rm", "seq", "setsid"),
    *("sleep", "stat", "tail", "tar", "tr", "truncate", "unshare", "wc", "yes", "find", "base64"),
)
LIBRARY = (
    "encodings",
    "collections",
    "re",
    "importlib",
    "lib-dynload",
    "json",
    "asyncio",
    "ctypes",
)
ETC = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "etc/group": "root:x:0:\n",
    "root/.keep": "",
    "tmp/.keep": "",
}


def libraries(program: Path) -> Iterator[Path]:
    """The shared libraries that the loader takes for `program`."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    yield from (Path(path) for path in re.findall(r"(/\S+) \(0x", listed))


def system_python() -> Path:
    """The system's own Python, whose library lies in one folder."""
    return Path("/usr/bin/python3").resolve(strict=True)


def library_of(python: Path) -> Path:
    """Where the standard library of `python` is."""
    ask = "import sysconfig; print(sysconfig.get_path('stdlib'))"
    asked = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    return Path(asked.stdout.strip())


def contents() -> dict[str, Path]:
    """Place in the image -> file of this machine."""
    found = {Path("/usr/bin", name): Path(shutil.which(name) or "") for name in PROGRAMS}
    missing = [str(place) for place, source in found.items() if source == Path()]
    if missing:
        raise SystemExit(f"not on this machine: {' '.join(missing)}")
    python = system_python()
    found[Path("/usr/bin/python3")] = python
    library = library_of(python)
    modules = [path for path in library.glob("*.py") if path.is_file()]
    for name in LIBRARY:
        modules += [p for p in (library / name).rglob("*") if p.suffix in (".py", ".so")]
    found |= {path: path for path in modules}
    for terminal in ("screen", "tmux-256color", "xterm", "dumb", "vt100"):
        for folder in ("/lib/terminfo", "/usr/share/terminfo"):
            entry = Path(folder, terminal[0], terminal)
            if entry.is_file():
                found[entry] = entry
    # tmux wants a locale of UTF-8.
    for entry in Path("/usr/lib/locale/C.utf8").rglob("*"):
        if entry.is_file():
            found[entry] = entry
    linked = {lib for source in set(found.values()) for lib in _linked(source)}
    found |= {path: path for path in linked}
    return {str(place).lstrip("/"): source.resolve() for place, source in found.items()}


def _linked(source: Path) -> Iterator[Path]:
    with source.open("rb") as file:
        if file.read(4) == b"\x7fELF":
            yield from libraries(source)


def write(out: io.BufferedIOBase) -> None:
    """Write the image as one tar, readable by `docker import`."""
    busybox = Path(shutil.which("busybox") or "/bin/busybox")
    listed = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    wanted = contents()
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as image:
        image.add(busybox, "usr/bin/busybox")
        # The folders of a merged system, before anything is in them.
        for name in ("bin", "sbin", "lib", "lib64"):
            _link(image, name, f"usr/{name if name != 'sbin' else 'bin'}")
        for name in listed.stdout.split():
            if f"usr/bin/{name}" not in wanted and name != "busybox":
                _link(image, f"usr/bin/{name}", "busybox")
        for place, source in wanted.items():
            merged = re.sub(r"^(lib|lib64|bin)/", r"usr/\1/", place)
            image.add(source, merged, recursive=False)
        for place, text in ETC.items():
            member = tarfile.TarInfo(place)
            member.size = len(text)
            image.addfile(member, io.BytesIO(text.encode()))


def _link(image: tarfile.TarFile, place: str, target: str) -> None:
    member = tarfile.TarInfo(place)
    member.type, member.linkname = tarfile.SYMTYPE, target
    image.addfile(member)


if __name__ == "__main__":
    write(sys.stdout.buffer)
