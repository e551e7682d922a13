"""soci.py make WORK THAW: layers and images, indexed by soci and by Thaw
soci.py check WORK URL: has soci and its snapshotter read what Thaw wrote

In WORK: made/ (of ../main.go), layout/ (images, an OCI layout), soci/ (soci's own store), layers/soci/LAYER for Thaw's test
to read: layer, plain.tar, ztoc (soci's), inexpressible (where a ztoc has no word for what it is).
"""
import gzip, hashlib, io, json, os, stat, subprocess, sys, tarfile, urllib.request
from pathlib import Path

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
NAME = "org.opencontainers.image.ref.name"
V1, V2 = "application/vnd.amazon.soci.index.v1+json", "application/vnd.amazon.soci.index.v2+json"
SPAN = "1048576"


def run(*command, refused=False):
    """What it prints; with `refused`, that it does not succeed is fine, and None."""
    done = subprocess.run(command, capture_output=True)
    if done.returncode and not refused:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout.decode()}{done.stderr.decode()}")
    return None if done.returncode else done.stdout


class Store:
    """A directory of blobs."""

    def __init__(self, path):
        self.blobs = Path(path, "blobs/sha256")
        self.blobs.mkdir(parents=True, exist_ok=True)

    def get(self, digest):
        return (self.blobs / digest.removeprefix("sha256:")).read_bytes()

    def json(self, digest):
        return json.loads(self.get(digest))

    def put(self, content, media_type):
        name = hashlib.sha256(content).hexdigest()
        (self.blobs / name).write_bytes(content)
        return {"mediaType": media_type, "digest": f"sha256:{name}", "size": len(content)}


