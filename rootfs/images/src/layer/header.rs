//! One tar header block: ustar (POSIX.1-1988) and GNU's old form, which differ after byte 345.

use super::LayerError;
use super::sparse::Fragment;
use super::stream::BLOCK;

/// The type of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TypeFlag {
    Regular,
    HardLink,
    Symlink,
    CharDevice,
    BlockDevice,
    Directory,
    Fifo,
    PaxHeader,
    PaxGlobal,
    GnuLongName,
    GnuLongLink,
    GnuSparse,
    Other(u8),
}

impl TypeFlag {
    fn from_byte(byte: u8) -> TypeFlag {
        match byte {
            0 | b'0' | b'7' => TypeFlag::Regular,
            b'1' => TypeFlag::HardLink,
            b'2' => TypeFlag::Symlink,
            b'3' => TypeFlag::CharDevice,
            b'4' => TypeFlag::BlockDevice,
            b'5' => TypeFlag::Directory,
            b'6' => TypeFlag::Fifo,
            b'x' => TypeFlag::PaxHeader,
            b'g' => TypeFlag::PaxGlobal,
            b'L' => TypeFlag::GnuLongName,
            b'K' => TypeFlag::GnuLongLink,
            b'S' => TypeFlag::GnuSparse,
            other => TypeFlag::Other(other),
        }
    }

    /// Whether bytes follow the header. For the other types readers of tar ignore the size.
    pub fn has_content(self) -> bool {
        !matches!(
            self,
            TypeFlag::HardLink
                | TypeFlag::Symlink
                | TypeFlag::CharDevice
                | TypeFlag::BlockDevice
                | TypeFlag::Directory
                | TypeFlag::Fifo
        )
    }
}

/// A decoded header block.
#[derive(Debug)]
pub struct Header {
    pub name: Vec<u8>,
    pub link: Vec<u8>,
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    pub mtime: i64,
    pub type_flag: TypeFlag,
    pub device_major: u32,
    pub device_minor: u32,
    /// For a GNU sparse file: its size with holes, the fragments in this block, and whether a block with more follows.
    pub real_size: u64,
    pub sparse: Vec<Fragment>,
    pub sparse_continues: bool,
}

impl Header {
    pub fn parse(block: [u8; BLOCK], offset: u64) -> Result<Header, LayerError> {
        check_sum(&block).ok_or(LayerError::BadChecksum { offset })?;
        let raw_name = text(&block[..100]);
        let bad = |why| LayerError::bad_header(offset, raw_name, why);
        let is_gnu = &block[257..265] == b"ustar  \0";
        let is_posix = &block[257..263] == b"ustar\0";
        let type_flag = TypeFlag::from_byte(block[156]);

        let prefix = if is_posix { text(&block[345..500]) } else { b"" };
        let mut name = prefix.to_vec();
        if !prefix.is_empty() {
            name.push(b'/');
        }
        name.extend_from_slice(raw_name);

        let unsigned = |field: &[u8], why| {
            number(field)
                .and_then(|value| u64::try_from(value).ok())
                .ok_or(bad(why))
        };
        let id = |field, why| u32::try_from(unsigned(field, why)?).map_err(|_| bad(why));
        let is_device = matches!(type_flag, TypeFlag::CharDevice | TypeFlag::BlockDevice);
        let device = |field| {
            if is_device {
                id(field, "the device number is out of range")
            } else {
                Ok(0)
            }
        };
        let mut header = Header {
            name,
            link: text(&block[157..257]).to_vec(),
            mode: (unsigned(&block[100..108], "the mode is not a number")? & 0o7777) as u16,
            uid: id(&block[108..116], "the uid is out of range")?,
            gid: id(&block[116..124], "the gid is out of range")?,
            size: unsigned(&block[124..136], "the size is not a number")?,
            mtime: number(&block[136..148]).ok_or(bad("the mtime is not a number"))?,
            type_flag,
            device_major: device(&block[329..337])?,
            device_minor: device(&block[337..345])?,
            real_size: 0,
            sparse: Vec::new(),
            sparse_continues: false,
        };
        if type_flag == TypeFlag::GnuSparse {
            if !is_gnu {
                return Err(bad("a GNU sparse file in an archive of another kind"));
            }
            fragments(&block[386..482], &mut header.sparse).map_err(bad)?;
            header.sparse_continues = block[482] != 0;
            header.real_size = unsigned(&block[483..495], "the sparse file's size is not a number")?;
        }
        Ok(header)
    }
}

