use thaw_rootfs::erofs::write;
use thaw_rootfs::tree::{Attributes, Inode as TreeInode, Kind, Tree};

use super::*;

fn attributes(mode: u16, uid: u32) -> Attributes {
    Attributes {
        mode,
        uid,
        gid: uid,
        ..Attributes::default()
    }
}

/// A tree of directories, empty files and links, each by its path after its directory.
fn image(all: &[(&str, u16, Kind)]) -> Reader<Vec<u8>> {
    let mut tree = Tree::new(attributes(0o755, 0));
    for (path, mode, kind) in all {
        let number = tree.inodes.len() as u32;
        tree.inodes.push(TreeInode {
            attributes: attributes(*mode, 7),
            kind: kind.clone(),
        });
        let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
        let above = tree.lookup(above.as_bytes()).unwrap();
        let Kind::Directory { entries, .. } = &mut tree.inodes[above as usize].kind else {
            panic!("{path} is in no directory");
        };
        entries.insert(name.as_bytes().into(), number);
    }
    let mut bytes = Vec::new();
    write(&tree, &[], &mut bytes).unwrap();
    Reader::new(bytes).unwrap()
}

fn link(target: &str) -> Kind {
    Kind::Symlink {
        target: target.as_bytes().into(),
    }
}
