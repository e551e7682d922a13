//! Making a template: once, however many ask at once.
//!
//! The machine itself is booted and frozen by [`crate::sandbox::cold::freeze_template`]; here is what is around it: the
//! lock, the directory, the hashes, the signature.

use std::fs::File;
use std::sync::Arc;

use super::{Key, Shape};
use crate::exit::Failure;
use crate::sandbox::Node;
use crate::snapshot::Registered;

/// All that decides what a template becomes, but for the files of [`crate::paths::Paths`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipe {
    pub shape: Shape,
    /// Of the guest kernel.
    pub command_line: String,
}

/// Where [`crate::sandbox::cold::freeze_template`] has the VMM write: empty files, open for reading and writing.
#[derive(Debug)]
pub struct FrozenInto {
    pub state: File,
    pub memory: File,
}

/// How far a build is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Another process builds the same template; it is waited for.
    Waiting,
    /// A guest boots.
    Booting,
    /// Its agent has rung: memory and state are written.
    Freezing,
    /// What was written is hashed.
    Hashing,
    /// The template is there.
    Ready,
}

/// Who is told how far a build is.
pub type Progress = Arc<dyn Fn(Step) + Send + Sync>;

/// A template ready to be thawed.
#[derive(Clone, Debug)]
pub struct Template {
    pub key: Key,
    pub registered: Arc<Registered>,
    /// It was not there and had to be built.
    pub built: bool,
}
