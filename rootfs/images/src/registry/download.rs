//! Downloads a layer from a mirror or the registry and passes it to the thread that reads it. A download that breaks off is resumed.
//!
//! Invariant: pieces arrive in order and without gaps, to the last one or to an error. A download that is too slow is cut and resumed;
//! without progress it fails.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use reqwest::header::CONTENT_RANGE;
use reqwest::{Response, StatusCode, Url};
use sha2::{Digest as _, Sha256};
use thaw_imagefs::digest::Digest;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::{Duration, Instant, timeout};

use crate::error::Error;

use super::breaker::Permit;
use super::connection::Connection;
use super::endpoint::Endpoint;
use super::request::Request;
use super::wire::Failure;

/// How often a body that breaks off is resumed without a byte of progress.
const MAX_RESUMES: u32 = 3;
/// A body is too slow if it brings fewer than [`WINDOW_BYTES`] in this much waiting time.
const WINDOW: Duration = Duration::from_secs(30);
const WINDOW_BYTES: u64 = 64 << 10;
/// Resuming a slow body counts as progress only if it has brought at least this number of bytes.
const WORTH_RESUMING: u64 = 1 << 20;
/// Pieces between the network and the reader: some hundred KiB.
pub const CHANNEL: usize = 16;

pub enum Piece {
    Bytes(bytes::Bytes),
    End,
    Failed(Error),
}

pub struct Download {
    pub connection: Arc<Connection>,
    pub url: String,
    pub what: String,
    pub foreign: bool,
    pub size: Option<u64>,
    pub received: u64,
    /// The mirror that sends it, or its beginning.
    pub mirrored: Option<Mirrored>,
}

/// A layer from a mirror. If the mirror breaks off, the registry sends the rest, and the whole is verified. If the digest is wrong, the
/// mirror is blamed, because the registry is trusted.
pub struct Mirrored {
    endpoint: Arc<Endpoint>,
    digest: Digest,
    hash: Sha256,
    /// Held until the mirror breaks off.
    permit: Option<Permit>,
    /// Whether the whole layer has arrived with a wrong digest.
    pub wrong: Arc<AtomicBool>,
}

impl Mirrored {
    /// Its name in messages.
    pub fn name(&self) -> &str {
        &self.endpoint.connection.registry
    }

    fn received(&mut self, bytes: &[u8]) {
        self.hash.update(bytes);
        if self.permit.is_some() {
            self.endpoint.count(bytes.len() as u64);
        }
    }

    fn broke_off(&mut self) {
        self.permit.take().into_iter().for_each(Permit::failed);
    }

    /// All bytes have arrived: notes whether they are the layer. The reader refuses wrong bytes, and learns here whose fault it
    /// was.
    fn judge(mut self) {
        if Digest::from(<[u8; 32]>::from(self.hash.finalize())) == self.digest {
            self.permit.take().into_iter().for_each(Permit::succeeded);
            return;
        }
        self.permit.take().into_iter().for_each(Permit::failed);
        self.endpoint.sent_wrong(self.digest);
        self.wrong.store(true, Ordering::Release);
    }
}

impl Download {
    pub async fn request(&self) -> Result<Response, Error> {
        let request = Request {
            range: (self.received > 0).then_some((self.received, None)),
            foreign: self.foreign,
            ..Request::get(&self.url, &self.what)
        };
        self.connection.get(&request).await
    }

    /// Opens the layer at the first mirror that has it, beginning with `from`. Also returns which mirror that is.
    pub async fn mirror(
        &mut self,
        mirrors: &[Arc<Endpoint>],
        from: usize,
        digest: Digest,
        size: u64,
    ) -> Option<(usize, Response)> {
        for (at, mirror) in mirrors.iter().enumerate().skip(from) {
            if let Some((response, permit)) = mirror.whole(digest, size, &self.what).await {
                self.mirrored = Some(Mirrored {
                    endpoint: mirror.clone(),
                    digest,
                    hash: Sha256::new(),
                    permit: Some(permit),
                    wrong: Arc::default(),
                });
                return Some((at, response));
            }
        }
        None
    }

    fn judge_mirror(&mut self) {
        self.mirrored.take().into_iter().for_each(Mirrored::judge);
    }

    /// A foreign layer is fetched from the addresses its descriptor gives.
    pub async fn elsewhere(&mut self, urls: &[String]) -> Result<Response, Error> {
        self.foreign = true;
        let mut last = None;
        for url in urls
            .iter()
            .filter(|it| Url::parse(it).is_ok_and(|it| matches!(it.scheme(), "http" | "https")))
        {
            self.url.clone_from(url);
            match self.request().await {
                Ok(response) => return Ok(response),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| Error::malformed(&self.what, "none of its addresses is HTTP")))
    }

