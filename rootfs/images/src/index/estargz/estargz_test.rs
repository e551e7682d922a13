//! Tables compared with the result of unpacking the same layer, and malformed tables.

use std::collections::BTreeMap;
use std::io::Write;

use base64::Engine as _;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::index::rfc3339;
use crate::index::testing::{assert_like_unpacked, tar, tricky};
use crate::layer::header::TypeFlag;
use crate::layer::testing::{END, header, padded};
use crate::layer::walk::walk;
use crate::span::SpanError;

use super::*;

/// A layer written as the tools write it.
pub struct Made {
    pub stored: Vec<u8>,
    /// The bytes whose digest is in the annotation of its descriptor.
    pub toc: Vec<u8>,
    location: Range<u64>,
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd_frame(bytes: &[u8]) -> Vec<u8> {
    zstd::stream::encode_all(bytes, 3).unwrap()
}

/// The table's entry for a header, without chunks.
fn entry_of(head: &[u8], size: u64) -> Value {
    let mut entry = Value::Null;
    let one = [head, &vec![0; padded(&vec![0; size as usize]).len()], &END].concat();
    walk::<LayerErrorOnly>(&one[..], &LayerLimits::default(), |walked| {
        let xattrs: serde_json::Map<String, Value> = walked
            .pax
            .xattrs()
            .map(|(name, value)| {
                let value = base64::engine::general_purpose::STANDARD.encode(value);
                (String::from_utf8(name.to_vec()).unwrap(), value.into())
            })
            .collect();
        let mtime = walked
            .pax
            .mtime()
            .unwrap()
            .unwrap_or(thaw_imagefs::tree::Timestamp {
                seconds: walked.header.mtime,
                nanoseconds: 0,
            });
        let kind = match walked.header.type_flag {
            TypeFlag::Regular if walked.name.ends_with(b"/") => "dir",
            TypeFlag::Regular => "reg",
            TypeFlag::Directory => "dir",
            TypeFlag::HardLink => "hardlink",
            TypeFlag::Symlink => "symlink",
            TypeFlag::CharDevice => "char",
            TypeFlag::BlockDevice => "block",
            _ => "fifo",
        };
        entry = json!({
            "name": String::from_utf8(walked.name.to_vec()).unwrap(),
            "type": kind,
            "linkName": String::from_utf8(walked.link.to_vec()).unwrap(),
            "modtime": rfc3339::format(mtime).unwrap(),
            "mode": walked.header.mode,
            "uid": walked.pax.uid().unwrap().unwrap_or(walked.header.uid),
            "gid": walked.pax.gid().unwrap().unwrap_or(walked.header.gid),
            "devMajor": walked.header.device_major,
            "devMinor": walked.header.device_minor,
            "xattrs": xattrs,
        });
        Ok(())
    })
    .map_err(|LayerErrorOnly(error)| error)
    .unwrap();
    entry
}

struct LayerErrorOnly(crate::layer::LayerError);

impl From<crate::layer::LayerError> for LayerErrorOnly {
    fn from(error: crate::layer::LayerError) -> LayerErrorOnly {
        LayerErrorOnly(error)
    }
}

/// Members: the bytes between chunks, and each chunk with the bytes that follow it. A chunk has at most `chunk` bytes.
fn make(parts: &[(Vec<u8>, Vec<u8>)], chunk: usize, compress: fn(&[u8]) -> Vec<u8>) -> (Vec<u8>, Vec<Value>) {
    let mut stored = Vec::new();
    let mut open: Vec<u8> = Vec::new();
    let mut entries = Vec::new();
    for (head, content) in parts {
        let mut entry = entry_of(head, content.len() as u64);
        open.extend_from_slice(head);
        if content.is_empty() {
            entries.push(entry);
            continue;
        }
        entry["size"] = content.len().into();
        entry["digest"] = Digest::of(content).to_string().into();
        for (number, piece) in content.chunks(chunk).enumerate() {
            stored.extend(compress(&open));
            open = piece.to_vec();
            if number > 0 {
                entry = json!({ "name": entries.last().unwrap()["name"], "type": "chunk" });
                entry["chunkOffset"] = (number * chunk).into();
            }
            if piece.len() == chunk {
                entry["chunkSize"] = chunk.into();
            }
            entry["offset"] = stored.len().into();
            entry["chunkDigest"] = Digest::of(piece).to_string().into();
            entries.push(entry.clone());
        }
        open.resize(open.len() + (padded(content).len() - content.len()), 0);
    }
    stored.extend(compress(&open));
    (stored, entries)
}

/// A layer of parts, a member for each `chunk` bytes of a file.
pub fn estargz(parts: &[(Vec<u8>, Vec<u8>)], chunk: usize) -> Made {
    let (stored, entries) = make(parts, chunk, gzip);
    with_table(stored, &json!({ "version": 1, "entries": entries }))
}

fn with_table(mut stored: Vec<u8>, toc: &Value) -> Made {
    let start = stored.len() as u64;
    let toc = serde_json::to_vec(toc).unwrap();
    let entry = [
        &header("stargz.index.json", b'0', toc.len() as u64, "")[..],
        &padded(&toc),
        &END,
    ]
    .concat();
    stored.extend(gzip(&entry));
    let end = stored.len() as u64;
    stored.extend(footer(start));
    Made {
        stored,
        toc,
        location: start..end,
    }
}

fn footer(offset: u64) -> Vec<u8> {
    let mut footer = vec![0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 0, 0xff, 26, 0, b'S', b'G', 22, 0];
    footer.extend(format!("{offset:016x}STARGZ").bytes());
    footer.extend([1, 0, 0, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0]);
    footer
}

impl Made {
    fn read(&self) -> Result<LayerIndex, IndexError> {
        let size = self.stored.len() as u64;
        let location = toc_location(&self.stored[self.stored.len() - FOOTER as usize..], size)?;
        assert_eq!(location, self.location);
        let bytes = &self.stored[location.start as usize..location.end as usize];
        read_toc(
            bytes,
            &Digest::of(&self.toc),
            location.clone(),
            &LayerLimits::default(),
        )
    }
}

#[test]
fn a_layer_is_as_unpacked() {
    for chunk in [1 << 20, 3000, 4096] {
        let parts = tricky(false);
        let made = estargz(&parts, chunk);
        assert_like_unpacked(&made.read().unwrap(), &made.stored, &tar(&parts));
    }
}

/// Several files in one member, as tools write them for a minimum chunk size.
#[test]
fn files_may_share_a_member() {
    let parts: Vec<_> = tricky(false)
        .into_iter()
        .filter(|(_, content)| !content.is_empty())
        .collect();
    let (mut member, mut entries) = (Vec::new(), Vec::new());
    for (head, content) in &parts {
        member.extend_from_slice(head);
        let mut entry = entry_of(head, content.len() as u64);
        entry["size"] = content.len().into();
        entry["innerOffset"] = member.len().into();
        entry["chunkDigest"] = Digest::of(content).to_string().into();
        entries.push(entry);
        member.extend(padded(content));
    }
    let toc = json!({ "version": 1, "entries": entries });
    let made = with_table(gzip(&member), &toc);
    let index = made.read().unwrap();
    assert_eq!(index.content.spans.spans().len(), 1);
    assert_like_unpacked(&index, &made.stored, &tar(&parts));
    // Each part is compared.
    for number in 0..entries.len() {
        let mut toc = toc.clone();
        toc["entries"][number]["chunkDigest"] = Digest::of(b"other").to_string().into();
        let index = with_table(gzip(&member), &toc).read().unwrap();
        let spans = &index.content.spans;
        let stored = &made.stored[..spans.spans()[0].stored.end as usize];
        assert!(matches!(
            spans.expand(0, stored),
            Err(SpanError::Digest { span: 0 })
        ));
    }
}

#[test]
fn a_zstd_layer_is_as_unpacked() {
    for chunk in [1 << 20, 3000] {
        let parts = tricky(false);
        let (mut stored, entries) = make(&parts, chunk, zstd_frame);
        let toc = zstd_frame(&serde_json::to_vec(&json!({ "version": 1, "entries": entries })).unwrap());
        let start = stored.len() as u64 + 8;
        stored.extend([0x50, 0x2a, 0x4d, 0x18]);
        stored.extend((toc.len() as u32).to_le_bytes());
        stored.extend(&toc);
        let location = start..stored.len() as u64;
        let index = read_zstd_toc(&toc, &Digest::of(&toc), location, &LayerLimits::default()).unwrap();
        assert_like_unpacked(&index, &stored, &tar(&parts));
    }
}

#[test]
fn what_steers_a_prefetch_is_left_out() {
    let mut parts = tricky(false);
    parts.insert(1, (header(".prefetch.landmark", b'0', 1, "").to_vec(), vec![0xf]));
    let made = estargz(&parts, 4096);
    parts.remove(1);
    assert_like_unpacked(&made.read().unwrap(), &made.stored, &tar(&parts));
}

#[test]
fn footers() {
    assert_eq!(toc_location(&footer(1000), 5000).unwrap(), 1000..4949);
    let mut old = footer(1000);
    old.splice(10..16, [22, 0]);
    assert_eq!(old.len(), 47);
    // The last 51 bytes also contain the older footer, which has 47.
    assert_eq!(
        toc_location(&[&[1, 2, 3, 4][..], &old].concat(), 5000).unwrap(),
        1000..4953
    );
    for (footer, size) in [
        (footer(5000), 5000),
        (footer(4949), 5000),
        (footer(u64::MAX), 5000),
        (footer(0), 1 << 40),
        (footer(0), 40),
        (Vec::new(), 5000),
        (vec![0; 51], 5000),
        (footer(10)[..50].to_vec(), 5000),
    ] {
        assert!(toc_location(&footer, size).is_err());
    }
    let mut sign = footer(16);
    sign[16] = b'+';
    assert!(toc_location(&sign, 5000).is_err());
}

#[test]
fn another_table_is_refused() {
    let made = estargz(&tricky(false), 4096);
    let bytes = &made.stored[made.location.start as usize..made.location.end as usize];
    let error = read_toc(
        bytes,
        &Digest::of(b"x"),
        made.location.clone(),
        &LayerLimits::default(),
    )
    .unwrap_err();
    assert!(matches!(error, IndexError::Digest { .. }), "{error}");
}

#[test]
fn tables_that_lie_are_refused() {
    let digest = Digest::of(b"x").to_string();
    let reg = |more: Value| {
        let mut entry =
            json!({ "name": "f", "type": "reg", "size": 10, "offset": 20, "chunkDigest": digest });
        for (key, value) in more.as_object().unwrap() {
            entry[key] = value.clone();
        }
        entry
    };
    let read =
        |entries: Vec<Value>| with_table(vec![0; 1000], &json!({ "version": 1, "entries": entries })).read();
    assert!(read(vec![reg(json!({}))]).is_ok());
    assert!(read(vec![reg(json!({ "chunkDigest": "", "digest": digest }))]).is_ok());
    let chunk = |more: Value| {
        let mut entry = reg(more);
        entry["type"] = "chunk".into();
        entry
    };
    for entries in [
        vec![reg(json!({ "name": "../f" }))],
        vec![reg(json!({ "name": "/f" }))],
        vec![reg(json!({ "type": "odd" }))],
        vec![reg(json!({ "offset": 5000 }))],
        vec![reg(json!({ "offset": -1 }))],
        vec![reg(json!({ "chunkDigest": "" }))],
        vec![reg(json!({ "chunkDigest": "md5:0" }))],
        vec![reg(json!({ "chunkSize": 5 }))],
        vec![reg(json!({ "chunkSize": 11 }))],
        vec![reg(json!({ "chunkOffset": 1 }))],
        vec![reg(json!({ "size": 100u64 << 20 }))],
        vec![reg(json!({ "size": u64::MAX }))],
        vec![reg(json!({ "modtime": "yesterday" }))],
        vec![reg(json!({ "xattrs": { "user.a": "%" } }))],
        vec![reg(json!({})), reg(json!({ "offset": 19 }))],
        vec![reg(json!({})), reg(json!({ "innerOffset": 5 }))],
        vec![chunk(json!({}))],
        vec![json!({ "name": "d", "type": "dir" }), chunk(json!({}))],
        vec![
            reg(json!({ "chunkSize": 4 })),
            chunk(json!({ "chunkOffset": 5, "offset": 30 })),
        ],
        vec![json!({ "name": "l", "type": "hardlink", "linkName": "../x" })],
        vec![json!({ "name": "l", "type": "symlink" })],
        vec![json!({ "name": "", "type": "reg" })],
        vec![json!({ "name": "c", "type": "char", "devMajor": 5000 })],
    ] {
        let outcome = read(entries.clone());
        assert!(outcome.is_err(), "{entries:?}");
    }
    for toc in [
        json!([]),
        json!({}),
        json!({ "entries": 1 }),
        json!({ "entries": [1] }),
    ] {
        assert!(with_table(vec![0; 10], &toc).read().is_err(), "{toc}");
    }
}

#[test]
fn a_small_table_does_not_become_a_large_one() {
    let entries = vec![json!({}); 1000];
    let toc = serde_json::to_vec(&json!({ "entries": entries })).unwrap();
    let few = LayerLimits {
        entries: 10,
        ..LayerLimits::default()
    };
    assert!(toc::read(&toc, 10, toc::Codec::Gzip, &few).is_err());
}

#[test]
fn annotations_bind() {
    let digest = Digest::of(b"toc");
    let of = |pairs: &[(&str, &str)]| {
        let annotations: BTreeMap<String, String> = pairs
            .iter()
            .map(|(name, value)| ((*name).into(), (*value).into()))
            .collect();
        bound(&annotations, 1000)
    };
    let text = digest.to_string();
    assert_eq!(of(&[]).unwrap(), None);
    assert_eq!(
        of(&[(TOC_DIGEST, &text)]).unwrap(),
        Some(Bound::Gzip { toc: digest })
    );
    for names in [0, 1] {
        let pairs = [
            (ZSTD_CHECKSUM[names], &*text),
            (ZSTD_POSITION[names], "100:50:500:1"),
            (TOC_DIGEST, &text),
        ];
        let expected = Bound::Zstd {
            stored: digest,
            location: 100..150,
        };
        assert_eq!(of(&pairs).unwrap(), Some(expected));
    }
    assert!(of(&[(TOC_DIGEST, "x")]).is_err());
    for position in [
        "",
        "1:2:3",
        "1:2:3:2",
        "990:50:500:1",
        "-1:2:3:1",
        "1:0:3:1",
        "1:18446744073709551615:3:1",
        "1:2:999999999999:1",
    ] {
        let pairs = [(ZSTD_CHECKSUM[0], &*text), (ZSTD_POSITION[0], position)];
        assert!(of(&pairs).is_err(), "{position}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Arbitrary bytes are accepted or refused, without a panic.
    #[test]
    fn damaged_tables_never_panic(flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        let (_, entries) = make(&tricky(false), 4096, zstd_frame);
        let mut toc = serde_json::to_vec(&json!({ "version": 1, "entries": entries })).unwrap();
        for (place, value) in flips {
            let place = place.index(toc.len());
            toc[place] = value;
        }
        let _ = toc::read(&toc, 1 << 20, toc::Codec::Gzip, &LayerLimits::default());
    }
}
