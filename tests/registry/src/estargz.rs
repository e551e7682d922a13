//! eStargz layers, as the stargz-snapshotter's specification of the format describes them.
//!
//! A gzip stream of many members: each chunk of each regular file's content is a member of its own, tar headers and padding
//! stand in members between them, and the table of contents (TOC), a tar entry of JSON, in the last but one. The last, the
//! footer, says where the TOC's is. Landmark files are optional and left out: the tree is then the layer's own.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use crate::image::{digest, gzip};

/// Most bytes of a file in one member.
const CHUNK: usize = 4 << 20;
const TOC_NAME: &str = "stargz.index.json";
/// The annotation a layer's descriptor has.
const TOC_DIGEST: &str = "containerd.io/snapshot/stargz/toc.digest";
const UNCOMPRESSED_SIZE: &str = "io.containers.estargz.uncompressed-size";

/// A layer in this form.
pub struct Estargz {
    /// The stored blob.
    pub stored: Vec<u8>,
    /// What it uncompresses to: the tar with its TOC.
    pub tar: Vec<u8>,
    /// Annotations of its descriptor.
    pub annotations: Value,
}

/// Writes members, and what they hold.
#[derive(Default)]
struct Members {
    stored: Vec<u8>,
    tar: Vec<u8>,
}

impl Members {
    fn member(&mut self, content: &[u8]) {
        if !content.is_empty() {
            self.stored.extend(gzip(content));
            self.tar.extend_from_slice(content);
        }
    }
}

/// Rewrites a layer's tar. Sparse files in GNU's pax format are not for this form.
pub fn write(tar: &[u8]) -> Estargz {
    let mut members = Members::default();
    let mut entries = Vec::new();
    let mut done = 0;
    let mut archive = tar::Archive::new(tar);
    let mut end = 0;
    for entry in archive.entries().unwrap() {
        let entry = entry.unwrap();
        let pax = pax(&tar[end..entry.raw_header_position() as usize]);
        let start = entry.raw_file_position() as usize;
        let size = entry.size() as usize;
        end = (start + size).next_multiple_of(512);
        let mut described = describe(&entry, &pax);
        if described["type"] != "reg" || size == 0 {
            entries.push(Value::Object(described));
            continue;
        }
        members.member(&tar[done..start]);
        let content = &tar[start..start + size];
        described.insert("digest".into(), digest(content).into());
        for (number, chunk) in content.chunks(CHUNK).enumerate() {
            let offset = number * CHUNK;
            let mut of_chunk = match number {
                0 => described.clone(),
                _ => Map::from_iter([
                    ("name".into(), described["name"].clone()),
                    ("type".into(), "chunk".into()),
                ]),
            };
            of_chunk.insert("offset".into(), members.stored.len().into());
            of_chunk.insert("chunkDigest".into(), digest(chunk).into());
            if offset > 0 {
                of_chunk.insert("chunkOffset".into(), offset.into());
            }
            if offset + chunk.len() < size {
                of_chunk.insert("chunkSize".into(), chunk.len().into());
            }
            entries.push(Value::Object(of_chunk));
            members.member(chunk);
        }
        done = start + size;
    }
    members.member(&tar[done..end_of_entries(tar, done)]);

    let toc = json!({"version": 1, "entries": entries}).to_string();
    let toc_offset = members.stored.len();
    let mut last = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    header.set_mode(0o444);
    header.set_size(toc.len() as u64);
    last.append_data(&mut header, TOC_NAME, toc.as_bytes()).unwrap();
    members.member(&last.into_inner().unwrap());
    members.stored.extend(footer(toc_offset as u64));
    let annotations = json!({
        TOC_DIGEST: digest(toc.as_bytes()),
        UNCOMPRESSED_SIZE: members.tar.len().to_string(),
    });
    Estargz {
        stored: members.stored,
        tar: members.tar,
        annotations,
    }
}

