//! Errors as problem documents (RFC 9457). Each code has one status.
//!
//! Codes are the slugs of [`ErrorKind`], and of [`ApiCode`] for errors that exist only over HTTP. Invariant: every answer with an error
//! status has such a document; [`write_problems`] writes it, because it knows the path of the request.

use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use thaw_protocol::api::{PROBLEM_TYPE, PROBLEM_URN, Problem};
use thaw_sandbox::error::{Error, ErrorKind};

use super::watch::Gone;
use crate::exit::{Exit, exit, line};

/// Seconds after which a refused caller may retry.
pub const RETRY_AFTER_S: u64 = 1;
/// The same for a thawd that is draining.
const RETRY_DRAINED_S: u64 = 30;

macro_rules! api_codes {
    ($($name:ident = $status:ident, $slug:literal, $title:literal, $remedy:literal;)*) => {
        /// Errors that exist only in requests.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum ApiCode { $(#[doc = $title] $name,)* }

        impl ApiCode {
            /// All of them.
            pub const ALL: &'static [ApiCode] = &[$(ApiCode::$name,)*];

            fn status(self) -> StatusCode { match self { $(ApiCode::$name => StatusCode::$status,)* } }

            /// A stable name for programs.
            pub fn slug(self) -> &'static str { match self { $(ApiCode::$name => $slug,)* } }

            fn title(self) -> &'static str { match self { $(ApiCode::$name => $title,)* } }

            fn remedy(self) -> &'static str { match self { $(ApiCode::$name => $remedy,)* } }
        }
    };
}

api_codes! {
    Malformed = BAD_REQUEST, "malformed-request", "the request cannot be read", "send JSON as /openapi.json has it";
    BadParameter = BAD_REQUEST, "bad-parameter", "a parameter in the path, the query or a header cannot be", "see /openapi.json for what each may be";
    Unauthenticated = UNAUTHORIZED, "unauthenticated", "the request is not authenticated", "send Authorization: Bearer TOKEN, or show a certificate";
    NotAllowed = FORBIDDEN, "not-allowed", "this caller may not use this thawd", "ask as root, or as the user thawd runs as";
    NoRole = FORBIDDEN, "no-role", "this certificate has no role on this node", "have this node's administrator put it into the file of roles, or send a token";
    RoleTooLow = FORBIDDEN, "role-too-low", "the caller's role does not allow this", "ask with a token or a certificate of the role that the detail names";
    NoSuchRoute = NOT_FOUND, "no-such-route", "nothing is served at this path", "see /openapi.json for what is";
    NoLogs = NOT_FOUND, "output-not-kept", "what this sandbox's container writes is not kept here", "ask who started it: output is kept of containers that the API or `thaw run -d` starts";
    NoFile = NOT_FOUND, "file-not-found", "there is no such file or directory in the container", "see what is there with a process of it";
    NoProcess = NOT_FOUND, "process-not-found", "there is no such process in the container", "see the list of processes: the last 64 that have ended are remembered";
    WrongMethod = METHOD_NOT_ALLOWED, "wrong-method", "this path does not take this method", "use one of those in the Allow header";
    TooSlow = REQUEST_TIMEOUT, "request-too-slow", "the body did not come in time", "send it at once";
    OneOnly = CONFLICT, "owns-one-sandbox", "this process owns one sandbox and makes no other", "ask thawd";
    Gone = GONE, "resource-version-gone", "changes after this version are not kept any more", "list again, and go on from the list's version";
    NotRunning = CONFLICT, "sandbox-not-running", "the sandbox is paused or has ended", "resume it, or use another";
    FileRefused = CONFLICT, "file-refused", "the file cannot be read or written as it is", "see the detail";
    ProcessRefused = CONFLICT, "process-refused", "the process does not take this", "see the detail";
    BodyTooLarge = PAYLOAD_TOO_LARGE, "body-too-large", "the body is larger than any request may be", "send less";
    WrongType = UNSUPPORTED_MEDIA_TYPE, "wrong-media-type", "the body is not said to be JSON", "send Content-Type: application/json";
    Invalid = UNPROCESSABLE_ENTITY, "invalid-body", "the body is JSON, but not what is asked for here", "see /openapi.json for its schema";
    NotAFile = UNPROCESSABLE_ENTITY, "not-a-file", "this is no regular file, or one that is too large", "name a file of at most 1 GiB";
    KeyReused = UNPROCESSABLE_ENTITY, "idempotency-key-reused", "this idempotency key came with another request before", "use a new key for each thing to make";
    UpgradeRequired = UPGRADE_REQUIRED, "upgrade-required", "this is to be a WebSocket handshake", "ask with a WebSocket client, or POST";
    TooMany = TOO_MANY_REQUESTS, "too-many-requests", "more is asked at once than is served", "ask again after the seconds Retry-After says";
    Draining = SERVICE_UNAVAILABLE, "draining", "this thawd makes no more sandboxes", "ask another node, or this one again once it makes sandboxes again";
    Broken = INTERNAL_SERVER_ERROR, "internal", "thawd failed at this", "see its log";
    NoRoom = INSUFFICIENT_STORAGE, "sandbox-full", "there is no room in the sandbox", "remove something there, or make one with more";
    Ending = SERVICE_UNAVAILABLE, "thawd-ending", "thawd ends", "ask the next one";
}

