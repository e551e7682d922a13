//! `--memory-mode` and `THAW_MEMORY_MODE`: how a thawed guest gets its memory.

use thaw_protocol::control::MemoryMode;
use thaw_sandbox::error::{Error, ErrorKind};

/// The environment variable that sets the memory mode if no flag does.
const MEMORY_MODE: &str = "THAW_MEMORY_MODE";

/// The mode of the flag, else of the environment.
pub(super) fn memory_mode(flag: Option<MemoryMode>) -> Result<MemoryMode, Error> {
    match (flag, std::env::var(MEMORY_MODE)) {
        (Some(mode), _) => Ok(mode),
        (None, Ok(text)) if !text.is_empty() => parse_memory_mode(&text)
            .map_err(|e| Error::new(ErrorKind::Runtime, format!("{MEMORY_MODE}={text}: {e}"))),
        (None, _) => Ok(MemoryMode::default()),
    }
}

/// A memory mode by its name.
pub(super) fn parse_memory_mode(text: &str) -> Result<MemoryMode, String> {
    match text {
        "cow" => Ok(MemoryMode::Cow),
        "populate" => Ok(MemoryMode::Populate),
        "uffd" => Ok(MemoryMode::Uffd),
        _ => Err("one of cow, populate, uffd".into()),
    }
}
