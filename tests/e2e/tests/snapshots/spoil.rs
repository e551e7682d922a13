//! Ways to spoil a snapshot or a template: files flipped, cut, grown and removed, and whole ones of another version or machine.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use rustix::fs::SeekFrom;
use serde_json::Value;
use thaw_e2e::leftovers::walk;

use super::{DAMAGED, INCOMPATIBLE};

/// A way to spoil a snapshot's directory: what it is called, the code of the refusal, words of its sentence, the deed.
pub struct Spoiled {
    pub what: String,
    pub code: i32,
    pub words: Vec<String>,
    pub deed: Box<dyn Fn(&Path)>,
}

pub fn spoiled(what: String, code: i32, words: &[&str], deed: impl Fn(&Path) + 'static) -> Spoiled {
    let words = words.iter().map(|w| (*w).to_owned()).collect();
    Spoiled {
        what,
        code,
        words,
        deed: Box::new(deed),
    }
}

/// A copy that shares what the file system lets it share, in place of what is at `to`.
pub fn copy(from: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    let copied = Command::new("cp")
        .args(["-a", "--reflink=auto", "--sparse=always"])
        .args([from, to])
        .status();
    assert!(copied.unwrap().success());
    for path in walk(to) {
        let mode = if Path::new(&path).is_dir() { 0o700 } else { 0o600 };
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
}

/// Flips one byte.
pub fn flip(path: &Path, at: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x5a], at).unwrap();
}

pub fn cut(path: &Path, length: u64) {
    OpenOptions::new()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(length)
        .unwrap();
}

/// Where the data of a sparse file begins and ends, piece by piece.
pub fn data(path: &Path) -> Vec<(u64, u64)> {
    let file = File::open(path).unwrap();
    let (mut found, mut at) = (Vec::new(), 0);
    while let Ok(begin) = rustix::fs::seek(file.as_fd(), SeekFrom::Data(at)) {
        at = rustix::fs::seek(file.as_fd(), SeekFrom::Hole(begin)).unwrap();
        found.push((begin, at));
    }
    assert!(!found.is_empty(), "{} is empty", path.display());
    found
}

/// A byte in each region of a sparse file: its data's beginning, middle and end, and the largest hole.
pub fn regions(path: &Path) -> Vec<(&'static str, u64)> {
    let length = fs::metadata(path).unwrap().len();
    let data = data(path);
    let middle = data[data.len() / 2];
    let begins = data.iter().map(|(begin, _)| *begin).skip(1).chain([length]);
    let (_, hole, end) = data
        .iter()
        .zip(begins)
        .map(|((_, end), next)| (next - end, *end, next))
        .max()
        .unwrap();
    let mut found = vec![
        ("the first page", data[0].0),
        ("the middle", middle.0 + (middle.1 - middle.0) / 2),
        ("the last byte of data", data[data.len() - 1].1 - 1),
    ];
    if hole < end {
        found.push(("a hole", hole + (end - hole) / 2));
    }
    found
}

/// A byte in each part of `state` and `working-set`: docs/snapshot-format.md.
pub fn parts(path: &Path) -> Vec<(&'static str, u64)> {
    let length = fs::metadata(path).unwrap().len();
    vec![
        ("the magic", 0),
        ("the version", 8),
        ("the length", 16),
        ("the hash", 40),
        ("the first record", 64),
        ("the middle", length / 2),
        ("the last byte", length - 1),
    ]
}

/// Every file flipped in each of its regions, cut, grown and gone. `whole` is as it should be.
pub fn every_damage(whole: &Path) -> Vec<Spoiled> {
    let optional = ["working-set", "disks/blk0"].into_iter();
    let files = ["state", "memory"]
        .into_iter()
        .chain(optional.filter(|f| whole.join(f).exists()));
    let mut all: Vec<Spoiled> = files.flat_map(|name| every_damage_of(whole, name)).collect();
    all.extend(every_damage_of_manifest(whole));
    all
}