/// The error of a request.
#[derive(Debug)]
pub enum Refusal {
    /// An error that the CLI reports too.
    Failure(Error),
    /// An error that only requests have, with details.
    Api(ApiCode, String),
}

impl Refusal {
    /// An error that only requests have.
    pub fn new(code: ApiCode, detail: impl std::fmt::Display) -> Refusal {
        Refusal::Api(code, detail.to_string())
    }

    /// The same for a field within another, whose name it begins with.
    pub fn within(self, outer: &str) -> Refusal {
        match self {
            Refusal::Api(code, detail) => Refusal::Api(code, format!("{outer}{detail}")),
            failure => failure,
        }
    }

    /// The stable name of its code.
    pub fn slug(&self) -> &'static str {
        match self {
            Refusal::Failure(failure) => failure.kind.slug(),
            Refusal::Api(code, _) => code.slug(),
        }
    }

    fn problem(self) -> Problem {
        let (code, title, detail, remedy, status, exit, context) = match self {
            Refusal::Api(code, detail) => {
                let remedy = code.remedy().to_owned();
                let exit = exit(ErrorKind::Runtime).number;
                (
                    code.slug(),
                    code.title(),
                    detail,
                    remedy,
                    code.status(),
                    exit,
                    Vec::new(),
                )
            }
            Refusal::Failure(failure) => {
                let kind = failure.kind;
                let Exit {
                    number,
                    meaning,
                    remedy,
                } = exit(kind);
                (
                    kind.slug(),
                    meaning,
                    failure.what,
                    failure.remedy.unwrap_or_else(|| remedy.to_owned()),
                    status(kind),
                    number,
                    failure.context,
                )
            }
        };
        Problem {
            type_uri: format!("{PROBLEM_URN}{code}"),
            title: title.into(),
            status: status.as_u16(),
            detail,
            instance: String::new(),
            code: code.into(),
            remedy,
            exit,
            context,
        }
    }

    /// Its document within a stream, with the path of the request.
    pub fn in_stream(self, instance: String) -> Problem {
        Problem {
            instance,
            ..self.problem()
        }
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Refusal::Failure(failure) => f.write_str(&line(failure)),
            Refusal::Api(code, detail) => write!(f, "{}: {detail}", code.title()),
        }
    }
}

impl From<Error> for Refusal {
    fn from(failure: Error) -> Refusal {
        Refusal::Failure(failure)
    }
}

impl From<Gone> for Refusal {
    fn from(gone: Gone) -> Refusal {
        Refusal::new(ApiCode::Gone, gone)
    }
}

