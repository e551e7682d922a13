//! The subset of FlatBuffers that a ztoc needs, read in place and treated as hostile.
//!
//! Invariant: every offset is checked against the buffer before it is followed, and only the one from a table to its field map may point
//! backwards, so no loop is possible. Strings are bytes, because names in tar streams need not be text. The usual verifier requires UTF-8
//! and is therefore unsuitable.

/// The defect of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flaw(pub &'static str);

type Result<T> = std::result::Result<T, Flaw>;

const OUTSIDE: Flaw = Flaw("an offset leads out of it");

fn bytes<const N: usize>(buffer: &[u8], at: usize) -> Result<[u8; N]> {
    let end = at.checked_add(N).ok_or(OUTSIDE)?;
    buffer
        .get(at..end)
        .and_then(|bytes| bytes.try_into().ok())
        .ok_or(OUTSIDE)
}

fn u16_at(buffer: &[u8], at: usize) -> Result<usize> {
    Ok(usize::from(u16::from_le_bytes(bytes(buffer, at)?)))
}

fn u32_at(buffer: &[u8], at: usize) -> Result<usize> {
    usize::try_from(u32::from_le_bytes(bytes(buffer, at)?)).map_err(|_| OUTSIDE)
}

/// Follows the offset at `at`.
fn follow(buffer: &[u8], at: usize) -> Result<usize> {
    let target = at.checked_add(u32_at(buffer, at)?).ok_or(OUTSIDE)?;
    // A length or a table starts with four bytes.
    bytes::<4>(buffer, target).map(|_| target)
}

/// The position of field `id` in a table's field map, in the form that the writing library expects.
pub const fn slot(id: usize) -> u16 {
    4 + 2 * id as u16
}

/// A table.
#[derive(Clone, Copy)]
pub struct Table<'a> {
    buffer: &'a [u8],
    at: usize,
    fields: usize,
    fields_length: usize,
}

impl<'a> Table<'a> {
    /// The root table of a buffer.
    pub fn root(buffer: &'a [u8]) -> Result<Table<'a>> {
        Table::new(buffer, follow(buffer, 0)?)
    }

    fn new(buffer: &'a [u8], at: usize) -> Result<Table<'a>> {
        let back = i64::from(i32::from_le_bytes(bytes(buffer, at)?));
        let fields = i64::try_from(at)
            .ok()
            .and_then(|at| at.checked_sub(back))
            .and_then(|fields| usize::try_from(fields).ok())
            .ok_or(OUTSIDE)?;
        let fields_length = u16_at(buffer, fields)?;
        if fields_length < 4
            || fields
                .checked_add(fields_length)
                .is_none_or(|end| end > buffer.len())
        {
            return Err(OUTSIDE);
        }
        Ok(Table {
            buffer,
            at,
            fields,
            fields_length,
        })
    }

    /// Offset of field `id`; `None` if the table lacks it.
    fn field(&self, id: usize) -> Result<Option<usize>> {
        let slot = 4 + 2 * id;
        if slot + 2 > self.fields_length {
            return Ok(None);
        }
        match u16_at(self.buffer, self.fields + slot)? {
            0 => Ok(None),
            offset => self.at.checked_add(offset).map(Some).ok_or(OUTSIDE),
        }
    }

    pub fn i64(&self, id: usize) -> Result<i64> {
        self.field(id)?
            .map_or(Ok(0), |at| Ok(i64::from_le_bytes(bytes(self.buffer, at)?)))
    }

    pub fn i32(&self, id: usize) -> Result<i32> {
        self.field(id)?
            .map_or(Ok(0), |at| Ok(i32::from_le_bytes(bytes(self.buffer, at)?)))
    }

    pub fn u32(&self, id: usize) -> Result<u32> {
        self.field(id)?
            .map_or(Ok(0), |at| Ok(u32::from_le_bytes(bytes(self.buffer, at)?)))
    }

    pub fn byte(&self, id: usize, default: u8) -> Result<u8> {
        self.field(id)?
            .map_or(Ok(default), |at| Ok(bytes::<1>(self.buffer, at)?[0]))
    }

    /// A string or a vector of bytes; empty if the field is absent.
    pub fn bytes(&self, id: usize) -> Result<&'a [u8]> {
        self.field(id)?
            .map_or(Ok(&[]), |at| byte_vector(self.buffer, follow(self.buffer, at)?))
    }

    pub fn table(&self, id: usize) -> Result<Option<Table<'a>>> {
        self.field(id)?
            .map(|at| Table::new(self.buffer, follow(self.buffer, at)?))
            .transpose()
    }

    /// A vector of tables or strings; empty if the field is absent.
    pub fn vector(&self, id: usize) -> Result<Vector<'a>> {
        let Some(at) = self.field(id)? else {
            return Ok(Vector {
                buffer: self.buffer,
                items: 0,
                length: 0,
            });
        };
        let at = follow(self.buffer, at)?;
        let length = u32_at(self.buffer, at)?;
        let items = at + 4;
        let end = length.checked_mul(4).and_then(|size| size.checked_add(items));
        if end.is_none_or(|end| end > self.buffer.len()) {
            return Err(OUTSIDE);
        }
        Ok(Vector {
            buffer: self.buffer,
            items,
            length,
        })
    }
}

fn byte_vector(buffer: &[u8], at: usize) -> Result<&[u8]> {
    let length = u32_at(buffer, at)?;
    let end = (at + 4).checked_add(length).ok_or(OUTSIDE)?;
    buffer.get(at + 4..end).ok_or(OUTSIDE)
}

/// A vector of offsets.
#[derive(Clone, Copy)]
pub struct Vector<'a> {
    buffer: &'a [u8],
    items: usize,
    length: usize,
}

impl<'a> Vector<'a> {
    pub fn len(&self) -> usize {
        self.length
    }

    pub fn tables(self) -> impl Iterator<Item = Result<Table<'a>>> {
        self.offsets().map(move |at| Table::new(self.buffer, at?))
    }

    pub fn strings(self) -> impl Iterator<Item = Result<&'a [u8]>> {
        self.offsets().map(move |at| byte_vector(self.buffer, at?))
    }

    fn offsets(self) -> impl Iterator<Item = Result<usize>> {
        (0..self.length).map(move |index| follow(self.buffer, self.items + 4 * index))
    }
}
