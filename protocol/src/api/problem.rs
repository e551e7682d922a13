//! Why a request failed: a problem document (RFC 9457).

use serde::{Deserialize, Serialize};

/// The media type of a [`Problem`].
pub const PROBLEM_TYPE: &str = "application/problem+json";
/// The prefix of [`Problem::type_uri`]; the code follows.
pub const PROBLEM_URN: &str = "urn:thaw:problem:";

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Problem {
    /// `urn:thaw:problem:` and the code. It never changes.
    #[serde(rename = "type")]
    pub type_uri: String,
    /// The meaning of the code.
    pub title: String,
    /// The HTTP status of the response.
    pub status: u16,
    /// What happened in this case.
    pub detail: String,
    /// The path of the request.
    pub instance: String,
    /// A stable code for programs, listed in docs/api.md and docs/exit-codes.md.
    pub code: String,
    /// How to fix it.
    pub remedy: String,
    /// The exit code of `thaw` for this problem.
    pub exit: u8,
    /// Explanatory lines from the guest's console or the VMM's log.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub context: Vec<String>,
}