/// Reads a block of 21 sparse fragments. Returns whether another block follows.
pub fn sparse_block(block: &[u8; BLOCK], into: &mut Vec<Fragment>) -> Result<bool, &'static str> {
    fragments(&block[..504], into)?;
    Ok(block[504] != 0)
}

/// Reads pairs of 12-byte numbers up to the first that begins with NUL.
fn fragments(field: &[u8], into: &mut Vec<Fragment>) -> Result<(), &'static str> {
    for pair in field.chunks_exact(24) {
        if pair[0] == 0 {
            break;
        }
        let value = |bytes| {
            number(bytes)
                .and_then(|value| u64::try_from(value).ok())
                .ok_or("a sparse map entry is not a number")
        };
        into.push(Fragment {
            offset: value(&pair[..12])?,
            length: value(&pair[12..])?,
        });
    }
    Ok(())
}

/// The field up to its first NUL.
fn text(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or(field)
}

/// Octal digits between optional spaces, or GNU's base-256 with the top bit set; an empty field is zero.
fn number(field: &[u8]) -> Option<i64> {
    let first = *field.first()?;
    if first & 0x80 != 0 {
        // Two's complement, big-endian; bit 6 of the first byte is the sign.
        let mut value: i64 = if first & 0x40 != 0 { -1 } else { 0 };
        for (index, byte) in field.iter().enumerate() {
            // The flag bit is not part of the number; set, it continues a negative one's sign.
            let byte = if index == 0 && value == 0 {
                byte & 0x7f
            } else {
                *byte
            };
            value = value.checked_mul(256)?.checked_add(i64::from(byte))?;
        }
        return Some(value);
    }
    let digits = text(field).trim_ascii();
    digits.iter().try_fold(0i64, |value, digit| match digit {
        b'0'..=b'7' => value.checked_mul(8)?.checked_add(i64::from(digit - b'0')),
        _ => None,
    })
}

/// The checksum counts its own field as spaces; old writers summed signed bytes.
fn check_sum(block: &[u8; BLOCK]) -> Option<()> {
    let stored = number(&block[148..156])?;
    let counted = |index: usize, byte: u8| if (148..156).contains(&index) { b' ' } else { byte };
    let unsigned: i64 = block
        .iter()
        .enumerate()
        .map(|(index, byte)| i64::from(counted(index, *byte)))
        .sum();
    let signed: i64 = block
        .iter()
        .enumerate()
        .map(|(index, byte)| i64::from(counted(index, *byte) as i8))
        .sum();
    (stored == unsigned || stored == signed).then_some(())
}

#[cfg(test)]
mod tests {
    use super::number;

    #[test]
    fn numbers() {
        assert_eq!(number(b"0000644\0"), Some(0o644));
        assert_eq!(number(b"  644 \0\0"), Some(0o644));
        assert_eq!(number(b"\0\0\0\0\0\0\0\0"), Some(0));
        assert_eq!(number(b"12345678"), None);
        assert_eq!(
            number(&[0x80, 0, 0, 0, 0xff, 0xff, 0xff, 0xfe]),
            Some(0xffff_fffe)
        );
        assert_eq!(number(&[0xff; 12]), Some(-1));
        assert_eq!(
            number(&[
                0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0
            ]),
            Some(-256)
        );
        // More than 63 bits.
        assert_eq!(number(&[0x80, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]), None);
    }
}
