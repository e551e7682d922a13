//! What happens when a timeout is over.

use serde::{Deserialize, Serialize};

/// What happens to a sandbox when a timeout of it is over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum OnTimeout {
    /// It is deleted.
    #[default]
    Delete,
    /// It is paused.
    Pause,
}

impl OnTimeout {
    /// Whether this is what happens if a request does not say.
    pub fn is_default(&self) -> bool {
        *self == OnTimeout::default()
    }
}