fn every_damage_of(whole: &Path, name: &'static str) -> Vec<Spoiled> {
    let path = whole.join(name);
    let length = fs::metadata(&path).unwrap().len();
    let in_chunks = matches!(name, "memory" | "disks/blk0");
    let places = if in_chunks { regions(&path) } else { parts(&path) };
    let mut all = Vec::new();
    for (place, at) in places {
        let word = match in_chunks {
            true => format!("{name}: chunk {} ", at >> 21),
            false => name.into(),
        };
        let what = format!("{name} flipped in {place}");
        all.push(spoiled(what, DAMAGED, &[&word], move |d| flip(&d.join(name), at)));
    }
    for left in [0, length / 2, length - 1, length + 1] {
        let words = [name, &format!("{left} bytes instead of {length}")];
        let what = format!("{name} of {left} bytes");
        all.push(spoiled(what, DAMAGED, &words, move |d| cut(&d.join(name), left)));
    }
    all.push(gone(name));
    all
}

fn every_damage_of_manifest(whole: &Path) -> Vec<Spoiled> {
    let (manifest, hash) = ("manifest.json", "manifest.b3");
    let length = fs::metadata(whole.join(manifest)).unwrap().len();
    let flips = [0, length / 3, length / 2, length - 3].map(|at| (manifest, at));
    let flips = flips.into_iter().chain([0, 63, 66].map(|at| (hash, at)));
    let mut all: Vec<Spoiled> = flips
        .map(|(name, at)| {
            let what = format!("{name} flipped at {at}");
            spoiled(what, DAMAGED, &[name], move |d| flip(&d.join(name), at))
        })
        .collect();
    let what = format!("{manifest} cut");
    all.push(spoiled(what, DAMAGED, &[manifest], move |d| {
        cut(&d.join(manifest), length / 2)
    }));
    all.push(gone(hash));
    all
}

fn gone(name: &'static str) -> Spoiled {
    spoiled(format!("{name} gone"), DAMAGED, &[name], move |d| {
        fs::remove_file(d.join(name)).unwrap()
    })
}

/// Changes the manifest and makes its hash right again, as whoever wrote it could have.
pub fn forge(directory: &Path, change: impl Fn(&mut Value)) {
    let path = directory.join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut manifest);
    let bytes = manifest.to_string().into_bytes();
    fs::write(&path, &bytes).unwrap();
    fs::write(
        directory.join("manifest.b3"),
        format!("{}  manifest.json\n", blake3::hash(&bytes)),
    )
    .unwrap();
}

/// Changes `state` and makes its hashes right again.
pub fn forge_state(directory: &Path, change: impl Fn(&mut Vec<u8>)) {
    let path = directory.join("state");
    let mut state = fs::read(&path).unwrap();
    change(&mut state);
    let hash = blake3::hash(&state[64..]);
    state[32..64].copy_from_slice(hash.as_bytes());
    fs::write(&path, &state).unwrap();
    forge(directory, |manifest| {
        manifest["files"]["state"]["blake3"] = blake3::hash(&state).to_string().into()
    });
}

/// What is whole, but of another version or another machine. `cpus` and `memory`: words of what is said of those.
pub fn every_misfit(cpus: &str, memory: &str) -> Vec<Spoiled> {
    vec![
        spoiled(
            "a manifest of version 3".into(),
            INCOMPATIBLE,
            &["version 3"],
            |d| forge(d, |m| m["format"] = 3.into()),
        ),
        spoiled("a state of version 2".into(), DAMAGED, &["version 2"], |d| {
            forge_state(d, |s| s[8] = 2)
        }),
        spoiled("a state of no kind we know".into(), DAMAGED, &["state"], |d| {
            forge_state(d, |s| s[0] ^= 1)
        }),
        spoiled(
            "of a machine with other CPUs".into(),
            INCOMPATIBLE,
            &[cpus],
            |d| {
                forge(d, |m| m["machine"]["vcpus"] = 2.into());
            },
        ),
        spoiled(
            "of a machine with other memory".into(),
            INCOMPATIBLE,
            &[memory],
            |d| {
                forge(d, |m| m["machine"]["memory_mib"] = 256.into());
            },
        ),
    ]
}
