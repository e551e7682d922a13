//! What the Connect protocol has on the wire besides messages: error codes, the last message of a stream, and the frames of a stream.
//!
//! Specification: <https://connectrpc.com/docs/protocol>.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub mod envelope;

macro_rules! codes {
    ($($name:ident = $text:literal, $status:literal;)*) => {
        /// Why a call failed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub enum Code {
            $(#[doc = $text] #[serde(rename = $text)] $name,)*
        }

        impl Code {
            /// All of them.
            pub const ALL: &'static [Code] = &[$(Code::$name,)*];

            /// Its name on the wire.
            pub fn name(self) -> &'static str { match self { $(Code::$name => $text,)* } }

            /// The HTTP status of a unary call that fails with it.
            pub fn status(self) -> u16 { match self { $(Code::$name => $status,)* } }
        }
    };
}

codes! {
    Canceled = "canceled", 499;
    Unknown = "unknown", 500;
    InvalidArgument = "invalid_argument", 400;
    DeadlineExceeded = "deadline_exceeded", 504;
    NotFound = "not_found", 404;
    AlreadyExists = "already_exists", 409;
    PermissionDenied = "permission_denied", 403;
    ResourceExhausted = "resource_exhausted", 429;
    FailedPrecondition = "failed_precondition", 400;
    Aborted = "aborted", 409;
    OutOfRange = "out_of_range", 400;
    Unimplemented = "unimplemented", 501;
    Internal = "internal", 500;
    Unavailable = "unavailable", 503;
    DataLoss = "data_loss", 500;
    Unauthenticated = "unauthenticated", 401;
}

/// An error: the body of a failed unary call, and a part of [`EndOfStream`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    pub code: Code,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// The last message of a stream. It is JSON, whatever the codec of the others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndOfStream {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorBody>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, Vec<String>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_their_names_in_json() {
        for code in Code::ALL {
            let text = serde_json::to_string(code).unwrap();
            assert_eq!(text, format!("\"{}\"", code.name()));
            assert!((400..600).contains(&code.status()));
        }
        assert_eq!(
            serde_json::to_string(&EndOfStream::default()).unwrap(),
            "{}",
            "the end of a stream without an error"
        );
    }
}
