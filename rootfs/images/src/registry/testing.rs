//! A network without sockets: a handler answers requests, in the test's own time.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream;
use reqwest::header::{CONTENT_LENGTH, CONTENT_RANGE, HeaderName, HeaderValue, LOCATION, RANGE};
use reqwest::{Body, Request, Response};

use super::account::RegistryAccount;
use super::auth::{Credentials, Login};
use super::wire::{Failure, Wire};

/// A scripted answer.
pub struct Reply {
    after: Duration,
    status: u16,
    headers: Vec<(HeaderName, String)>,
    /// Each after a pause.
    pieces: Vec<(Duration, Bytes)>,
    broken: bool,
    failure: Option<Failure>,
}

impl Reply {
    pub fn status(status: u16) -> Self {
        Self {
            after: Duration::from_millis(1),
            status,
            headers: Vec::new(),
            pieces: Vec::new(),
            broken: false,
            failure: None,
        }
    }

    /// No answer, ever.
    pub fn silence() -> Self {
        Self {
            after: Duration::from_secs(86_400),
            ..Self::status(200)
        }
    }

    pub fn refused() -> Self {
        Self {
            failure: Some(Failure {
                may_pass: true,
                ..Failure::lasting("connection refused")
            }),
            ..Self::status(200)
        }
    }

    pub fn redirect(location: &str) -> Self {
        Self::status(307).header(LOCATION, location)
    }

    /// The range that a request asks for.
    pub fn range(request: &Request, blob: &[u8]) -> Self {
        let (first, last) = wanted(request);
        Self::status(206)
            .header(CONTENT_RANGE, format!("bytes {first}-{last}/{}", blob.len()))
            .body(&blob[first..=last])
    }

    /// Everything from the start of the requested range.
    pub fn range_from(request: &Request, blob: &[u8]) -> Self {
        let range = request.headers()[RANGE].to_str().unwrap();
        let first: usize = range
            .strip_prefix("bytes=")
            .unwrap()
            .trim_end_matches('-')
            .parse()
            .unwrap();
        Self::status(206)
            .header(
                CONTENT_RANGE,
                format!("bytes {first}-{}/{}", blob.len() - 1, blob.len()),
            )
            .body(&blob[first..])
    }

    pub fn header(mut self, name: HeaderName, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    pub fn body(mut self, body: &[u8]) -> Self {
        self.headers.push((CONTENT_LENGTH, body.len().to_string()));
        self.pieces = vec![(Duration::ZERO, Bytes::copy_from_slice(body))];
        self
    }

    /// Sends the body so slowly.
    pub fn trickle(mut self, piece: usize, pause: Duration) -> Self {
        let body: Vec<u8> = self.pieces.iter().flat_map(|(_, it)| it.to_vec()).collect();
        let pieces = body.chunks(piece);
        self.pieces = pieces.map(|it| (pause, Bytes::copy_from_slice(it))).collect();
        self
    }

    /// Breaks off after this number of bytes of the body.
    pub fn cut(mut self, bytes: usize) -> Self {
        let body: Vec<u8> = self.pieces.iter().flat_map(|(_, it)| it.to_vec()).collect();
        self.pieces = vec![(Duration::ZERO, Bytes::copy_from_slice(&body[..bytes]))];
        self.broken = true;
        self
    }

    pub fn after(mut self, after: Duration) -> Self {
        self.after = after;
        self
    }
}

/// First and last byte of the requested range.
pub fn wanted(request: &Request) -> (usize, usize) {
    let range = request.headers()[RANGE].to_str().unwrap();
    let (first, last) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
    (first.parse().unwrap(), last.parse().unwrap())
}

/// The URL and the headers of a request that was sent.
#[derive(Clone, Debug)]
pub struct Seen {
    pub url: String,
    pub headers: reqwest::header::HeaderMap,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        Some(self.headers.get(name)?.to_str().unwrap())
    }
}

type Handler = Box<dyn Fn(&Request) -> Reply + Send + Sync>;

pub struct Network {
    handler: Handler,
    pub seen: Mutex<Vec<Seen>>,
}

impl Network {
    pub fn new(handler: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self {
            handler: Box::new(handler),
            seen: Mutex::default(),
        })
    }

    /// The requests to a host.
    pub fn to(&self, host: &str) -> Vec<Seen> {
        let seen = self.seen.lock().unwrap();
        seen.iter()
            .filter(|it| it.url.contains(&format!("//{host}")))
            .cloned()
            .collect()
    }
}

impl Wire for Network {
    fn send(&self, request: Request) -> BoxFuture<'_, Result<Response, Failure>> {
        self.seen.lock().unwrap().push(Seen {
            url: request.url().to_string(),
            headers: request.headers().clone(),
        });
        let reply = (self.handler)(&request);
        Box::pin(async move {
            tokio::time::sleep(reply.after).await;
            if let Some(failure) = reply.failure {
                return Err(failure);
            }
            let mut response = http::Response::builder().status(reply.status);
            for (name, value) in &reply.headers {
                response = response.header(name, HeaderValue::from_str(value).unwrap());
            }
            let end = reply.broken.then(|| (Duration::ZERO, None));
            let pieces = reply
                .pieces
                .into_iter()
                .map(|(pause, piece)| (pause, Some(piece)));
            let pieces: Vec<_> = pieces.chain(end).collect();
            let body = stream::unfold(pieces.into_iter(), |mut pieces| async move {
                let (pause, piece) = pieces.next()?;
                tokio::time::sleep(pause).await;
                let piece = piece.ok_or_else(|| std::io::Error::other("connection reset"));
                Some((piece, pieces))
            });
            Ok(response.body(Body::wrap_stream(body)).unwrap().into())
        })
    }
}

/// An anonymous client of `registry.example`.
pub(crate) fn anonymous() -> RegistryAccount {
    RegistryAccount {
        name: "registry.example".into(),
        registry: "registry.example".into(),
        base: "https://registry.example".into(),
        plain: false,
        credentials: Credentials::Anonymous,
        login: Login::Anonymous,
        scope: "repository:app:pull".into(),
    }
}