    /// Sends the body, whole, however often it breaks off.
    pub async fn run(&mut self, mut response: Response, sender: &mpsc::Sender<Piece>) -> Result<(), Error> {
        let mut fruitless = 0;
        let mut skip = 0;
        loop {
            let before = self.received;
            let broken = self.receive(response, skip, fruitless + 1, sender).await?;
            if broken.is_none() && self.size.is_none_or(|size| self.received >= size) {
                self.judge_mirror();
                return Ok(());
            }
            let slow = broken.as_ref().is_some_and(|failure| failure.timeout);
            let least = if slow { WORTH_RESUMING } else { 1 };
            fruitless = if self.received - before >= least {
                0
            } else {
                fruitless + 1
            };
            // Resuming requires the total length.
            let Some(expected) = self.size else {
                return broken.map_or(Ok(()), |failure| Err(self.connection.unreachable(&failure)));
            };
            if fruitless >= MAX_RESUMES {
                return Err(match broken {
                    Some(failure) if failure.timeout => self.connection.unreachable(&failure),
                    _ => Error::TruncatedLayer {
                        what: self.what.clone(),
                        expected,
                        got: self.received,
                    },
                });
            }
            let reason = broken
                .as_ref()
                .map_or_else(|| "the body ended early".to_owned(), |it| it.reason.clone());
            tracing::debug!(what = self.what, self.received, expected, reason, "resuming");
            if slow {
                self.connection.retrying(Duration::ZERO, reason);
            }
            self.mirrored.iter_mut().for_each(Mirrored::broke_off);
            response = self.request().await?;
            skip = self.overlap(&response)?;
        }
    }

    /// Unwanted bytes of a resumed body: everything already received, if the server ignores ranges.
    fn overlap(&self, response: &Response) -> Result<u64, Error> {
        if self.received == 0 || response.status() == StatusCode::OK {
            return Ok(self.received);
        }
        let range = response
            .headers()
            .get(CONTENT_RANGE)
            .and_then(|it| it.to_str().ok())
            .unwrap_or_default();
        let start = range
            .strip_prefix("bytes ")
            .and_then(|it| it.split('-').next())
            .and_then(|it| it.parse::<u64>().ok());
        match start {
            Some(start) if start == self.received => Ok(0),
            _ => Err(Error::malformed(
                &self.what,
                format!("the registry sent range {range:?}, not what was asked"),
            )),
        }
    }

    /// Passes a body on until it ends or breaks.
    async fn receive(
        &mut self,
        mut response: Response,
        mut skip: u64,
        attempt: u32,
        sender: &mpsc::Sender<Piece>,
    ) -> Result<Option<Failure>, Error> {
        let connection = self.connection.clone();
        // Only time spent on the network counts, because the reader may be slower.
        let (mut waited, mut came) = (Duration::ZERO, 0);
        loop {
            let start = Instant::now();
            let piece = timeout(WINDOW.saturating_sub(waited), response.chunk());
            let Ok(piece) = connection.wait_for(attempt, piece).await else {
                if came < WINDOW_BYTES {
                    let seconds = WINDOW.as_secs();
                    let reason = format!("it sent only {came} bytes in {seconds} seconds");
                    return Ok(Some(Failure::timeout(reason)));
                }
                (waited, came) = (Duration::ZERO, 0);
                continue;
            };
            waited += start.elapsed();
            match piece {
                Ok(Some(mut bytes)) => {
                    came += bytes.len() as u64;
                    let unwanted = (skip.min(bytes.len() as u64)) as usize;
                    skip -= unwanted as u64;
                    let bytes = bytes.split_off(unwanted);
                    self.received += bytes.len() as u64;
                    self.mirrored.iter_mut().for_each(|it| it.received(&bytes));
                    let too_long = self.size.is_some_and(|size| self.received > size);
                    if too_long {
                        // Judged before the reader sees the end, because the reader reports it.
                        self.judge_mirror();
                    }
                    sender
                        .send(Piece::Bytes(bytes))
                        .await
                        .map_err(|_| Error::Cancelled)?;
                    if too_long {
                        return Ok(None);
                    }
                }
                Ok(None) => return Ok(None),
                Err(error) => return Ok(Some(error.into())),
            }
        }
    }
}

