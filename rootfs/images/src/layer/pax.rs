//! PAX extended headers (POSIX.1-2001): records `LENGTH KEY=VALUE\n` that override the header that follows.

use thaw_imagefs::tree::Timestamp;

use super::decimal::decimal;
use super::sparse::Fragment;

const XATTR_PREFIX: &[u8] = b"SCHILY.xattr.";

/// The records of one extended header, in order. The last value of a key counts, and an empty value removes the key.
#[derive(Default)]
pub struct Pax {
    records: Vec<(Vec<u8>, Vec<u8>)>,
}

/// The records of a sparse file.
pub struct SparseMap {
    /// Size with holes.
    pub size: u64,
    /// The map; `None` if it precedes the data (form 1.0).
    pub fragments: Option<Vec<Fragment>>,
}

impl Pax {
    pub fn parse(mut bytes: &[u8]) -> Result<Pax, &'static str> {
        let mut records = Vec::new();
        while !bytes.is_empty() {
            let space = bytes
                .iter()
                .take(20)
                .position(|byte| *byte == b' ')
                .ok_or("a PAX record has no length")?;
            let length = decimal(&bytes[..space]).ok_or("a PAX record's length is not a number")?;
            let length = usize::try_from(length).map_err(|_| "a PAX record is too long")?;
            if length <= space + 1 || length > bytes.len() || bytes[length - 1] != b'\n' {
                return Err("a PAX record's length is wrong");
            }
            let record = &bytes[space + 1..length - 1];
            let equals = record
                .iter()
                .position(|byte| *byte == b'=')
                .ok_or("a PAX record has no '='")?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            let is_name = matches!(key, b"path" | b"linkpath" | b"GNU.sparse.name");
            if key.contains(&0) || (is_name && value.contains(&0)) {
                return Err("a PAX record has a NUL where none may be");
            }
            records.push((key.to_vec(), value.to_vec()));
            bytes = &bytes[length..];
        }
        Ok(Pax { records })
    }

    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Every record, in order.
    pub fn records(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.records
            .iter()
            .map(|(key, value)| (key.as_slice(), value.as_slice()))
    }

    pub fn get(&self, key: &[u8]) -> Option<&[u8]> {
        let (_, value) = self.records.iter().rev().find(|(name, _)| name == key)?;
        (!value.is_empty()).then_some(value)
    }

    fn number(&self, key: &[u8], why: &'static str) -> Result<Option<u64>, &'static str> {
        self.get(key).map(|value| decimal(value).ok_or(why)).transpose()
    }

    fn id(&self, key: &[u8], why: &'static str) -> Result<Option<u32>, &'static str> {
        self.number(key, why)?
            .map(|value| u32::try_from(value).map_err(|_| why))
            .transpose()
    }

    pub fn path(&self) -> Option<&[u8]> {
        self.get(b"path")
    }

    pub fn link_path(&self) -> Option<&[u8]> {
        self.get(b"linkpath")
    }

    /// The real name of a sparse file; its `path` is an artificial one.
    pub fn sparse_name(&self) -> Option<&[u8]> {
        self.get(b"GNU.sparse.name")
    }

    pub fn size(&self) -> Result<Option<u64>, &'static str> {
        self.number(b"size", "the PAX size is not a number")
    }

    pub fn uid(&self) -> Result<Option<u32>, &'static str> {
        self.id(b"uid", "the PAX uid is out of range")
    }

    pub fn gid(&self) -> Result<Option<u32>, &'static str> {
        self.id(b"gid", "the PAX gid is out of range")
    }

    pub fn mtime(&self) -> Result<Option<Timestamp>, &'static str> {
        self.get(b"mtime")
            .map(|value| timestamp(value).ok_or("the PAX mtime is not a number"))
            .transpose()
    }

    /// Names and values of extended attributes. An empty value is a value here.
    pub fn xattrs(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.records
            .iter()
            .filter_map(|(key, value)| Some((key.strip_prefix(XATTR_PREFIX)?, value.as_slice())))
    }

    /// The GNU.sparse records; `None` for a file that is not sparse.
    pub fn sparse(&self) -> Result<Option<SparseMap>, &'static str> {
        const WHY: &str = "a sparse map entry is not a number";
        if self.get(b"GNU.sparse.major") == Some(b"1") && self.get(b"GNU.sparse.minor") == Some(b"0") {
            let size = self
                .number(b"GNU.sparse.realsize", WHY)?
                .ok_or("a sparse file without its size")?;
            return Ok(Some(SparseMap {
                size,
                fragments: None,
            }));
        }
        let Some(size) = self.number(b"GNU.sparse.size", WHY)? else {
            return Ok(None);
        };
        let numbers: Vec<u64> = match self.get(b"GNU.sparse.map") {
            // Form 0.1: one record of all numbers.
            Some(map) => map
                .split(|byte| *byte == b',')
                .map(decimal)
                .collect::<Option<_>>()
                .ok_or(WHY)?,
            // Form 0.0: two records per fragment, alternating.
            None => {
                let mut numbers = Vec::new();
                for (key, value) in &self.records {
                    let is_offset = match key.as_slice() {
                        b"GNU.sparse.offset" => true,
                        b"GNU.sparse.numbytes" => false,
                        _ => continue,
                    };
                    if is_offset != numbers.len().is_multiple_of(2) {
                        return Err("sparse offsets and lengths do not take turns");
                    }
                    numbers.push(decimal(value).ok_or(WHY)?);
                }
                numbers
            }
        };
        if !numbers.len().is_multiple_of(2) {
            return Err("a sparse map has an offset without a length");
        }
        let fragments = numbers
            .chunks_exact(2)
            .map(|pair| Fragment {
                offset: pair[0],
                length: pair[1],
            })
            .collect();
        Ok(Some(SparseMap {
            size,
            fragments: Some(fragments),
        }))
    }
}