/// The status of each kind of error.
fn status(kind: ErrorKind) -> StatusCode {
    use ErrorKind as E;
    match kind {
        E::SandboxNotFound | E::ImageNotFound | E::ImageNotStored | E::SnapshotNotFound => {
            StatusCode::NOT_FOUND
        }
        E::NameInUse
        | E::ImageInUse
        | E::SnapshotInUse
        | E::PortUnavailable
        | E::Shared
        | E::VmmTooOld
        | E::SnapshotDelta
        | E::MemoryReleased
        | E::SandboxClaimed
        | E::HookMissing
        | E::MemoryKept => StatusCode::CONFLICT,
        E::BadReference => StatusCode::BAD_REQUEST,
        E::DiskFull | E::DiskBudget => StatusCode::INSUFFICIENT_STORAGE,
        E::TenantQuota | E::CreationRate => StatusCode::TOO_MANY_REQUESTS,
        E::LimitsUnavailable | E::JailIncomplete | E::NodeCapacity => StatusCode::SERVICE_UNAVAILABLE,
        E::RegistryUnreachable | E::RegistryDenied | E::RegistryRateLimited | E::RegistryFailed => {
            StatusCode::BAD_GATEWAY
        }
        E::DigestMismatch
        | E::LayerTruncated
        | E::UnknownMediaType
        | E::WrongArchitecture
        | E::UnsafePath
        | E::ImageMalformed
        | E::MemoryTooSmall
        | E::NotFound
        | E::NotExecutable
        | E::NotReady
        | E::HookFailed
        | E::SnapshotDamaged
        | E::SnapshotIncompatible
        | E::SnapshotSignature
        | E::NotASnapshot
        | E::SnapshotMalformed
        | E::PushRefused
        | E::VolumeUnavailable => StatusCode::UNPROCESSABLE_ENTITY,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// A problem before [`write_problems`] adds the path of the request.
#[derive(Clone, Debug)]
struct WithoutPath(Problem);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let unknown = matches!(self, Refusal::Api(ApiCode::Unauthenticated, _));
        let retry = match &self {
            Refusal::Failure(failure) => failure.retry_after_s,
            Refusal::Api(ApiCode::TooMany, _) => Some(RETRY_AFTER_S),
            Refusal::Api(ApiCode::Draining, _) => Some(RETRY_DRAINED_S),
            _ => None,
        };
        let problem = self.problem();
        let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = status.into_response();
        if let Some(seconds) = retry {
            let seconds = HeaderValue::from(seconds);
            response.headers_mut().insert(header::RETRY_AFTER, seconds);
        }
        if unknown {
            let bearer = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, bearer);
        }
        response.extensions_mut().insert(WithoutPath(problem));
        response
    }
}

/// Whether an answer is an error of this kind, whose document is not written yet.
pub(crate) fn is(response: &Response, kind: ErrorKind) -> bool {
    let problem = response.extensions().get::<WithoutPath>();
    problem.is_some_and(|WithoutPath(problem)| problem.code == kind.slug())
}

/// Takes the document of an error out of an answer, for a server that writes errors in another form. `instance` is empty.
pub(crate) fn take(response: &mut Response) -> Option<Problem> {
    let taken = response.extensions_mut().remove::<WithoutPath>();
    taken.map(|WithoutPath(problem)| problem)
}

/// Writes the documents of errors that handlers and inner layers returned.
pub async fn write_problems(request: Request, next: Next) -> Response {
    let instance = request.uri().path().to_owned();
    let mut response = next.run(request).await;
    if let Some(problem) = take(&mut response) {
        let problem = Problem { instance, ..problem };
        let body = serde_json::to_vec(&problem).unwrap_or_default();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(PROBLEM_TYPE));
        headers.remove(header::CONTENT_LENGTH);
        *response.body_mut() = body.into();
    }
    response
}

/// The answer for a path without a route.
pub async fn no_such_route(request: Request) -> Refusal {
    Refusal::new(
        ApiCode::NoSuchRoute,
        format!("nothing is at {}", request.uri().path()),
    )
}

/// The answer for a route without this method.
pub async fn wrong_method(request: Request) -> Refusal {
    let what = format!("{} does not take {}", request.uri().path(), request.method());
    Refusal::new(ApiCode::WrongMethod, what)
}