/// The reading end, for a thread that may wait.
pub struct Body {
    pub receiver: mpsc::Receiver<Piece>,
    pub current: bytes::Bytes,
    pub ended: bool,
    pub task: AbortHandle,
}

impl Read for Body {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() && !self.ended {
            match self.receiver.blocking_recv() {
                Some(Piece::Bytes(bytes)) => self.current = bytes,
                Some(Piece::End) => self.ended = true,
                Some(Piece::Failed(error)) => return Err(io::Error::other(error)),
                None => return Err(io::Error::other(Error::Cancelled)),
            }
        }
        let length = buffer.len().min(self.current.len());
        buffer[..length].copy_from_slice(&self.current.split_to(length));
        Ok(length)
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use crate::progress::{Event, Progress, Silent};
    use crate::registry::account::Unobserved;
    use crate::registry::retries::Retry;
    use crate::registry::testing::{Network, Reply, anonymous};

    use super::*;

    #[derive(Default)]
    struct Told(Mutex<Vec<Event>>);

    impl Progress for Told {
        fn event(&self, event: Event) {
            self.0.lock().unwrap().push(event);
        }
    }

    /// Runs a download of these bytes and yields what came, and how long it took.
    async fn download(network: Arc<Network>, size: u64) -> (Result<(), Error>, Vec<u8>, Duration) {
        download_telling(network, size, Arc::new(Silent)).await
    }

    async fn download_telling(
        network: Arc<Network>,
        size: u64,
        progress: Arc<dyn Progress>,
    ) -> (Result<(), Error>, Vec<u8>, Duration) {
        let account = anonymous();
        let observer = Arc::new(Unobserved);
        let connection = Connection::new(account, network, Retry::default(), progress, observer);
        let mut download = Download {
            connection: Arc::new(connection.unwrap()),
            url: "https://registry.example/v2/app/blobs/x".into(),
            what: "a layer".into(),
            foreign: false,
            size: Some(size),
            received: 0,
            mirrored: None,
        };
        let start = Instant::now();
        let (sender, mut receiver) = mpsc::channel(CHANNEL);
        let run = async move {
            let response = download.request().await?;
            download.run(response, &sender).await
        };
        let collect = async {
            let mut all = Vec::new();
            while let Some(Piece::Bytes(bytes)) = receiver.recv().await {
                all.extend_from_slice(&bytes);
            }
            all
        };
        let (result, all) = tokio::join!(run, collect);
        (result, all, start.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_loris_does_not_hold_a_pull_for_ever() {
        let bytes = vec![7; 100_000];
        let slow = bytes.clone();
        let network = Network::new(move |request| {
            let whole = request.headers().get("range").is_none();
            let answer = if whole {
                Reply::status(200).body(&slow)
            } else {
                Reply::range_from(request, &slow)
            };
            answer.trickle(1, Duration::from_secs(1))
        });
        let (result, _, elapsed) = download(network, 100_000).await;
        assert!(
            matches!(result, Err(Error::RegistryUnreachable { .. })),
            "{result:?}"
        );
        assert!(elapsed < Duration::from_secs(200), "{elapsed:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_registry_that_falls_silent_in_a_body_is_told_of() {
        let network = Network::new(|_| {
            Reply::status(200)
                .body(&[7; 10])
                .trickle(10, Duration::from_secs(86_400))
        });
        let told = Arc::new(Told::default());
        let (result, _, _) = download_telling(network, 10, told.clone()).await;
        assert!(
            matches!(result, Err(Error::RegistryUnreachable { .. })),
            "{result:?}"
        );
        let told = told.0.lock().unwrap();
        let attempts: Vec<_> = told
            .iter()
            .map(|event| match event {
                Event::Waiting { attempt, waited, .. } => (*attempt, waited.as_secs()),
                Event::Retrying { .. } => (0, 0),
                other => panic!("{other:?}"),
            })
            .collect();
        let each = |attempt| [(attempt, 5), (attempt, 15), (attempt, 25)];
        let all = [&each(1)[..], &[(0, 0)], &each(2), &[(0, 0)], &each(3)].concat();
        assert_eq!(attempts, all);
    }

    #[tokio::test(start_paused = true)]
    async fn a_pull_over_a_slow_link_goes_on() {
        let bytes = vec![7; 2_000_000];
        let slow = bytes.clone();
        let network = Network::new(move |_| {
            Reply::status(200)
                .body(&slow)
                .trickle(8192, Duration::from_secs(2))
        });
        let (result, all, _) = download(network, 2_000_000).await;
        assert!(result.is_ok(), "{result:?}");
        assert_eq!(all, bytes);
    }
}
