//! Pushing to a registry.
//!
//! A blob is sent in one request, which every registry accepts. If that breaks off, it is sent in chunks, continued
//! from the offset that the registry reports.

use std::sync::Arc;
use std::time::Duration;

use reqwest::header::{
    CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, LOCATION, RANGE,
};
use reqwest::{Method, StatusCode, Url};
use thaw_imagefs::digest::Digest;
use tokio::time::{Instant, sleep_until, timeout};

use crate::error::Error;
use crate::progress::Progress;
use crate::reference::RegistryRef;
use crate::registry::connection::Unanswered;
use crate::registry::refusal::{passing, refusal};
use crate::registry::repository::Repository;
use crate::registry::request::{Payload, Request};
use crate::registry::retries::Retries;
use crate::registry::wire::{Failure, Sent, drain};
use crate::registry::{Retry, Rights};
use crate::source::SourceOptions;

use super::content::Content;
use super::{Document, fallback_tag, with_manifest};

/// Tests hash without optimisation: they get by with less.
const CHUNK: u64 = if cfg!(test) { 1 << 16 } else { 16 << 20 };
/// The largest chunk that is sent, even if a registry requests larger ones.
const MAX_CHUNK: u64 = 1 << 30;
/// Time limit of a request with a small body.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit for the network to accept a piece, or for the registry to answer after the last one: some registries hash the whole only
/// then.
const STALL: Duration = Duration::from_secs(300);
/// Rounds of reading and writing the index of referrers, if other clients write it too.
const FALLBACK_ROUNDS: u32 = 4;

const OCI_SUBJECT: HeaderName = HeaderName::from_static("oci-subject");
const CHUNK_MIN_LENGTH: HeaderName = HeaderName::from_static("oci-chunk-min-length");
const CONTENT_DIGEST: HeaderName = HeaderName::from_static("docker-content-digest");
const OCTETS: HeaderValue = HeaderValue::from_static("application/octet-stream");

pub struct Remote {
    registry: Repository,
    retry: Retry,
}

/// Where an upload has got to.
struct Session {
    /// Where the next request goes.
    place: Url,
    /// Chunks smaller than this are not taken.
    chunk: u64,
}

/// Why an upload in one request was not taken.
pub(super) enum Broken {
    /// Chunks may do better.
    Perhaps(Error),
    Final(Error),
}

