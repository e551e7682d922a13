//! Why a request failed: a problem document (RFC 9457).

use serde::{Deserialize, Serialize};

/// The media type of a [`Problem`].
pub const PROBLEM_TYPE: &str = "application/problem+json";
/// What [`Problem::type_uri`] begins with; the code follows.
pub const PROBLEM_URN: &str = "urn:thaw:problem:";

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Problem {
    /// `urn:thaw:problem:` and the code: the same for ever.
    #[serde(rename = "type")]
    pub type_uri: String,
    /// What the code means.
    pub title: String,
    /// The answer's HTTP status.
    pub status: u16,
    /// What happened this time.
    pub detail: String,
    /// The path that was asked for.
    pub instance: String,
    /// A stable name for programs, as docs/api.md and docs/exit-codes.md have it.
    pub code: String,
    /// What to do about it.
    pub remedy: String,
    /// What `thaw` exits with.
    pub exit: u8,
    /// Lines that explain it: the guest's console, the VMM's log.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub context: Vec<String>,
}