/// Where the blocks of zeros begin that end an archive; `from` is within or behind the last entry's content.
fn end_of_entries(tar: &[u8], from: usize) -> usize {
    let mut end = tar.len();
    while end >= from.next_multiple_of(512) + 512 && tar[end - 512..end].iter().all(|b| *b == 0) {
        end -= 512;
    }
    end
}

/// 51 bytes: an empty gzip member whose extra field says where the TOC's member is.
fn footer(toc_offset: u64) -> Vec<u8> {
    let mut footer = vec![0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 0, 255, 26, 0, b'S', b'G', 22, 0];
    footer.extend(format!("{toc_offset:016x}STARGZ").bytes());
    footer.extend([1, 0, 0, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0]);
    footer
}

/// The records of an entry's PAX header, in the blocks before its own. The tar crate cuts records at newlines, which an
/// attribute's value may have.
fn pax(blocks: &[u8]) -> Vec<(String, Vec<u8>)> {
    if blocks.get(156) != Some(&b'x') {
        return Vec::new();
    }
    let size = std::str::from_utf8(&blocks[124..135]).unwrap();
    let size = usize::from_str_radix(size.trim_end_matches(['\0', ' ']), 8).unwrap();
    let mut records = &blocks[512..512 + size];
    let mut pax = Vec::new();
    while !records.is_empty() {
        let space = records.iter().position(|b| *b == b' ').unwrap();
        let length: usize = std::str::from_utf8(&records[..space]).unwrap().parse().unwrap();
        let record = &records[space + 1..length - 1];
        let equals = record.iter().position(|b| *b == b'=').unwrap();
        let key = String::from_utf8(record[..equals].to_vec()).unwrap();
        pax.push((key, record[equals + 1..].to_vec()));
        records = &records[length..];
    }
    pax
}

/// An entry's TOC entry, but for where its content is.
fn describe(entry: &tar::Entry<'_, &[u8]>, pax: &[(String, Vec<u8>)]) -> Map<String, Value> {
    let number = |key: &str| {
        let (_, value) = pax.iter().find(|(k, _)| k == key)?;
        std::str::from_utf8(value).unwrap().parse::<u64>().ok()
    };
    let header = entry.header();
    let kind = match header.entry_type() {
        tar::EntryType::Directory => "dir",
        tar::EntryType::Symlink => "symlink",
        tar::EntryType::Link => "hardlink",
        tar::EntryType::Char => "char",
        tar::EntryType::Block => "block",
        tar::EntryType::Fifo => "fifo",
        tar::EntryType::Regular => "reg",
        other => panic!("{other:?} is not for an eStargz layer"),
    };
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let mut described = Map::new();
    let mut set = |key: &str, value: Value| described.insert(key.into(), value);
    set("name", text(&entry.path_bytes()).into());
    set("type", kind.into());
    let time = pax.iter().find(|(key, _)| key == "mtime");
    let (seconds, nanoseconds) = match time {
        Some((_, value)) => decimal(std::str::from_utf8(value).unwrap()),
        None => (header.mtime().unwrap_or(0) as i64, 0),
    };
    set("modtime", rfc3339(seconds, nanoseconds).into());
    set("mode", header.mode().unwrap().into());
    set(
        "uid",
        number("uid").unwrap_or_else(|| header.uid().unwrap_or(0)).into(),
    );
    set(
        "gid",
        number("gid").unwrap_or_else(|| header.gid().unwrap_or(0)).into(),
    );
    if kind == "reg" && entry.size() > 0 {
        set("size", entry.size().into());
    }
    if let Some(link) = entry
        .link_name_bytes()
        .filter(|_| kind == "symlink" || kind == "hardlink")
    {
        set("linkName", text(&link).into());
    }
    if kind == "char" || kind == "block" {
        set("devMajor", header.device_major().unwrap().unwrap_or(0).into());
        set("devMinor", header.device_minor().unwrap().unwrap_or(0).into());
    }
    let attributes: Map<String, Value> = pax
        .iter()
        .filter_map(|(key, value)| {
            let name = key.strip_prefix("SCHILY.xattr.")?;
            Some((name.to_string(), STANDARD.encode(value).into()))
        })
        .collect();
    if !attributes.is_empty() {
        set("xattrs", attributes.into());
    }
    described
}

