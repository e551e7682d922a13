//! The ids of sandboxes in E2B's API: thawd's id and, on a node that answers as one with others, after it the tag of the node that made the
//! sandbox. So each node learns from the id alone where the sandbox is.

use std::fmt;

use serde::{Deserialize, Serialize};
use thaw_sandbox::id;

/// What the tag of a node's name is derived for.
const PURPOSE: &str = "thaw 2026 e2b node tag";
/// Digits of a tag.
const TAG_DIGITS: usize = 4;

/// A node in ids: a hash of its name, 4 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Tag(u16);

impl Tag {
    /// The tag of the node with this name.
    pub fn of(name: &str) -> Tag {
        let [first, second, ..] = blake3::derive_key(PURPOSE, name.as_bytes());
        Tag(u16::from_be_bytes([first, second]))
    }

    fn parse(text: &str) -> Option<Tag> {
        let is_digit = |b: u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
        let is_tag = text.len() == TAG_DIGITS && text.bytes().all(is_digit);
        let number = u16::from_str_radix(text, 16).ok();
        number.filter(|_| is_tag).map(Tag)
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}", self.0)
    }
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WholeId {
    /// As thawd's own API has it.
    pub id: String,
    /// The node that made it. `None`: the id does not say.
    pub home: Option<Tag>,
}

impl WholeId {
    /// Reads an id; `None` if the text is none.
    pub fn parse(text: &str) -> Option<WholeId> {
        if id::is_id(text) {
            return Some(WholeId {
                id: text.to_owned(),
                home: None,
            });
        }
        let (id, tag) = text.split_at_checked(text.len().checked_sub(TAG_DIGITS)?)?;
        let home = Tag::parse(tag)?;
        id::is_id(id).then(|| WholeId {
            id: id.to_owned(),
            home: Some(home),
        })
    }
}

impl fmt::Display for WholeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.id)?;
        self.home.map_or(Ok(()), |home| home.fmt(f))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_is_read_as_it_is_shown() {
        let plain = WholeId::parse("0123456789ab").unwrap();
        assert_eq!((plain.home, plain.to_string().as_str()), (None, "0123456789ab"));
        let whole = WholeId::parse("0123456789ab00ff").unwrap();
        assert_eq!((whole.id.as_str(), whole.home), ("0123456789ab", Some(Tag(0xff))));
        assert_eq!(whole.to_string(), "0123456789ab00ff");
        for wrong in [
            "",
            "abc",
            "0123456789a",
            "0123456789ab0",
            "0123456789ab+0ff",
            "0123456789ab00FF",
            "0123456789ab00ff0",
            "0123456789AB00ff",
            "0123456789ä00ff",
            "0123456789abä00",
        ] {
            assert_eq!(WholeId::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn tag_is_of_one_name_and_never_changes() {
        assert_eq!(Tag::of("a"), Tag::of("a"));
        assert_ne!(Tag::of("a"), Tag::of("b"));
        assert_eq!(Tag::parse(&Tag::of("a").to_string()), Some(Tag::of("a")));
    }
}