class Layout(Store):
    def __init__(self, path):
        super().__init__(path)
        self.index = Path(path, "index.json")
        if not self.index.exists():
            Path(path, "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
            self.index.write_text('{"schemaVersion":2,"manifests":[]}')

    def named(self):
        """Descriptors by name."""
        manifests = json.loads(self.index.read_text())["manifests"]
        return {m["annotations"][NAME]: m for m in manifests if NAME in (m.get("annotations") or {})}

    def add(self, name, stored, plain):
        """An image of one layer."""
        kind = LAYER + ("+gzip" if stored[:2] == b"\x1f\x8b" else "")
        rootfs = {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(plain).hexdigest()]}
        config = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs}
        config = self.put(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json")
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [self.put(stored, kind)]}
        manifest = self.put(json.dumps(manifest).encode(), MANIFEST)
        manifest |= {"annotations": {NAME: name}, "platform": {"architecture": "amd64", "os": "linux"}}
        index = json.loads(self.index.read_text())
        index["manifests"].append(manifest)
        self.index.write_text(json.dumps(index))

    def archive(self, image, path):
        """An image alone, its bytes as they are."""
        manifest = self.json(image["digest"])
        with tarfile.open(path, "w") as tar:
            def add(name, content):
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
            add("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
            add("index.json", json.dumps({"schemaVersion": 2, "manifests": [image]}).encode())
            for digest in {blob["digest"] for blob in [image, manifest["config"], *manifest["layers"]]}:
                add("blobs/sha256/" + digest.removeprefix("sha256:"), self.get(digest))


def plain(stored):
    return gzip.decompress(stored) if stored[:2] == b"\x1f\x8b" else stored


def opened(stored):
    return tarfile.open(fileobj=io.BytesIO(plain(stored)), errors="surrogateescape")


def made(work):
    """(name, stored, whether a ztoc has no word for it) of made layers."""
    for layer in sorted(Path(work, "made/soci").iterdir()):
        # Their layers are one: they differ in their ztocs.
        if layer.name != "first-version":
            yield layer.name, (layer / "layer").read_bytes(), False
    yield "estargz", Path(work, "made/estargz/default/layer").read_bytes(), True
    tar = Path(work, "made/soci/fast/plain.tar").read_bytes()
    yield "members", b"".join(gzip.compress(part, mtime=0) for part in (tar[:3_000_000], tar[3_000_000:])), True
    with open(Path(work, "sparse"), "wb") as file:
        file.seek(10 << 20)
        file.write(os.urandom(5000))
    for version in ("0.0", "0.1", "1.0"):
        sparse = run("tar", "-C", str(work), "--format=pax", "--sparse", f"--sparse-version={version}", "-c", "sparse")
        yield f"sparse-{version}", gzip.compress(sparse, mtime=0), True
    yield "empty", gzip.compress(bytes(10240), mtime=0), False


def make(work, thaw):
    layout = Layout(work / "layout")
    inexpressible = set()
    for name, stored, is_inexpressible in made(work):
        layout.add(name, stored, plain(stored))
        if is_inexpressible:
            inexpressible.add(layout.json(layout.named()[name]["digest"])["layers"][0]["digest"])
    images = {name: descriptor for name, descriptor in layout.named().items()}
    for name, descriptor in images.items():
        archive = str(work / "image.tar")
        layout.archive(descriptor, archive)
        run("ctr", "image", "import", "--no-unpack", "--base-name", f"test.local/{name}", archive)
        os.unlink(archive)
        said = run("soci", "create", "--span-size", SPAN, "--min-layer-size", "0", f"test.local/{name}:{name}").decode()
        for line in said.splitlines():
            _, layer, _, _, ztoc = line.split()
            stored = layout.get(layer)
            directory = work / "layers/soci" / f"{name}-{layer[7:15]}"
            directory.mkdir(parents=True)
            (directory / "layer").write_bytes(stored)
            (directory / "plain.tar").write_bytes(plain(stored))
            (directory / "ztoc").write_bytes(Store(work / "soci/content").get(ztoc))
            if layer in inexpressible or any(entry.issparse() for entry in opened(stored)):
                (directory / "inexpressible").touch()
        manifest = layout.json(descriptor["digest"])
        alone = len(manifest["layers"]) == 1 and manifest["layers"][0]["digest"] in inexpressible
        index = [thaw, "image", "index", "--min-layer-size", "1", f"oci:{work}/layout:{name}"]
        if (run(*index, refused=alone) is None) != alone:
            sys.exit(f"{name}: Thaw made an index of what a ztoc cannot say")
    print(f"soci: {len(images)} images indexed by soci and by Thaw")


def index_of(layout, name, image):
    """The index Thaw made, of version 2, as one of version 1, the only one soci 0.4.1 knows; the ztocs stay as they are."""
    top = layout.json(layout.named()[f"{name}-soci"]["digest"])
    index = layout.json(next(m["digest"] for m in top["manifests"] if m.get("artifactType") == V2))
    assert index["config"]["mediaType"] == V2
    index["config"]["mediaType"] = V1
    index["subject"] = {key: image[key] for key in ("mediaType", "digest", "size")}
    return index


def request(method, url, body, kind="application/octet-stream"):
    return urllib.request.urlopen(urllib.request.Request(url, data=body, method=method, headers={"Content-Type": kind}))


def push(url, name, index, store):
    """An index and its ztocs, to beside the image."""
    for blob in [*index["layers"], index["config"]]:
        place = request("POST", f"{url}/v2/{name}/blobs/uploads/", b"").headers["Location"]
        place += ("&" if "?" in place else "?") + "digest=" + blob["digest"]
        request("PUT", place, store.get(blob["digest"]))
    text = json.dumps(index).encode()
    digest = "sha256:" + hashlib.sha256(text).hexdigest()
    request("PUT", f"{url}/v2/{name}/manifests/{digest}", text, MANIFEST)
    return digest


KINDS = {tarfile.REGTYPE: stat.S_IFREG, tarfile.AREGTYPE: stat.S_IFREG, tarfile.DIRTYPE: stat.S_IFDIR,
         tarfile.SYMTYPE: stat.S_IFLNK, tarfile.CHRTYPE: stat.S_IFCHR, tarfile.BLKTYPE: stat.S_IFBLK,
         tarfile.FIFOTYPE: stat.S_IFIFO}


def differences(path, entry, tar):
    """In what a mounted file differs from its tar entry. Its snapshotter (0.4.1) shows no extended attributes, whoever
    wrote the ztoc: those are compared between the ztocs."""
    there = os.lstat(path)
    if stat.S_IFMT(there.st_mode) != KINDS[entry.type]:
        yield "kind"
    if not entry.issym() and stat.S_IMODE(there.st_mode) != entry.mode & 0o7777:
        yield "mode"
    if (there.st_uid, there.st_gid) != (entry.uid, entry.gid):
        yield "owner"
    if entry.issym() and os.readlink(path) != entry.linkname:
        yield "target"
    if entry.isdev() and not entry.isfifo():
        if (os.major(there.st_rdev), os.minor(there.st_rdev)) != (entry.devmajor, entry.devminor):
            yield "device"
    if entry.isreg() and open(path, "rb").read() != tar.extractfile(entry).read():
        yield "content"
    # Its snapshotter has no times before the epoch.
    if entry.mtime >= 0 and there.st_mtime_ns // 10**9 != int(entry.mtime):
        yield "time"


def walk(root, tar):
    """Every entry of a tar, in the tree that is mounted at `root`: entries, bytes, what differs."""
    last = {os.path.normpath(entry.name): entry for entry in tar}
    bad, total = [], 0
    for name, entry in last.items():
        folder, base = os.path.split(name)
        try:
            if base == ".wh..wh..opq":
                if os.getxattr(os.path.join(root, folder), "trusted.overlay.opaque") != b"y":
                    bad.append((name, "not opaque"))
            elif base.startswith(".wh."):
                path = os.path.join(root, folder, base[4:])
                if not stat.S_ISCHR(os.lstat(path).st_mode) or os.lstat(path).st_rdev:
                    bad.append((name, "no whiteout"))
            else:
                target = last[os.path.normpath(entry.linkname)] if entry.islnk() else entry
                bad += [(name, why) for why in differences(os.path.join(root, name), target, tar)]
                total += entry.size if entry.isreg() else 0
        except OSError as error:
            bad.append((name, str(error)))
    return len(last), total, bad


def commands(work, ztoc, tar):
    """`soci ztoc info` and `get-file` of a ztoc: entries, files read, what differs."""
    info = json.loads(run("soci", "ztoc", "info", ztoc))
    entries = [(e.name, 0 if e.islnk() or e.issym() else e.size) for e in tar]
    said = [(e["filename"], e["size"]) for e in info["files"] or []]
    bad = [] if [size for _, size in said] == [size for _, size in entries] else ["its files' sizes"]
    files = {entry.name: entry for entry in tar if entry.isreg() and entry.size}
    # The whole tree is compared in its mount: the largest, and some, suffice here.
    some = sorted(files.values(), key=lambda entry: -entry.size)[:8] + list(files.values())[::max(1, len(files) // 8)]
    out = str(work / "file")
    for entry in some:
        run("soci", "ztoc", "get-file", "-o", out, ztoc, entry.name)
        if open(out, "rb").read() != tar.extractfile(entry).read():
            bad.append(entry.name)
    return len(said), len(some), bad


def check(work, url):
    layout, theirs = Layout(work / "layout"), Store(work / "soci/content")
    named, failed, mounts = layout.named(), 0, work / "snapshotter/snapshotter/snapshots"
    host = url.removeprefix("http://")
    for name, image in named.items():
        if f"{name}-soci" not in named:
            continue
        index = index_of(layout, name, image)
        for blob in index["layers"]:
            theirs.put(layout.get(blob["digest"]), "")
        theirs.put(json.dumps(index).encode(), "")
        run("soci", "rebuild-db")
        place = f"docker://{host}/{name}:{name}"
        run("skopeo", "copy", "-q", "--preserve-digests", "--dest-tls-verify=false", f"oci:{work}/layout:{name}", place)
        digest = push(url, name, index, layout)
        before = set(os.listdir(mounts)) if mounts.exists() else set()
        reference = f"{host}/{name}:{name}"
        # In a namespace of its own: other images have the same tar, stored otherwise, and it must be mounted anew.
        run("soci", "-n", name, "image", "rpull", "--plain-http", "--snapshotter", "soci", "--soci-index-digest", digest, reference)
        new = sorted(set(os.listdir(mounts)) - before, key=int)
        ztocs = {z["annotations"]["com.amazon.soci.image-layer-digest"]: z["digest"] for z in index["layers"]}
        mounted = {line.split()[1] for line in open("/proc/mounts") if " fuse" in line}
        layers = layout.json(image["digest"])["layers"]
        assert len(new) == len(layers), f"{name}: {len(new)} snapshots of {len(layers)} layers"
        for layer, mount in zip(layers, new):
            digest, root = layer["digest"], str(mounts / mount / "fs")
            if digest not in ztocs:
                print(f"soci/{name}: {digest[7:19]} has no ztoc")
                continue
            with opened(layout.get(digest)) as tar:
                entries, files, wrong = commands(work, ztocs[digest], tar)
                seen, total, bad = walk(root, tar)
            both = work / "layers/soci" / f"{name}-{digest[7:15]}"
            (both / "thaw").write_bytes(layout.get(ztocs[digest]))
            run(str(work / "interop"), "same", str(both))
            bad = wrong + bad + ([] if root in mounted else ["it was not mounted but unpacked"])
            print(f"soci/{name}: {digest[7:19]}: our ztoc says what soci's does of {entries} entries; soci gets {files} "
                  f"files by it; its snapshotter "
                  f"mounts it: {seen} paths, {total} bytes, {len(bad)} different")
            for what in bad[:10]:
                print("   ", what)
            failed += len(bad)
    return failed


if __name__ == "__main__":
    action, work, argument = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    sys.exit(make(work, argument) if action == "make" else 1 if check(work, argument) else 0)
