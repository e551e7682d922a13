use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use async_trait::async_trait;
use thaw_sandbox::error::ErrorKind;
use thaw_sandbox::images::part::{Contents, Node, Nodes, Part, What};

use super::super::remote::Pulled;
use super::*;

/// An image with a volume at /data.
struct Fake {
    nodes: Nodes,
}

struct Sevens;

#[async_trait]
impl Contents for Sevens {
    async fn read(&self, number: u64, _: u64, into: &mut [u8]) -> Result<(), Error> {
        into.fill(7);
        match number {
            7 => Ok(()),
            _ => Err(Error::new(ErrorKind::RegistryUnreachable, "nobody answers")),
        }
    }
}

#[async_trait]
impl Layers for Fake {
    async fn pull(&self, _: &str) -> Result<Pulled, Error> {
        Err(Error::new(ErrorKind::ImageNotFound, "none"))
    }

    async fn stored(&self, digest: &str) -> Result<Pulled, Error> {
        self.pull(digest).await
    }

    async fn lowest(&self, digest: &str, _: usize) -> Result<Pulled, Error> {
        self.pull(digest).await
    }

    async fn file(&self, _: &str, path: &str) -> Result<Option<Vec<u8>>, Error> {
        Ok((path == "etc/passwd").then(|| b"root:x:0:0".to_vec()))
    }

    async fn volumes(&self, _: &str) -> Result<Part, Error> {
        Ok(Part {
            nodes: self.nodes.clone(),
            contents: Arc::new(Sevens),
        })
    }

    async fn whole(&self, digest: &str) -> Result<Part, Error> {
        self.volumes(digest).await
    }

    async fn bytes(&self, _: &str, _: usize) -> Result<u64, Error> {
        Ok(0)
    }
}

fn fake(nodes: &[(&str, u32, u64, What)]) -> Fake {
    let nodes = nodes.iter().map(|(path, mode, number, what)| {
        let node = Node {
            what: what.clone(),
            number: *number,
            mode: *mode,
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            changed: (1000, 5),
            is_linked: matches!(what, What::File { .. }),
            extended: Vec::new(),
        };
        (path.as_bytes().to_vec(), node)
    });
    Fake {
        nodes: nodes.collect(),
    }
}

#[tokio::test]
async fn volumes_are_there_as_the_image_has_them() {
    let root = tempfile::tempdir().unwrap();
    let places = HostFiles::beside(&root.path().join("snapshots"));
    let size = (1 << 20) + 9;
    let image = fake(&[
        ("data", 0o2770, 1, What::Directory),
        ("data/in", 0o500, 2, What::Directory),
        ("data/in/program", 0o4755, 7, What::File { size }),
        ("data/in/program-too", 0o4755, 7, What::File { size }),
        (
            "data/out",
            0o777,
            3,
            What::Link {
                target: b"/etc".to_vec(),
            },
        ),
    ]);
    // What a thawd before this one has made is not taken for it.
    let old = root.path().join("snapshots-files/sha256-ab");
    std::fs::create_dir_all(&old).unwrap();
    let place = places.get(&image, "sha256:ab").await.unwrap();
    let of = |path: &str| std::fs::symlink_metadata(place.join(path)).unwrap();
    assert_eq!(of("data").mode() & 0o7777, 0o2770);
    assert_eq!((of("data").mtime(), of("data").mtime_nsec()), (1000, 5));
    assert_eq!(of("data/in").mode() & 0o7777, 0o500);
    let program = of("data/in/program");
    assert_eq!(
        (program.mode() & 0o7777, program.len(), program.mtime()),
        (0o4755, size, 1000)
    );
    assert_eq!(
        (of("data/in/program-too").ino(), program.nlink()),
        (program.ino(), 2)
    );
    let bytes = std::fs::read(place.join("data/in/program")).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 7));
    let target = std::fs::read_link(place.join("data/out")).unwrap();
    assert_eq!(target, Path::new("/etc"));
    assert_eq!(std::fs::read(place.join("etc/passwd")).unwrap(), b"root:x:0:0");
    let above = std::fs::metadata(root.path().join("snapshots-files")).unwrap();
    assert_eq!(above.mode() & 0o777, 0o700);
    assert_eq!(places.get(&image, "sha256:ab").await.unwrap(), place);
    places.forget("sha256:ab");
    assert!(!place.exists() && !old.exists());
}

#[tokio::test]
async fn what_cannot_be_read_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    let places = HostFiles::beside(&root.path().join("snapshots"));
    let unread = fake(&[("a", 0o644, 8, What::File { size: 1 })]);
    let failure = places.get(&unread, "sha256:a").await.unwrap_err();
    assert_eq!(failure.kind, ErrorKind::RegistryUnreachable);
    let made = std::fs::read_dir(root.path().join("snapshots-files")).unwrap();
    assert_eq!(made.count(), 0);
}
