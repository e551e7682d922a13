//! An input read as a script: numbers and runs of bytes, as long as there are any.

/// What is left of it.
pub struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    pub fn new(input: &'a [u8]) -> Script<'a> {
        Script(input)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// At most so many bytes.
    pub fn bytes(&mut self, length: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    /// As many bytes as the next one says.
    pub fn run(&mut self) -> &'a [u8] {
        let length = self.byte();
        self.bytes(length.into())
    }

    /// The next byte; 0 where there is none, as for every number.
    pub fn byte(&mut self) -> u8 {
        self.number::<1>() as u8
    }

    pub fn word(&mut self) -> u16 {
        self.number::<2>() as u16
    }

    pub fn long(&mut self) -> u32 {
        self.number::<4>() as u32
    }

    pub fn quad(&mut self) -> u64 {
        self.number::<8>()
    }

    fn number<const N: usize>(&mut self) -> u64 {
        let bytes = self.bytes(N);
        bytes
            .iter()
            .rev()
            .fold(0, |number, byte| number << 8 | u64::from(*byte))
    }
}
