//! Errors as E2B's SDKs read them: a status, and `{"code": STATUS, "message": TEXT}`.
//!
//! An SDK makes its own exceptions of the statuses 401, 404, 409, 429 and 503. The Python SDK repeats a request that got 429, 502, 503 or 504,
//! the JavaScript SDK one that got 429 with Retry-After. So a status that means something else in thawd's API is replaced ([`status_of`]).

use axum::Json;
use axum::http::StatusCode;
use axum::http::header::{ALLOW, RETRY_AFTER};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use thaw_protocol::api::Problem;
use thaw_sandbox::error::Error;

use crate::api::problem::{self, Refusal};

/// Why a request failed.
#[derive(Debug)]
pub enum Failure {
    /// The request says something that cannot be.
    Bad(String),
    /// The request says that a node passed it on, and none did.
    Forbidden(String),
    /// The sandbox or the template does not exist for this caller.
    NotFound(String),
    /// The sandbox is in another state than the request needs.
    Conflict(String),
    /// This part of E2B's API is not implemented.
    Unsupported(String),
    /// The request is for a port of a sandbox, or for a node, that cannot be reached.
    Unreachable(String),
    /// The connection to another node broke, and the node may have done what the request says. The request can be repeated.
    Broken(String),
    /// The same of a request that creates something each time.
    Uncertain(String),
    /// Another error of thawd's API.
    Refused(Refusal),
}

impl Failure {
    /// The error for a feature of E2B that a request asks for and that is not implemented.
    pub fn unsupported(what: &str) -> Failure {
        Failure::Unsupported(format!("{what} is not supported by this node: leave it out"))
    }

    /// The error for a sandbox that does not exist for the caller.
    pub fn no_sandbox(id: &str) -> Failure {
        Failure::NotFound(format!("sandbox {id} was not found"))
    }

    /// The same for a request that creates something each time, so that SDKs do not repeat it.
    pub fn of_creation(self) -> Failure {
        match self {
            Failure::Broken(why) => Failure::Uncertain(format!("{why}: what the request creates may exist")),
            other => other,
        }
    }

    /// Why, in words.
    pub fn why(&self) -> String {
        match self {
            Failure::Refused(refusal) => refusal.to_string(),
            other => other.plain().map_or_else(String::new, |(_, why)| why.to_owned()),
        }
    }

    /// Its status and its message, if thawd's API has no document of it.
    fn plain(&self) -> Option<(StatusCode, &str)> {
        Some(match self {
            Failure::Bad(why) => (StatusCode::BAD_REQUEST, why.as_str()),
            Failure::Forbidden(why) => (StatusCode::FORBIDDEN, why.as_str()),
            Failure::NotFound(why) => (StatusCode::NOT_FOUND, why.as_str()),
            Failure::Conflict(why) => (StatusCode::CONFLICT, why.as_str()),
            Failure::Unsupported(why) => (StatusCode::NOT_IMPLEMENTED, why.as_str()),
            Failure::Unreachable(why) | Failure::Broken(why) => (StatusCode::BAD_GATEWAY, why.as_str()),
            Failure::Uncertain(why) => (StatusCode::INTERNAL_SERVER_ERROR, why.as_str()),
            Failure::Refused(_) => return None,
        })
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Failure {
        Failure::Refused(refusal)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Refused(error.into())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        if let Some((status, message)) = self.plain() {
            return answer(status, message, None);
        }
        match self {
            Failure::Refused(refusal) => refusal.into_response(),
            _ => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    }
}

/// The body of an error.
#[derive(Debug, Serialize)]
struct Body<'a> {
    code: u16,
    message: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error_code: Option<&'static str>,
}

fn answer(status: StatusCode, message: &str, error_code: Option<&'static str>) -> Response {
    let code = status.as_u16();
    let body = Body {
        code,
        message,
        error_code,
    };
    (status, Json(body)).into_response()
}

/// Writes an error that a handler or a layer returned as a document of thawd's API.
pub fn write_error(mut response: Response) -> Response {
    let Some(problem) = problem::take(&mut response) else {
        return response;
    };
    let (status, error_code) = status_of(&problem);
    let message = match status.as_u16() {
        401 => "X-API-Key is no token of this node: set E2B_API_KEY to one of its file of tokens".to_owned(),
        // What to do about other errors of a caller is in the detail, or is meant for users of the command line.
        429 | 500.. => format!("{}: {}", problem.detail, problem.remedy),
        _ => problem.detail,
    };
    let mut written = answer(status, &message, error_code);
    if let Some(seconds) = response.headers_mut().remove(RETRY_AFTER) {
        written.headers_mut().insert(RETRY_AFTER, seconds);
    }
    if let Some(methods) = response.headers_mut().remove(ALLOW) {
        written.headers_mut().insert(ALLOW, methods);
    }
    written
}

/// The status of an error, and E2B's name for the error if it has one.
fn status_of(problem: &Problem) -> (StatusCode, Option<&'static str>) {
    match (problem.status, problem.code.as_str()) {
        (_, "idempotency-key-reused") => (
            StatusCode::UNPROCESSABLE_ENTITY,
            Some("idempotency_request_mismatch"),
        ),
        (_, "invalid-body") => (StatusCode::BAD_REQUEST, None),
        (_, "sandbox-claimed") => (StatusCode::NOT_FOUND, None),
        // 502 means that a sandbox is gone.
        (502, _) => (StatusCode::INTERNAL_SERVER_ERROR, Some("sandbox_create_failed")),
        (507, _) => (
            StatusCode::SERVICE_UNAVAILABLE,
            Some("sandbox_capacity_unavailable"),
        ),
        (status, _) => {
            let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            (status, None)
        }
    }
}
