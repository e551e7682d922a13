"""The lab's machine: where its parts are cached, and the QEMU command line that a saved state and its restores share.

Parts are directories named by a hash of what made them, in ${THAW_CACHE:-${XDG_CACHE_HOME:-~/.cache}/thaw}/lab:
qemu-*, root-* and state-*. A part is made in a temporary directory under a lock and renamed when it is whole, so a
part that exists is complete. See README.md.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
MEMORY = "8G"
# One: with two, what one does to the other now and then costs a guest its state (README.md). Two labs beside each other
# do as much as one with two.
CPUS = 1
# A named model with SVM: `max` has 5-level page tables, which made fork+exec 1.5 times slower here.
# No cmpxchg16b: each makes QEMU stop its other CPU, and a CPU stopped right after VMRUN injected an event has that event
# delivered twice, wherever it then is. Inner guests die of that, the outer kernel too.
CPU = "EPYC-Rome,check=off,-cx16"
KEPT_OF_A_KIND = 3
# The disks every machine has, in the order guest/init counts them; an unused one is empty.
DISKS = ("root", "repository", "scratch", "images", "disk0", "disk1", "disk2", "disk3")
EXTRA_DISKS = 4
# The virtio-serial ports: requests and replies, the command's two outputs, and the files it leaves (a tar stream).
PORTS = ("lab.control", "lab.stdout", "lab.stderr", "lab.files")


class LabError(Exception):
    """The lab, not the command under test, failed."""


def cache() -> Path:
    """Where everything the lab keeps between runs lives: outside the repository."""
    base = os.environ.get("THAW_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "thaw"
    )
    return Path(base).resolve() / "lab"


def say(message: str) -> None:
    print(f"lab: {message}", file=sys.stderr, flush=True)


def digest(*inputs) -> str:
    """A short hash of strings and of files' contents: the name of what they make."""
    sha = hashlib.sha256()
    for item in inputs:
        data = item.read_bytes() if isinstance(item, Path) else str(item).encode()
        sha.update(len(data).to_bytes(8, "little") + data)
    return sha.hexdigest()[:16]


@contextlib.contextmanager
def lock(path: Path):
    """Holds an exclusive lock on a file while the body runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def part(name: str, what: str, make) -> Path:
    """The directory of one part, made by `make(directory)` on first use."""
    path = cache() / name
    if path.is_dir():
        os.utime(path)
        return path
    kind = name.split("-")[0]
    with lock(cache() / f".{kind}.lock"):
        if path.is_dir():
            return path
        for stale in cache().glob(f".making-{kind}-*"):
            remove_tree(stale)
        making = cache() / f".making-{name}"
        making.mkdir(parents=True)
        say(f"making {what} (once, kept in {cache()})")
        start = time.monotonic()
        try:
            make(making)
        except BaseException:
            # Kept for whoever looks for the reason; the next attempt removes it.
            say(f"making {what} failed; what there is of it is in {making}")
            raise
        making.rename(path)
        forget_old(kind)
        say(f"made {what.split(',')[0]} in {time.monotonic() - start:.0f} s")
    return path


def forget_old(kind: str) -> None:
    """Removes all but the latest parts of a kind; never one used within the hour, which a run may be starting from."""
    parts = sorted(cache().glob(f"{kind}-*"), key=lambda path: path.stat().st_mtime)
    for old in parts[:-KEPT_OF_A_KIND]:
        if time.time() - old.stat().st_mtime > 3600:
            remove_tree(old)


def remove_tree(path: Path) -> None:
    """Removes a directory; what cannot be removed is left for the next sweep."""
    shutil.rmtree(path, ignore_errors=True)


def script(name: str):
    """A maker that runs one of the scripts beside this file on the directory."""

    def make(directory: Path) -> None:
        done = subprocess.run([HERE / name, directory], stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
        if done.returncode != 0:
            raise LabError(f"{name} failed with exit code {done.returncode} (packages missing? see ./setup --check lab)")

    return make


class Monitor:
    """QEMU's machine protocol (QMP) over a connected socket."""

    def __init__(self, connection: socket.socket):
        self.lines = connection.makefile("rw")
        json.loads(self.lines.readline())
        self.ask("qmp_capabilities")

    def ask(self, command: str, **arguments) -> dict:
        self.lines.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self.lines.flush()
        while line := self.lines.readline():
            reply = json.loads(line)
            if "error" in reply:
                raise LabError(f"QEMU refused {command}: {reply['error']['desc']}")
            if "return" in reply:
                return reply["return"]
        raise LabError(f"QEMU ended during {command}")

    def leave_out_shared_memory(self) -> None:
        """For both ends of a migration: memory that is mapped shared is not part of the stream."""
        names = ("events", "x-ignore-shared")
        self.ask("migrate-set-capabilities", capabilities=[{"capability": n, "state": True} for n in names])

    def until_migrated(self) -> None:
        while line := self.lines.readline():
            event = json.loads(line)
            if event.get("event") == "MIGRATION":
                status = event["data"]["status"]
                if status == "completed":
                    return
                if status == "failed":
                    raise LabError("QEMU could not move the machine's state")
        raise LabError("QEMU ended while moving the machine's state")


