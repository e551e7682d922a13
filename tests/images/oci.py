"""Writes OCI image layouts: layers from directories or from entries made by hand, configs, manifests, tags.

Used by `build` (through `layer` and `image`) and by `special`. Formats: the OCI image specification 1.0 (layout, manifest,
config, layer with whiteouts); tar in POSIX pax format with SCHILY.xattr records, as GNU tar and Go's archive/tar do.
"""

import gzip
import hashlib
import io
import json
import os
import stat
import subprocess
import tarfile
from pathlib import Path

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"


class Layer:
    """A tar stream being written to a compressor, hashed on both sides: `diff_id` is the stream's digest."""

    def __init__(self, layout: Path, compression: str = "gzip"):
        self.layout, self.compression = layout, compression
        self.temporary = layout / f".layer-{os.getpid()}-{id(self)}"
        self.sha = hashlib.sha256()
        command = {"gzip": ["gzip", "-n"], "zstd": ["zstd", "-q", "-c"], "": ["cat"]}[compression]
        with open(self.temporary, "wb") as out:
            self.compressor = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out)
        self.tar = tarfile.open(fileobj=self, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20)

    def write(self, data: bytes) -> int:
        self.sha.update(data)
        self.compressor.stdin.write(data)
        return len(data)

    def entry(self, name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", mode: int = 0o644, uid: int = 0, gid: int = 0,
              mtime: str = "1700000000", link: str = "", device: tuple[int, int] = (0, 0), xattrs: dict[str, bytes] | None = None) -> None:  # fmt: skip
        """One entry; `mtime` is decimal seconds with up to nine decimals."""
        info = tarfile.TarInfo(name)
        info.type, info.mode, info.uid, info.gid, info.linkname = kind, mode, uid, gid, link
        info.devmajor, info.devminor = device
        info.size = len(data) if kind == tarfile.REGTYPE else 0
        info.mtime = int(mtime.split(".")[0])
        if "." in mtime:
            info.pax_headers["mtime"] = mtime
        for key, value in (xattrs or {}).items():
            info.pax_headers[f"SCHILY.xattr.{key}"] = value.decode("utf-8", "surrogateescape")
        self.tar.addfile(info, io.BytesIO(data))

    def tree(self, top: Path) -> None:
        """Everything below a directory. In an overlay's upper directory, its whiteouts become the layer's."""
        links: dict[tuple[int, int], str] = {}
        for directory, names, files in os.walk(top):
            names.sort()
            inside = os.path.relpath(directory, top)
            if inside != ".":
                self.file(directory, inside, links)
                if any(xattr(directory, f"{space}.overlay.opaque") == b"y" for space in ("trusted", "user")):
                    self.entry(f"{inside}/.wh..wh..opq", mode=0)
            linked = [name for name in names if os.path.islink(os.path.join(directory, name))]
            for name in sorted(files + linked):
                self.file(os.path.join(directory, name), os.path.normpath(os.path.join(inside, name)), links)

    def file(self, path: str, name: str, links: dict[tuple[int, int], str]) -> None:
        status = os.lstat(path)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            self.entry(os.path.join(os.path.dirname(name), ".wh." + os.path.basename(name)), mode=0)
            return
        if stat.S_ISSOCK(status.st_mode):
            return
        info = self.tar.gettarinfo(path, name)
        info.uname = info.gname = ""
        info.mtime = int(status.st_mtime)
        # tarfile's own table of links goes by a name it may not have been given; this one by inode.
        key = (status.st_dev, status.st_ino)
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            if key in links:
                info.type, info.linkname, info.size = tarfile.LNKTYPE, links[key], 0
            else:
                info.type, info.size = tarfile.REGTYPE, status.st_size
                links[key] = name
        for attribute in os.listxattr(path, follow_symlinks=False):
            if ".overlay." not in attribute and not attribute.startswith("system.nfs"):
                info.pax_headers[f"SCHILY.xattr.{attribute}"] = xattr(path, attribute).decode("utf-8", "surrogateescape")
        if info.type == tarfile.REGTYPE:
            with open(path, "rb") as data:
                self.tar.addfile(info, data)
        else:
            self.tar.addfile(info)

    def finish(self) -> dict:
        """Stores the blob; its descriptor, with the digest of the uncompressed stream as `diff_id`."""
        self.tar.close()
        self.compressor.stdin.close()
        if self.compressor.wait() != 0:
            raise OSError(f"{self.compression} failed")
        return {"diff_id": f"sha256:{self.sha.hexdigest()}", **keep(self.layout, self.temporary, self.media_type())}

    def media_type(self) -> str:
        return LAYER + (f"+{self.compression}" if self.compression else "")


