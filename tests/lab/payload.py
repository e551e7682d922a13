"""What a run carries into the lab: an EROFS image of the repository as it is now, and the test images.

The image holds `tree`, the repository without .git and without cargo's intermediate files, and `elsewhere`, files from
outside it at their absolute paths. Files are hard links into a staging directory where the file system allows it, so
making the image costs one sequential write; an image of the same files is used again.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import lab

SKIPPED = {".git", "__pycache__"}
KEPT_IMAGES = 4
# More than one run carries.
KEPT_STRIPPED = 100
# Debug information of a whole workspace would be most of the image; nobody debugs inside the lab.
STRIP_ABOVE = 2 << 20


def repository_image(directory: Path, added: list[str], command: list[str]) -> tuple[Path, list[str]]:
    """The image, linked into `directory` so that nobody removes it meanwhile, and the `elsewhere` paths in it."""
    files, elsewhere = chosen_files(added, command)
    listing = hashlib.sha256()
    for target in sorted(files):
        stat = os.lstat(files[target])
        listing.update(f"{target}\0{files[target]}\0{stat.st_mode}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    images = lab.cache() / "repository"
    images.mkdir(parents=True, exist_ok=True)
    image, mine = images / f"{listing.hexdigest()[:16]}.erofs", directory / "repository.erofs"
    try:
        os.link(image, mine)
        os.utime(image)
        return mine, elsewhere
    except FileNotFoundError:
        pass
    stage(directory / "stage", files)
    done = subprocess.run(
        ["mkfs.erofs", "-x-1", "--force-uid=0", "--force-gid=0", mine, directory / "stage"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise lab.LabError(f"mkfs.erofs failed on the repository: {done.stderr.decode(errors='replace')[-400:]}")
    shutil.rmtree(directory / "stage")
    new = images / f".{directory.name}"
    os.link(mine, new)
    new.rename(image)
    keep_last(images.glob("*.erofs"), KEPT_IMAGES, lambda stat: stat.st_mtime)
    return mine, elsewhere


def keep_last(files: Iterable[Path], count: int, used: Callable[[os.stat_result], float]) -> None:
    """Removes all but those that were used last. Other runs do the same meanwhile: what is gone is gone."""
    found = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            found.append((used(file.stat()), file))
    for _, old in sorted(found)[:-count]:
        old.unlink(missing_ok=True)


def chosen_files(added: list[str], command: list[str]) -> tuple[dict[str, Path], list[str]]:
    """What goes into the image: path in it → file here; and the paths outside the repository."""
    root = lab.REPOSITORY
    files: dict[str, Path] = {}
    for path in walk(root, is_repository=True):
        files[f"tree/{path.relative_to(root)}"] = path
    for path in cargo_executables(root / "target"):
        files[f"tree/{path.relative_to(root)}"] = path
    elsewhere = []
    # A word of the command that names a file of the repository (a test binary in target/*/deps) is meant to be there.
    # os.path.isfile, as a word may be longer than any path.
    named = [root / word for word in command if os.path.isfile(root / word) and (root / word).resolve().is_relative_to(root)]
    for path in [*named, *(Path(os.path.abspath(word)) for word in added)]:
        if not path.exists():
            raise lab.LabError(f"--add {path}: there is no such file")
        inside = path.is_relative_to(root)
        prefix = "tree" if inside else "elsewhere"
        for file in walk(path) if path.is_dir() else [path]:
            files[f"{prefix}/{file.relative_to(root) if inside else str(file)[1:]}"] = file
        if not inside:
            elsewhere.append(str(path))
    return files, elsewhere


def walk(top: Path, is_repository: bool = False):
    """All files and symbolic links below `top`. Of the repository, `target` and `node_modules` are skipped: what is needed of them is added."""
    skipped = SKIPPED | {"node_modules"} if is_repository else SKIPPED
    for directory, names, files in os.walk(top):
        names[:] = [name for name in names if name not in skipped]
        if is_repository and directory == str(top) and "target" in names:
            names.remove("target")
        for name in files:
            yield Path(directory, name)
        for name in names:
            if os.path.islink(os.path.join(directory, name)):
                yield Path(directory, name)


def cargo_executables(target: Path):
    """The executables cargo leaves directly in target/PROFILE and target/TRIPLE/PROFILE."""
    # The profiles whose programs run in the lab: `demo` is that of `make demo`.
    for name in ("release", "debug", "demo"):
        for profile in (*target.glob(name), *target.glob(f"*-*-*/{name}")):
            for entry in os.scandir(profile):
                if entry.is_file(follow_symlinks=False) and os.access(entry.path, os.X_OK) and not entry.name.endswith((".so", ".d")):
                    yield Path(entry.path)


def stage(directory: Path, files: dict[str, Path]) -> None:
    (directory / "tree").mkdir(parents=True)
    (directory / "elsewhere").mkdir()
    made = {""}
    for target, source in files.items():
        parent = os.path.dirname(target)
        if parent not in made:
            os.makedirs(directory / parent, exist_ok=True)
            made.add(parent)
        try:
            place(source, directory / target)
        except FileNotFoundError:
            # Removed since it was listed: somebody is building. What the command needs and misses it will name.
            pass


def place(source: Path, target: Path) -> None:
    """Puts a file at `target`: a hard link, or a copy; an executable with debug information is stripped of it."""
    if source.is_symlink():
        os.symlink(os.readlink(source), target)
        return
    if not source.is_file():
        return
    if is_large_elf(source):
        source = stripped(source)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def is_large_elf(path: Path) -> bool:
    if path.stat().st_size < STRIP_ABOVE or not path.is_relative_to(lab.REPOSITORY / "target"):
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def stripped(source: Path) -> Path:
    """A copy without debug information, made once for each version of the file."""
    stat = source.stat()

    def use(copy: Path) -> None:
        # What was used last is what stays: the time of its last use is not the source's.
        os.utime(copy, ns=(time.time_ns(), stat.st_mtime_ns))

    name = hashlib.sha256(f"{source}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:24]
    kept = lab.cache() / "stripped" / name
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        new = kept.with_name(f".{name}.{os.getpid()}")
        if subprocess.run(["strip", "--strip-debug", "-o", new, source], stderr=subprocess.DEVNULL, check=False).returncode != 0:
            shutil.copy2(source, new)
        shutil.copystat(source, new)
        use(new)
        new.rename(kept)
        # Those that are being made have a dot before their names.
        keep_last(kept.parent.glob("[!.]*"), KEPT_STRIPPED, lambda stat: stat.st_atime)
    use(kept)
    return kept


def images_disk() -> Path:
    """The test images as one read-only EROFS disk, made by tests/images on first use."""
    done = subprocess.run([lab.REPOSITORY / "tests/images/build", "--disk"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    disk = Path(done.stdout.decode().strip())
    if done.returncode != 0 or not disk.is_file():
        raise lab.LabError("the test images could not be made (tests/images/build --disk)")
    return disk