def qemu_part() -> Path:
    return part(f"qemu-{digest(HERE / 'make-qemu')}", "QEMU 10 from backports, a few seconds", script("make-qemu"))


def root_part() -> Path:
    return part(f"root-{digest(HERE / 'make-root', HERE / 'packages')}", "its Debian root, 1 to 4 minutes", script("make-root"))


def qemu_command() -> tuple[list[str], str]:
    """How to start the chosen QEMU, and a text that changes when that QEMU does."""
    where = qemu_part()
    if os.environ.get("THAW_LAB_QEMU") != "system" and not (where / "use-system-qemu").exists():
        share = where / "usr/share"
        return [str(where / "usr/bin/qemu-system-x86_64"), "-L", str(share / "qemu"), "-L", str(share / "seabios")], where.name
    binary = shutil.which("qemu-system-x86_64")
    if binary is None:
        raise LabError("qemu-system-x86_64 is not installed: run ./setup lab")
    stat = os.stat(binary)
    return [binary], f"{binary} {stat.st_size} {stat.st_mtime_ns}"


def machine_arguments(ram: Path, private: bool, memory: str) -> list[str]:
    """The machine itself. `ram` is the file its memory lives in: shared while the state is made, private (copied on
    write, so nothing is read before it is touched) in every run."""
    # tb-size, in MiB: about 50 starts of a guest fill 1 GiB with translated code, and then all of it is thrown away.
    return [
        "-machine", "q35,memory-backend=ram,vmport=off,smm=off", "-accel", "tcg,thread=multi,tb-size=2047", "-cpu", CPU,
        "-smp", str(CPUS), "-m", memory,
        "-object", f"memory-backend-file,id=ram,size={memory},mem-path={ram},share={'off' if private else 'on'}",
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
    ]  # fmt: skip


def device_arguments(directory: Path, disks: dict[str, Path], ports: dict[str, int]) -> list[str]:
    """Its devices. `disks` names the files behind the slots of DISKS, `ports` the socket behind each of PORTS."""
    arguments = ["-chardev", f"file,id=console,path={directory}/console.log", "-serial", "chardev:console"]
    arguments += ["-device", "virtio-serial-pci"]
    for port in PORTS:
        arguments += ["-chardev", f"socket,id={port},fd={ports[port]}"]
        arguments += ["-device", f"virtserialport,chardev={port},name={port}"]
    for slot in DISKS:
        if slot in disks:
            # A comma in an option's value is written twice.
            backend = "format=raw,file=" + str(disks[slot]).replace(",", ",,")
            backend += ",readonly=on" if slot in ("root", "repository", "images") else ",cache=unsafe"
        else:
            backend = "driver=null-co,size=1M,read-zeroes=on,readonly=on"
        arguments += ["-drive", f"if=none,id={slot},{backend}"]
        arguments += ["-device", f"virtio-blk-pci,drive={slot},serial={slot}"]
    return arguments


def kernel_arguments(root: Path, initramfs: Path) -> list[str]:
    """The guest kernel. `tsc=reliable`: guests of the guest get a steady kvmclock only over a TSC clock source."""
    command_line = "console=ttyS0 quiet panic=-1 mitigations=off apparmor=0 tsc=reliable clocksource=tsc no_timer_check random.trust_cpu=on"
    return ["-kernel", str(root / "vmlinuz"), "-initrd", str(initramfs), "-append", command_line]


def state_part(memory: str = MEMORY) -> Path:
    """The saved machine that every run continues from."""
    _, qemu = qemu_command()
    root = root_part()
    inputs = [HERE / name for name in ("lab.py", "make-state", "guest/initramfs-init", "guest/init")]
    name = f"state-{digest(qemu, root.name, memory, *inputs)}"

    def make(directory: Path) -> None:
        done = subprocess.run([HERE / "make-state", directory, memory], stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
        if done.returncode != 0:
            raise LabError(f"the lab did not boot; its console is {directory}/console.log, QEMU's words {directory}/qemu.log")

    return part(name, "its booted and saved state, about 15 s", make)
