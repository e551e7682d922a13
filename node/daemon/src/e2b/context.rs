//! What the processes of a template's sandboxes start with: the results of its steps ENV, WORKDIR and USER.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Most bytes of a template's variables: each of its sandboxes has a copy in its record.
pub const MAX_BYTES: usize = 32 << 10;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Context {
    pub env: BTreeMap<String, String>,
    /// An absolute path. `None`: that of the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// `USER[:GROUP]`, names or numbers. `None`: that of the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

impl Context {
    /// Whether it changes nothing.
    pub fn is_default(&self) -> bool {
        *self == Context::default()
    }

    /// The bytes of its variables.
    pub fn size(&self) -> usize {
        size(&self.env)
    }
}

/// The bytes of names and values together.
pub fn size(texts: &BTreeMap<String, String>) -> usize {
    texts.iter().map(|(name, value)| name.len() + value.len()).sum()
}

/// Variables as `NAME=VALUE`.
pub fn assignments(env: &BTreeMap<String, String>) -> Vec<String> {
    let variables = env.iter();
    variables.map(|(name, value)| format!("{name}={value}")).collect()
}
