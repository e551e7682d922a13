//! Ids of containers and sandboxes.

use crate::error::{Error, Result};

/// Refuses an invalid id: paths are made of ids.
pub fn check_id(id: &str) -> Result<()> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let good = (1..=128).contains(&id.len()) && id.chars().all(fits) && !id.starts_with('.');
    match good {
        true => Ok(()),
        false => Err(Error::Invalid(format!("{id:?} is not a valid container id"))),
    }
}
