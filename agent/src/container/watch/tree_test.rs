use super::*;
use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};

fn root(directory: &Path) -> OwnedFd {
    OwnedFd::from(File::open(directory).unwrap())
}

fn tree(directory: &tempfile::TempDir, recursive: bool) -> Tree {
    Tree::watch(root(directory.path()), Path::new("/"), recursive).unwrap()
}

/// What happened since the last call, as `KIND name`.
fn events(tree: &mut Tree) -> Vec<String> {
    let mut all = Vec::new();
    loop {
        tree.fill().unwrap();
        if tree.queue.is_empty() {
            return all;
        }
        all.extend(tree.queue.take().iter().map(|event| {
            let name = String::from_utf8(event.name.clone()).unwrap();
            format!("{:?} {name}", event.kind.unwrap()).trim().to_owned()
        }));
    }
}

#[test]
fn files_of_a_directory_are_told_with_kind_and_name() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("sub")).unwrap();
    let mut tree = tree(&dir, false);
    assert!(events(&mut tree).is_empty());
    let at = |name: &str| dir.path().join(name);
    fs::write(at("f"), "1").unwrap();
    assert_eq!(events(&mut tree), ["CREATE f", "WRITE f"]);
    fs::set_permissions(at("f"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::rename(at("f"), at("g")).unwrap();
    assert_eq!(events(&mut tree), ["CHMOD f", "RENAME f", "CREATE g"]);
    fs::remove_file(at("g")).unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o750)).unwrap();
    // A watch that is not recursive tells nothing of what is below.
    fs::write(at("sub/f"), "1").unwrap();
    assert_eq!(events(&mut tree), ["REMOVE g", "CHMOD ."]);
    // An upload shows when it is complete.
    fs::write(at(".thaw-u1"), "1").unwrap();
    fs::rename(at(".thaw-u1"), at("whole")).unwrap();
    assert_eq!(events(&mut tree), ["CREATE whole"]);
}

#[test]
fn new_directories_are_watched_and_their_files_told_once() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("a/b")).unwrap();
    let mut tree = tree(&dir, true);
    let at = |name: &str| dir.path().join(name);
    fs::write(at("a/b/f"), "1").unwrap();
    assert_eq!(events(&mut tree), ["CREATE a/b/f", "WRITE a/b/f"]);
    // All of these are there before the first event is read.
    fs::create_dir_all(at("c/d")).unwrap();
    fs::write(at("c/d/f"), "").unwrap();
    assert_eq!(events(&mut tree), ["CREATE c", "CREATE c/d", "CREATE c/d/f"]);
    fs::write(at("c/d/g"), "").unwrap();
    assert_eq!(events(&mut tree), ["CREATE c/d/g"]);
    fs::remove_dir_all(at("a")).unwrap();
    assert_eq!(events(&mut tree), ["REMOVE a/b/f", "REMOVE a/b", "REMOVE a"]);
    assert_eq!(tree.directories.len(), 2);
}

#[test]
fn renamed_directory_is_followed_until_it_leaves_the_tree() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::create_dir_all(dir.path().join("a/b")).unwrap();
    fs::create_dir(dir.path().join("c")).unwrap();
    let mut tree = tree(&dir, true);
    let at = |name: &str| dir.path().join(name);
    fs::rename(at("a"), at("c/z")).unwrap();
    fs::write(at("c/z/b/f"), "").unwrap();
    assert_eq!(events(&mut tree), ["RENAME a", "CREATE c/z", "CREATE c/z/b/f"]);
    assert_eq!(tree.directories.len(), 3);
    fs::rename(at("c/z"), other.path().join("away")).unwrap();
    fs::write(other.path().join("away/b/g"), "").unwrap();
    assert_eq!(events(&mut tree), ["RENAME c/z"]);
    assert_eq!(tree.directories.len(), 1);
    // And one that comes in from elsewhere.
    fs::rename(other.path().join("away"), at("back")).unwrap();
    let back = [
        "CREATE back",
        "CREATE back/b",
        "CREATE back/b/f",
        "CREATE back/b/g",
    ];
    let mut told = events(&mut tree);
    told.sort();
    assert_eq!(told, back);
    fs::write(at("back/b/h"), "").unwrap();
    assert_eq!(events(&mut tree), ["CREATE back/b/h"]);
}