/// Seconds and nanoseconds, the latter counted from the second before.
fn decimal(text: &str) -> (i64, u32) {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().unwrap();
    let nanoseconds: u32 = format!("{fraction:0<9}")[..9].parse().unwrap();
    match text.starts_with('-') && nanoseconds > 0 {
        true => (seconds - 1, 1_000_000_000 - nanoseconds),
        false => (seconds, nanoseconds),
    }
}

/// UTC, with a fraction only where there is one.
fn rfc3339(seconds: i64, nanoseconds: u32) -> String {
    let (days, second) = (seconds.div_euclid(86400), seconds.rem_euclid(86400));
    // Howard Hinnant's civil_from_days.
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 {
        month_index + 3
    } else {
        month_index - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let fraction = match nanoseconds {
        0 => String::new(),
        n => format!(".{n:09}").trim_end_matches('0').to_string(),
    };
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}{fraction}Z")
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn times_are_written_as_the_format_wants_them() {
        assert_eq!(rfc3339(0, 0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(1_709_210_096, 500_000_000), "2024-02-29T12:34:56.5Z");
        let (seconds, nanoseconds) = decimal("-86400.5");
        assert_eq!(rfc3339(seconds, nanoseconds), "1969-12-30T23:59:59.5Z");
        assert_eq!(decimal("1234567890.123456789"), (1_234_567_890, 123_456_789));
    }

    #[test]
    fn estargz_chunks_are_members_and_the_footer_finds_the_toc() {
        let mut builder = tar::Builder::new(Vec::new());
        let large: Vec<u8> = (0..CHUNK + 1000).map(|i| ((i * 7) >> 3) as u8).collect();
        for (name, content) in [("small", b"abc".as_slice()), ("empty", b""), ("large", &large)] {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            builder.append_data(&mut header, name, content).unwrap();
        }
        let tar = builder.into_inner().unwrap();
        let made = write(&tar);

        let mut whole = Vec::new();
        flate2::read::MultiGzDecoder::new(&made.stored[..])
            .read_to_end(&mut whole)
            .unwrap();
        assert_eq!(whole, made.tar);
        assert_eq!(
            whole[..tar.len() - 1024],
            tar[..tar.len() - 1024],
            "the layer's own entries"
        );

        let footer = &made.stored[made.stored.len() - 51..];
        let offset = usize::from_str_radix(std::str::from_utf8(&footer[16..32]).unwrap(), 16).unwrap();
        assert_eq!(&footer[32..38], b"STARGZ");
        let mut toc_tar = Vec::new();
        flate2::read::GzDecoder::new(&made.stored[offset..])
            .read_to_end(&mut toc_tar)
            .unwrap();
        let mut archive = tar::Archive::new(&toc_tar[..]);
        let mut toc = String::new();
        archive
            .entries()
            .unwrap()
            .next()
            .unwrap()
            .unwrap()
            .read_to_string(&mut toc)
            .unwrap();
        assert_eq!(made.annotations[TOC_DIGEST], digest(toc.as_bytes()));
        let toc: Value = serde_json::from_str(&toc).unwrap();
        let entries = toc["entries"].as_array().unwrap();
        let kinds: Vec<_> = entries.iter().map(|e| e["type"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["reg", "reg", "reg", "chunk"]);
        let last = &entries[3];
        let mut chunk = Vec::new();
        let at = last["offset"].as_u64().unwrap() as usize;
        flate2::read::GzDecoder::new(&made.stored[at..])
            .read_to_end(&mut chunk)
            .unwrap();
        assert_eq!(chunk, large[CHUNK..]);
        assert_eq!(
            (
                last["chunkOffset"].as_u64().unwrap() as usize,
                last.get("chunkSize")
            ),
            (CHUNK, None)
        );
    }
}
