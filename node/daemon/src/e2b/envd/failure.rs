//! Errors, as clients of the protocol understand them.
//!
//! Clients choose their exception by the code of a Connect error, or by the HTTP status of anything else. A sandbox that does not run has an
//! answer of its own, which E2B's proxy gives in envd's place.

use std::fmt::Display;

use axum::Json;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use thaw_protocol::connect::{Code, ErrorBody};
use thaw_sandbox::error::{Error, ErrorKind};

use crate::api::problem::{ApiCode, Refusal};

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub code: Code,
    pub message: String,
    /// The status over plain HTTP, if it is not that of the code.
    status: Option<StatusCode>,
}

impl Failure {
    pub fn new(code: Code, message: impl Display) -> Failure {
        Failure {
            code,
            message: message.to_string(),
            status: None,
        }
    }

    /// The caller asks for something that cannot be.
    pub fn invalid(message: impl Display) -> Failure {
        Failure::new(Code::InvalidArgument, message)
    }

    /// The call took longer than its caller allows.
    pub fn late() -> Failure {
        Failure::new(
            Code::DeadlineExceeded,
            "the call took longer than its Connect-Timeout-Ms",
        )
    }

    /// thawd shuts down during a stream.
    pub fn ending() -> Failure {
        Failure::new(
            Code::Unavailable,
            "thawd ends the stream because it shuts down; connect again",
        )
    }

    /// The sandbox is not there, or does not run. Clients know it by these words.
    pub fn not_running(sandbox: &str, why: impl Display) -> Failure {
        let what = format!("The sandbox was not found: {sandbox} does not run here ({why})");
        Failure::new(Code::Unavailable, what).with_status(StatusCode::BAD_GATEWAY)
    }

    fn with_status(self, status: StatusCode) -> Failure {
        Failure {
            status: Some(status),
            ..self
        }
    }

    /// The status over plain HTTP.
    pub fn status(&self) -> StatusCode {
        let of_code = StatusCode::from_u16(self.code.status());
        self.status
            .unwrap_or(of_code.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR))
    }

    /// The body of a Connect error.
    pub fn into_body(self) -> ErrorBody {
        ErrorBody {
            code: self.code,
            message: self.message,
        }
    }

    /// The answer to a request that is not a Connect call. A number as code makes clients of Connect use it as the HTTP status.
    pub fn into_plain(self) -> Response {
        let status = self.status();
        let body = json!({"code": status.as_u16(), "message": self.message});
        (status, Json(body)).into_response()
    }
}

/// The error of a unary Connect call.
impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        (self.status(), Json(self.into_body())).into_response()
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Failure {
        let code = match &refusal {
            Refusal::Failure(error) => of_kind(error.kind),
            Refusal::Api(code, _) => of_api(*code),
        };
        let failure = match refusal {
            Refusal::Failure(Error { what, remedy, .. }) => {
                let remedy = remedy.map(|remedy| format!("; {remedy}")).unwrap_or_default();
                Failure::new(code, format!("{what}{remedy}"))
            }
            Refusal::Api(ApiCode::NoRoom, _) => {
                return Failure::new(code, refusal).with_status(StatusCode::INSUFFICIENT_STORAGE);
            }
            Refusal::Api(ApiCode::BodyTooLarge, _) => {
                return Failure::new(code, refusal).with_status(StatusCode::PAYLOAD_TOO_LARGE);
            }
            refusal => Failure::new(code, refusal),
        };
        match code {
            Code::Unavailable => failure.with_status(StatusCode::BAD_GATEWAY),
            _ => failure,
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Refusal::from(error).into()
    }
}

fn of_api(code: ApiCode) -> Code {
    use ApiCode as A;
    match code {
        A::NoFile | A::NoProcess => Code::NotFound,
        A::Malformed | A::BadParameter | A::Invalid | A::NotAFile | A::WrongType => Code::InvalidArgument,
        // Clients take resource_exhausted for a rate limit, which waiting ends.
        A::FileRefused | A::ProcessRefused | A::NoRoom => Code::FailedPrecondition,
        A::BodyTooLarge => Code::OutOfRange,
        A::TooMany => Code::ResourceExhausted,
        A::TooSlow => Code::DeadlineExceeded,
        A::NotRunning | A::Ending | A::Draining => Code::Unavailable,
        A::Unauthenticated => Code::Unauthenticated,
        A::NotAllowed | A::NoRole | A::RoleTooLow => Code::PermissionDenied,
        A::NoSuchRoute | A::WrongMethod => Code::Unimplemented,
        _ => Code::Internal,
    }
}

fn of_kind(kind: ErrorKind) -> Code {
    match kind {
        ErrorKind::SandboxNotFound | ErrorKind::GuestEnded => Code::Unavailable,
        // Of a command: clients take not_found for a process or a file.
        ErrorKind::NotFound | ErrorKind::NotExecutable => Code::InvalidArgument,
        _ => Code::Internal,
    }
}

/// The answer for a path without a route.
pub async fn no_such_route(request: Request) -> Response {
    let what = format!("nothing is served at {}", request.uri().path());
    let failure = Failure::new(Code::Unimplemented, what);
    failure.with_status(StatusCode::NOT_FOUND).into_plain()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_become_codes_that_clients_know() {
        let api = |code| Failure::from(Refusal::new(code, "x"));
        for (code, expected, status) in [
            (ApiCode::NoFile, Code::NotFound, 404),
            (ApiCode::NoProcess, Code::NotFound, 404),
            (ApiCode::NotAFile, Code::InvalidArgument, 400),
            (ApiCode::FileRefused, Code::FailedPrecondition, 400),
            (ApiCode::NoRoom, Code::FailedPrecondition, 507),
            (ApiCode::BodyTooLarge, Code::OutOfRange, 413),
            (ApiCode::NotRunning, Code::Unavailable, 502),
            (ApiCode::TooMany, Code::ResourceExhausted, 429),
        ] {
            let failure = api(code);
            assert_eq!(
                (failure.code, failure.status().as_u16()),
                (expected, status),
                "{code:?}"
            );
            assert!(failure.message.contains('x'));
        }
        let kind = |kind| Failure::from(Error::new(kind, "x")).code;
        assert_eq!(kind(ErrorKind::NotFound), Code::InvalidArgument);
        assert_eq!(kind(ErrorKind::GuestEnded), Code::Unavailable);
        assert_eq!(kind(ErrorKind::AgentFailed), Code::Internal);
        let absent = Failure::not_running("x", "it is paused");
        assert!(absent.message.contains("was not found") && absent.status() == StatusCode::BAD_GATEWAY);
    }
}
