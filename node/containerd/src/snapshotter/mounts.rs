//! The mounts of a snapshot, for containerd.
//!
//! A chain of directories is a bind or an overlay, as with containerd's own overlayfs snapshotter, so that any runtime can use it and
//! containerd can unpack into it. A chain of image layers is one overlay whose source begins with [`IMAGE`], which Thaw's shim recognises:
//! the shim gives the guest the image by virtio-fs, and mounts nothing on the host. If containerd or a client mounts it, to look up a user
//! or to fill volumes, it finds the files of the image that they read ([`super::host_files`]).

use std::path::{Path, PathBuf};

use thaw_protocol::snapshots::types::Mount;

use super::record::{Files, Record, Stage};
use super::remote::TARGET;
use super::table::TableError;

/// The prefix of a mount's source for an image in Thaw's store. The digest of the image's manifest follows.
pub const IMAGE: &str = "thaw:";

/// What a snapshot is based on.
pub enum Lower {
    /// Nothing.
    Empty,
    /// Directories, the nearest first.
    Directories(Vec<PathBuf>),
    /// An image, by its manifest digest, and the directory of its files that are read on the host.
    Image { digest: String, files: PathBuf },
}

/// The mounts of an active snapshot or a view.
pub fn mounts(root: &Path, record: &Record, lower: Lower) -> Result<Vec<Mount>, TableError> {
    let directory = record.directory(root);
    let own = |name: &str| directory.join(name).display().to_string();
    let is_active = match record.stage {
        Stage::Active => true,
        Stage::View => false,
        Stage::Committed => {
            return Err(TableError::Precondition {
                name: record.name.clone(),
                problem: "a committed snapshot is mounted by making a view of it".into(),
            });
        }
    };
    let written = || {
        [
            format!("upperdir={}", own("fs")),
            format!("workdir={}", own("work")),
        ]
    };
    let mode = if is_active { "rw" } else { "ro" };
    let mount = match lower {
        Lower::Image { digest, files } => {
            let mut options = Vec::new();
            let files = files.display();
            match is_active {
                true => {
                    options.extend(written());
                    options.push(format!("lowerdir={files}"));
                }
                // Without an upper directory, the kernel requires two lower ones.
                false => options.push(format!("lowerdir={}:{files}", own("fs"))),
            }
            mount("overlay", format!("{IMAGE}{digest}"), options)
        }
        Lower::Empty => bind(own("fs"), mode),
        Lower::Directories(parents) => {
            let paths: Vec<String> = parents
                .iter()
                .map(|parent| parent.display().to_string())
                .collect();
            match (&paths[..], is_active) {
                ([only], false) => bind(only.clone(), mode),
                _ => {
                    let mut options = Vec::new();
                    if is_active {
                        options.extend(written());
                    }
                    options.push(format!("lowerdir={}", paths.join(":")));
                    mount("overlay", "overlay".into(), options)
                }
            }
        }
    };
    Ok(vec![mount])
}

/// What a snapshot's chain consists of; `below` has the nearest first. Everything below a layer of an image is in the image too. To unpack
/// a layer, containerd needs the layers below it as directories.
pub fn base(record: &Record, below: Vec<Record>) -> Base {
    let is_unpacked = record.labels.contains_key(TARGET);
    let mut above = Vec::new();
    for record in below {
        let Files::Image { digest, layer } = record.files.clone() else {
            above.push(record);
            continue;
        };
        let (digest, count) = (digest, layer + 1);
        return match above.is_empty() && !is_unpacked {
            true => Base::Layers { digest, count },
            false => Base::Directories {
                above,
                onto: Some((record, digest, count)),
            },
        };
    }
    match above.is_empty() {
        true => Base::Empty,
        false => Base::Directories { above, onto: None },
    }
}

/// A chain, before the image for it exists.
pub enum Base {
    Empty,
    /// Directories, and the layer of an image onto which they are unpacked: its record, and how many layers of the image it is with
    /// those below it.
    Directories {
        above: Vec<Record>,
        onto: Option<(Record, String, usize)>,
    },
    /// The lowest `count` layers of an image.
    Layers {
        digest: String,
        count: usize,
    },
}