def xattr(path: str, name: str) -> bytes | None:
    try:
        return os.getxattr(path, name, follow_symlinks=False)
    except OSError:
        return None


def store_tar(layout: Path, tar: bytes) -> dict:
    """A layer from a finished tar stream."""
    temporary = layout / f".layer-{os.getpid()}"
    temporary.write_bytes(gzip.compress(tar, mtime=0))
    return {"diff_id": f"sha256:{hashlib.sha256(tar).hexdigest()}", **keep(layout, temporary, LAYER + "+gzip")}


def keep(layout: Path, file: Path, media_type: str) -> dict:
    """Moves a file into the layout's blobs; its descriptor."""
    with open(file, "rb") as data:
        digest = hashlib.file_digest(data, "sha256").hexdigest()
    descriptor = {"mediaType": media_type, "digest": f"sha256:{digest}", "size": file.stat().st_size}
    blobs = layout / "blobs/sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    os.chmod(file, 0o644)
    file.rename(blobs / digest)
    return descriptor


def keep_json(layout: Path, value: dict, media_type: str) -> dict:
    temporary = layout / f".json-{os.getpid()}"
    temporary.write_text(json.dumps(value, separators=(",", ":")))
    return keep(layout, temporary, media_type)


def image(layout: Path, layers: list[dict], config: dict, architecture: str = "amd64", history: list[str] | None = None) -> dict:
    """Stores config and manifest of an image; its manifest's descriptor."""
    created = "2026-01-01T00:00:00Z"
    whole = {
        "created": created, "architecture": architecture, "os": "linux", "config": config,
        "rootfs": {"type": "layers", "diff_ids": [layer["diff_id"] for layer in layers]},
        "history": [{"created": created, "created_by": text} for text in history or ["tests/images"] * len(layers)],
    }  # fmt: skip
    descriptors = [{key: layer[key] for key in ("mediaType", "digest", "size")} for layer in layers]
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": keep_json(layout, whole, CONFIG), "layers": descriptors}
    platform = {"architecture": architecture, "os": "linux"}
    return {**keep_json(layout, manifest, MANIFEST), "platform": platform}


def index(layout: Path, manifests: list[dict]) -> dict:
    """Stores an index over manifests, for several platforms; its descriptor."""
    return keep_json(layout, {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}, INDEX)


def tag(layout: Path, name: str, descriptor: dict) -> None:
    """Makes `name` mean this descriptor."""
    (layout / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    path = layout / "index.json"
    old = json.loads(path.read_text())["manifests"] if path.exists() else []
    manifests = [entry for entry in old if entry["annotations"]["org.opencontainers.image.ref.name"] != name]
    manifests.append({**descriptor, "annotations": {"org.opencontainers.image.ref.name": name}})
    whole = {"schemaVersion": 2, "mediaType": INDEX, "manifests": sorted(manifests, key=lambda m: m["annotations"]["org.opencontainers.image.ref.name"])}
    temporary = layout / ".index.json"
    temporary.write_text(json.dumps(whole, indent=1))
    temporary.rename(path)


def tags(layout: Path) -> list[str]:
    path = layout / "index.json"
    if not path.exists():
        return []
    return [entry["annotations"]["org.opencontainers.image.ref.name"] for entry in json.loads(path.read_text())["manifests"]]