/// `[-]SECONDS[.FRACTION]`, with the fraction truncated to nanoseconds.
fn timestamp(value: &[u8]) -> Option<Timestamp> {
    let (negative, magnitude) = match value.strip_prefix(b"-") {
        Some(rest) => (true, rest),
        None => (false, value),
    };
    let mut parts = magnitude.splitn(2, |byte| *byte == b'.');
    let seconds = i64::try_from(decimal(parts.next()?)?).ok()?;
    let fraction = parts.next().unwrap_or(b"");
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let nanoseconds = (0..9).fold(0u32, |value, index| {
        value * 10 + fraction.get(index).map_or(0, |digit| u32::from(digit - b'0'))
    });
    Some(match (negative, nanoseconds) {
        (false, _) => Timestamp { seconds, nanoseconds },
        (true, 0) => Timestamp {
            seconds: -seconds,
            nanoseconds: 0,
        },
        // Nanoseconds count forward: -1.25 is -2 and 0.75.
        (true, _) => Timestamp {
            seconds: -seconds - 1,
            nanoseconds: 1_000_000_000 - nanoseconds,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps() {
        let at = |seconds, nanoseconds| Some(Timestamp { seconds, nanoseconds });
        assert_eq!(timestamp(b"12"), at(12, 0));
        assert_eq!(timestamp(b"12.5"), at(12, 500_000_000));
        assert_eq!(timestamp(b"12.0000000019"), at(12, 1));
        assert_eq!(timestamp(b"-1.25"), at(-2, 750_000_000));
        assert_eq!(timestamp(b"-1"), at(-1, 0));
        for wrong in [&b""[..], b"-", b".5", b"1.x", b"1e3", b"99999999999999999999"] {
            assert_eq!(timestamp(wrong), None);
        }
    }

    #[test]
    fn records() {
        let pax =
            Pax::parse(b"12 path=a/b\n14 path=a/b/c\n9 size=7\n7 uid=\n21 SCHILY.xattr.u.a=\n").unwrap();
        assert_eq!(pax.path(), Some(&b"a/b/c"[..]));
        assert_eq!(pax.size(), Ok(Some(7)));
        assert_eq!(pax.uid(), Ok(None));
        assert_eq!(pax.xattrs().collect::<Vec<_>>(), [(&b"u.a"[..], &b""[..])]);
        for wrong in [
            &b"path=a\n"[..],
            b"7 path=a\n",
            b"99 path=a\n",
            b"10 path=a\0\n",
            b"6 path\n",
            b"0 a=b\n",
            b"3 \n",
        ] {
            assert!(Pax::parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