impl Remote {
    pub async fn open(
        reference: RegistryRef,
        options: &SourceOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<Self, Error> {
        Ok(Self {
            registry: options
                .client()?
                .repository(&reference, &options.registry(), Rights::Push, progress)
                .await?,
            retry: options.retry,
        })
    }

    /// Like [`crate::registry::connection::Connection::ask`], for a request that takes little time.
    async fn ask(&self, request: &Request<'_>) -> Result<Sent, Error> {
        let connection = &self.registry.connection;
        timeout(REQUEST_TIMEOUT, connection.ask(request))
            .await
            .unwrap_or_else(|_| {
                let seconds = REQUEST_TIMEOUT.as_secs();
                Err(connection.unreachable(&Failure::timeout(format!("no answer within {seconds} seconds"))))
            })
    }

    pub async fn blob_exists(&self, digest: &Digest) -> Result<Option<u64>, Error> {
        let url = format!("{}/blobs/{digest}", self.registry.base);
        let what = format!("blob {digest}");
        let request = Request {
            method: Method::HEAD,
            ..Request::get(&url, &what)
        };
        match self.ask(&request).await {
            Ok(sent) => Ok(Some(
                header(sent.response.headers(), &CONTENT_LENGTH)
                    .and_then(|it| it.parse().ok())
                    .unwrap_or(0),
            )),
            Err(Error::RegistryNotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub async fn mount(&self, digest: &Digest, from: &str) -> Result<bool, Error> {
        let what = format!("blob {digest} from {from}");
        let url = format!("{}/blobs/uploads/", self.registry.base);
        let query = [("mount", digest.to_string()), ("from", from.to_owned())];
        let url = Url::parse_with_params(&url, &query).map_err(|error| Error::malformed(&url, error))?;
        let request = Request {
            method: Method::POST,
            ..Request::get(url.as_str(), &what)
        };
        let sent = match self.ask(&request).await {
            Ok(sent) => sent,
            Err(Error::RegistryNotFound { .. } | Error::RegistryDenied { .. }) => return Ok(false),
            Err(Error::RegistryFailed { status, .. }) if (400..500).contains(&status) => return Ok(false),
            Err(error) => return Err(error),
        };
        if sent.response.status() == StatusCode::CREATED {
            return Ok(true);
        }
        // It has opened an upload instead, which will not be used.
        if let Ok(place) = self.upload_url(&sent, &what) {
            let cancel = Request {
                method: Method::DELETE,
                ..Request::get(place.as_str(), &what)
            };
            let _ = timeout(REQUEST_TIMEOUT, self.registry.connection.exchange(&cancel)).await;
        }
        Ok(false)
    }

    pub async fn upload(&self, content: &Content) -> Result<(), Error> {
        let what = content.what();
        let error = match self.whole(content, &what).await {
            Ok(()) => return Ok(()),
            Err(Broken::Final(error)) => return Err(error),
            Err(Broken::Perhaps(error)) => error,
        };
        tracing::debug!(what, %error, "an upload broke off; it goes on in chunks");
        // The registry reports a mismatch only once it has everything.
        let verified = content.clone();
        let verify = tokio::task::spawn_blocking(move || verified.read(|_| Ok(())));
        verify.await.map_err(|_| Error::Cancelled)??;
        let patience = Retry {
            attempts: self.retry.attempts.max(2),
            ..self.retry
        };
        let mut retries = patience.begin();
        let mut last = error;
        while let Some(pause) = retries.next(None) {
            self.registry.connection.pause(pause, last.to_string()).await;
            match self.chunks(content, &what, &mut retries).await {
                Ok(()) => return Ok(()),
                Err(Broken::Final(error)) => return Err(error),
                Err(Broken::Perhaps(error)) => last = error,
            }
        }
        Err(last)
    }

    async fn session(&self, what: &str) -> Result<Session, Error> {
        let url = format!("{}/blobs/uploads/", self.registry.base);
        let request = Request {
            method: Method::POST,
            ..Request::get(&url, what)
        };
        let sent = self.ask(&request).await?;
        let place = self.upload_url(&sent, what)?;
        let least = header(sent.response.headers(), &CHUNK_MIN_LENGTH).and_then(|it| it.parse::<u64>().ok());
        let chunk = least.unwrap_or(0).clamp(CHUNK, MAX_CHUNK);
        drain(sent.response).await;
        Ok(Session { place, chunk })
    }

    /// The address at which the upload continues, from an answer.
    fn upload_url(&self, sent: &Sent, what: &str) -> Result<Url, Error> {
        let location = header(sent.response.headers(), &LOCATION).unwrap_or_default();
        let refuse = |problem: &str| {
            let what = format!("the answer of {} for {what}", self.registry.connection.registry);
            Error::malformed(what, format!("its Location {location:?} {problem}"))
        };
        if location.is_empty() {
            return Err(refuse("does not say where to upload to"));
        }
        let mut place = sent.url.join(location).map_err(|_| refuse("is no address"))?;
        // Some registries behind a proxy that ends TLS do not know that they are reached over TLS.
        let downgraded = sent.url.scheme() == "https" && place.scheme() == "http";
        if downgraded && (place.host() != sent.url.host() || place.set_scheme("https").is_err()) {
            return Err(refuse("would send the blob in the clear"));
        }
        match place.scheme() {
            "http" | "https" => Ok(place),
            _ => Err(refuse("is no address of HTTP")),
        }
    }

    /// Sends a request with a body, as long as it moves.
    async fn send(&self, content: &Content, request: &Request<'_>) -> Result<Sent, Broken> {
        let connection = &self.registry.connection;
        let exchange = connection.exchange(request);
        tokio::pin!(exchange);
        let start = Instant::now();
        let result = loop {
            let deadline = content.moved().max(start) + STALL;
            tokio::select! {
                result = &mut exchange => break result,
                () = sleep_until(deadline) => {
                    if content.moved().max(start) + STALL <= deadline {
                        let seconds = STALL.as_secs();
                        let reason = format!("it has taken nothing for {seconds} seconds");
                        break Err(Unanswered::Failure(Failure::timeout(reason)));
                    }
                }
            }
        };
        if let Some(error) = content.take_error() {
            return Err(Broken::Final(error));
        }
        match result {
            Ok(sent) if sent.response.status().is_success() => Ok(sent),
            Ok(sent) => {
                let status = sent.response.status();
                let error = refusal(&connection.registry, request.what, sent.response, 1).await;
                let again = passing(status)
                    || matches!(
                        status,
                        // The registry no longer knows the upload, it is too large, or its length differs from ours.
                        StatusCode::NOT_FOUND
                            | StatusCode::PAYLOAD_TOO_LARGE
                            | StatusCode::RANGE_NOT_SATISFIABLE
                            | StatusCode::CONFLICT
                    );
                Err(if again {
                    Broken::Perhaps(error)
                } else {
                    Broken::Final(error)
                })
            }
            Err(Unanswered::Access(error)) => Err(Broken::Final(error)),
            Err(Unanswered::Failure(failure)) => {
                let error = connection.unreachable(&failure);
                Err(if failure.may_pass {
                    Broken::Perhaps(error)
                } else {
                    Broken::Final(error)
                })
            }
        }
    }

    async fn whole(&self, content: &Content, what: &str) -> Result<(), Broken> {
        let session = self.session(what).await.map_err(Broken::Final)?;
        let url = committed(&session.place, &content.digest);
        let body = || content.stream(0, content.size);
        let headers = [(CONTENT_TYPE, OCTETS)];
        let request = Request {
            method: Method::PUT,
            headers: &headers,
            payload: Payload::Stream(content.size, &body),
            ..Request::get(url.as_str(), what)
        };
        let sent = self.send(content, &request).await?;
        self.stored(&sent, &content.digest, what).map_err(Broken::Final)?;
        drain(sent.response).await;
        Ok(())
    }

    pub(super) async fn chunks(
        &self,
        content: &Content,
        what: &str,
        retries: &mut Retries<'_>,
    ) -> Result<(), Broken> {
        let mut session = self.session(what).await.map_err(Broken::Final)?;
        let mut at = 0;
        while at < content.size {
            let length = session.chunk.min(content.size - at);
            let range = HeaderValue::try_from(format!("{at}-{}", at + length - 1));
            let Ok(range) = range else { break };
            let headers = [(CONTENT_TYPE, OCTETS), (CONTENT_RANGE, range)];
            let body = || content.stream(at, length);
            let request = Request {
                method: Method::PATCH,
                headers: &headers,
                payload: Payload::Stream(length, &body),
                ..Request::get(session.place.as_str(), what)
            };
            let (reached, broke_off) = match self.send(content, &request).await {
                Ok(sent) => {
                    session.place = self.upload_url(&sent, what).map_err(Broken::Final)?;
                    let reached = received(sent.response.headers()).unwrap_or(at + length);
                    drain(sent.response).await;
                    (reached, false)
                }
                Err(Broken::Perhaps(error)) => {
                    let Some(pause) = retries.next(None) else {
                        return Err(Broken::Perhaps(error));
                    };
                    self.registry.connection.pause(pause, error.to_string()).await;
                    let Ok(reached) = self.status(&mut session, what).await else {
                        // The session is lost. The caller counts this failure, and opens another.
                        retries.uncount();
                        return Err(Broken::Perhaps(error));
                    };
                    (reached, true)
                }
                Err(broken) => return Err(broken),
            };
            if reached > content.size {
                let problem = format!("it says that it has {reached} bytes of {}", content.size);
                return Err(Broken::Final(Error::malformed(
                    format!("the upload of {what}"),
                    problem,
                )));
            }
            if reached > at {
                retries.progressed();
            } else if !broke_off && retries.next(None).is_none() {
                let problem = "the registry takes chunks without getting further";
                return Err(Broken::Final(Error::malformed(
                    format!("the upload of {what}"),
                    problem,
                )));
            }
            at = reached;
        }
        let url = committed(&session.place, &content.digest);
        let request = Request {
            method: Method::PUT,
            ..Request::get(url.as_str(), what)
        };
        let sent = self.ask(&request).await.map_err(Broken::Final)?;
        self.stored(&sent, &content.digest, what).map_err(Broken::Final)?;
        drain(sent.response).await;
        Ok(())
    }

    /// How much of an upload the registry has.
    async fn status(&self, session: &mut Session, what: &str) -> Result<u64, Error> {
        let place = session.place.clone();
        let sent = self.ask(&Request::get(place.as_str(), what)).await?;
        if header(sent.response.headers(), &LOCATION).is_some() {
            session.place = self.upload_url(&sent, what)?;
        }
        Ok(received(sent.response.headers()).unwrap_or(0))
    }

    /// Checks that the registry stored the blob with this digest.
    fn stored(&self, sent: &Sent, digest: &Digest, what: &str) -> Result<(), Error> {
        let said = header(sent.response.headers(), &CONTENT_DIGEST).and_then(|it| it.parse::<Digest>().ok());
        match said {
            Some(got) if got != *digest => Err(Error::DigestMismatch {
                what: format!("{what} as {} stored it", self.registry.connection.registry),
                expected: *digest,
                got,
            }),
            _ => Ok(()),
        }
    }

    pub async fn manifest(&self, tag: Option<&str>, document: &Document) -> Result<(), Error> {
        let digest = document.digest.to_string();
        let knows_subjects = self.put(tag.unwrap_or(&digest), document).await?;
        match document.subject {
            Some(subject) if !knows_subjects => self.list_as_referrer(&subject, document).await,
            _ => Ok(()),
        }
    }

    /// Returns whether the registry keeps the subject's referrers itself.
    async fn put(&self, version: &str, document: &Document) -> Result<bool, Error> {
        let url = format!("{}/manifests/{version}", self.registry.base);
        let what = format!("manifest {version}");
        let media_type = HeaderValue::try_from(&document.media_type);
        let media_type = media_type.map_err(|error| Error::malformed(&what, error))?;
        let headers = [(CONTENT_TYPE, media_type)];
        let request = Request {
            method: Method::PUT,
            headers: &headers,
            payload: Payload::Bytes(document.bytes.clone()),
            ..Request::get(&url, &what)
        };
        let sent = self.ask(&request).await?;
        self.stored(&sent, &document.digest, &what)?;
        let subject = header(sent.response.headers(), &OCI_SUBJECT).and_then(|it| it.parse::<Digest>().ok());
        drain(sent.response).await;
        Ok(subject.is_some() && subject == document.subject)
    }

    /// Adds to the index a registry without referrers keeps by its tag. Others may do so too: it is read again until it
    /// has ours.
    async fn list_as_referrer(&self, subject: &Digest, document: &Document) -> Result<(), Error> {
        let tag = fallback_tag(subject);
        let what = format!("the index {tag} of referrers");
        for _ in 0..FALLBACK_ROUNDS {
            let there = match self.registry.manifest_at(&tag, &what).await {
                Ok((_, bytes)) => Some(bytes),
                Err(Error::RegistryNotFound { .. }) => None,
                Err(error) => return Err(error),
            };
            let Some(index) = with_manifest(&what, there.as_deref(), document.descriptor(true))? else {
                return Ok(());
            };
            let index = Document::new(crate::manifest::OCI_INDEX, &index)?;
            self.put(&tag, &index).await?;
        }
        let problem = "others write it at the same time, and it never came to list what was added: try again";
        Err(Error::malformed(what, problem))
    }
}

fn header<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|it| it.to_str().ok())
}

/// `Range: 0-LAST`: the part of an upload that the registry has.
fn received(headers: &HeaderMap) -> Option<u64> {
    let range = header(headers, &RANGE)?;
    let last = range.strip_prefix("bytes=").unwrap_or(range).strip_prefix("0-")?;
    // The header is the same for zero bytes and for one byte; in the latter case the byte is sent again.
    last.parse::<u64>()
        .ok()
        .map(|last| if last == 0 { 0 } else { last.saturating_add(1) })
}

/// The address that ends an upload.
fn committed(place: &Url, digest: &Digest) -> Url {
    let mut url = place.clone();
    url.query_pairs_mut().append_pair("digest", &digest.to_string());
    url
}