fn bind(source: String, mode: &str) -> Mount {
    mount("bind", source, vec![mode.to_owned(), "rbind".to_owned()])
}

fn mount(kind: &str, source: String, options: Vec<String>) -> Mount {
    Mount {
        r#type: kind.into(),
        source,
        target: String::new(),
        options,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(id: &str, stage: Stage, files: Files) -> Record {
        Record {
            id: id.into(),
            stage,
            files,
            ..Record::for_test()
        }
    }

    #[test]
    fn directories_are_mounted_as_overlayfs_snapshots_are() {
        let root = Path::new("/s");
        let active = record("top", Stage::Active, Files::Directory);
        let parents = || vec![PathBuf::from("/s/b/fs"), PathBuf::from("/s/a/fs")];
        let of = |record: &Record, lower| mounts(root, record, lower).unwrap().remove(0);
        let one = of(&active, Lower::Empty);
        assert_eq!((one.r#type.as_str(), one.source.as_str()), ("bind", "/s/top/fs"));
        assert_eq!(one.options, ["rw", "rbind"]);
        let two = of(&active, Lower::Directories(parents()));
        assert_eq!(two.r#type, "overlay");
        assert_eq!(
            two.options,
            [
                "upperdir=/s/top/fs",
                "workdir=/s/top/work",
                "lowerdir=/s/b/fs:/s/a/fs"
            ]
        );
        let view = record("v", Stage::View, Files::Directory);
        let three = of(&view, Lower::Directories(parents()));
        assert_eq!(three.options, ["lowerdir=/s/b/fs:/s/a/fs"]);
        let four = of(&view, Lower::Directories(parents()[..1].to_vec()));
        assert_eq!((four.source.as_str(), &four.options[0][..]), ("/s/b/fs", "ro"));
        let committed = record("c", Stage::Committed, Files::Directory);
        assert!(mounts(root, &committed, Lower::Empty).is_err());
    }

    #[test]
    fn an_image_is_one_mount_the_shim_knows() {
        let active = record("top", Stage::Active, Files::Directory);
        let image = || Lower::Image {
            digest: "sha256:ab".into(),
            files: "/f/ab".into(),
        };
        let mount = mounts(Path::new("/s"), &active, image()).unwrap().remove(0);
        assert_eq!(
            (mount.r#type.as_str(), mount.source.as_str()),
            ("overlay", "thaw:sha256:ab")
        );
        let written = ["upperdir=/s/top/fs", "workdir=/s/top/work", "lowerdir=/f/ab"];
        assert_eq!(mount.options, written);
        let view = record("v", Stage::View, Files::Directory);
        let mount = mounts(Path::new("/s"), &view, image()).unwrap().remove(0);
        assert_eq!(mount.options, ["lowerdir=/s/v/fs:/f/ab"]);
    }

    #[test]
    fn a_chain_is_directories_an_image_or_directories_on_one() {
        let layer = |n: usize| {
            let files = Files::Image {
                digest: "sha256:ab".into(),
                layer: n,
            };
            record(&format!("layer{n}"), Stage::Committed, files)
        };
        let directory = |id: &str| record(id, Stage::Committed, Files::Directory);
        let top = record("top", Stage::Active, Files::Directory);
        assert!(matches!(
            base(&top, vec![layer(1), layer(0)]),
            Base::Layers { count: 2, .. }
        ));
        assert!(matches!(base(&top, vec![]), Base::Empty));
        let Base::Directories { above, onto: None } = base(&top, vec![directory("d")]) else {
            panic!();
        };
        assert_eq!(above, [directory("d")]);
        let on_image = base(&top, vec![directory("e"), directory("d"), layer(1), layer(0)]);
        let Base::Directories {
            above,
            onto: Some((onto, digest, 2)),
        } = on_image
        else {
            panic!();
        };
        assert_eq!((above.len(), onto, digest.as_str()), (2, layer(1), "sha256:ab"));
        // Unpacked onto the image itself.
        let unpacked = Record {
            labels: [(TARGET.to_owned(), "sha256:t".to_owned())].into(),
            ..top
        };
        assert!(matches!(
            base(&unpacked, vec![layer(0)]),
            Base::Directories {
                onto: Some((_, _, 1)),
                ..
            }
        ));
    }
}
