//! The sandbox that a request is for.

use crate::api::scope::Wanted;

/// The sandbox that a request names. An extension of the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForSandbox {
    pub wanted: Wanted,
}