#[test]
fn directory_renamed_before_it_is_entered_is_watched_whole() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("new")).unwrap();
    let mut tree = tree(&dir, true);
    let at = |name: &str| dir.path().join(name);
    fs::create_dir(at("new/deep")).unwrap();
    fs::write(at("new/deep/h"), "").unwrap();
    fs::rename(at("new"), at("moved")).unwrap();
    let told = [
        "CREATE new/deep",
        "RENAME new",
        "CREATE moved",
        "CREATE moved/deep",
        "CREATE moved/deep/h",
    ];
    assert_eq!(events(&mut tree), told);
    fs::write(at("moved/deep/i"), "").unwrap();
    assert_eq!(events(&mut tree), ["CREATE moved/deep/i"]);
}

#[test]
fn watch_ends_when_its_directory_is_removed_or_moved() {
    for recursive in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let watched = |name: &str| {
            fs::create_dir(dir.path().join(name)).unwrap();
            let path = Path::new("/").join(name);
            Tree::watch(root(dir.path()), &path, recursive).unwrap()
        };
        let mut removed = watched("removed");
        fs::remove_dir(dir.path().join("removed")).unwrap();
        assert_eq!(events(&mut removed), ["REMOVE ."]);
        assert_eq!(removed.ended(), Some("the directory was removed"));
        let mut moved = watched("moved");
        fs::rename(dir.path().join("moved"), dir.path().join("m")).unwrap();
        assert_eq!(events(&mut moved), ["RENAME ."]);
        assert_eq!(moved.ended(), Some("the directory was moved"));
    }
}

#[test]
fn links_lead_neither_out_nor_around() {
    let outer = tempfile::tempdir().unwrap();
    fs::create_dir_all(outer.path().join("secret/deep")).unwrap();
    fs::create_dir_all(outer.path().join("root/d")).unwrap();
    let inner = outer.path().join("root");
    symlink("../secret", inner.join("out")).unwrap();
    symlink(outer.path().join("secret"), inner.join("absolute")).unwrap();
    symlink("..", inner.join("d/around")).unwrap();
    symlink("/d", inner.join("link")).unwrap();
    for path in ["/out", "/absolute", "/missing"] {
        let refused = Tree::watch(root(&inner), Path::new(path), true);
        assert!(matches!(refused, Err(Error::NoFile(_))), "{path}: {refused:?}");
    }
    let mut all = Tree::watch(root(&inner), Path::new("/"), true).unwrap();
    assert_eq!(all.directories.len(), 1);
    let mut linked = Tree::watch(root(&inner), Path::new("/link"), false).unwrap();
    fs::write(outer.path().join("secret/deep/f"), "").unwrap();
    symlink("../../secret", inner.join("d/new")).unwrap();
    assert_eq!(events(&mut all), ["CREATE d/new"]);
    assert_eq!(events(&mut linked), ["CREATE new"]);
}

#[test]
fn too_many_directories_are_refused_at_first_and_told_later() {
    let dir = tempfile::tempdir().unwrap();
    let mut small = tree(&dir, true);
    for n in 0..=MAX_DIRECTORIES {
        fs::create_dir(dir.path().join(n.to_string())).unwrap();
    }
    let refused = Tree::watch(root(dir.path()), Path::new("/"), true).unwrap_err();
    assert!(refused.to_string().contains("4096 directories"), "{refused}");
    let told = events(&mut small);
    assert!(told.iter().any(|event| event == "OVERFLOW"));
    assert_eq!(small.directories.len(), MAX_DIRECTORIES);
}

#[test]
fn directories_whose_events_the_kernel_dropped_are_found_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut tree = tree(&dir, true);
    fs::create_dir_all(dir.path().join("a/b")).unwrap();
    // As if the kernel had no room for their events.
    assert!(!tree.read().unwrap().is_empty());
    tree.hear(Told {
        directory: -1,
        what: ReadFlags::QUEUE_OVERFLOW,
        cookie: 0,
        name: None,
    });
    assert_eq!(events(&mut tree), ["OVERFLOW"]);
    fs::write(dir.path().join("a/b/f"), "").unwrap();
    assert_eq!(events(&mut tree), ["CREATE a/b/f"]);
}
