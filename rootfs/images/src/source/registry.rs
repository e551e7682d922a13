//! A registry of the OCI distribution specification.
//!
//! A layer's body is received by a task and read on another thread, through a bounded channel; when it breaks off it is
//! resumed where it stopped, since the digest over the whole will tell whether the pieces fit.

use std::net::IpAddr;
use std::sync::Arc;

use async_trait::async_trait;
use reqwest::Response;
use reqwest::header::CONTENT_TYPE;
use thaw_imagefs::digest::Digest;
use tokio::sync::mpsc;

use crate::error::Error;
use crate::fetch::{Endpoint, EndpointStats};
use crate::progress::Progress;
use crate::reference::{DEFAULT_REGISTRY, RegistryRef};

use super::download::{Body, CHANNEL, Download, Piece};
use super::http::{Connection, Party, Request, Unobserved};
use super::manifest::{DOCKER_LIST, DOCKER_MANIFEST, MAX_CONFIG, MAX_MANIFEST, OCI_INDEX, OCI_MANIFEST};
use super::turns::{Rank, Sender};
use super::wire::{Failure, client, patient_client};
use super::{Descriptor, LayerBody, LayerSource, Root, Source, SourceOptions, verify};

/// Where Docker Hub answers.
const HUB_HOST: &str = "registry-1.docker.io";

pub struct Registry {
    pub connection: Arc<Connection>,
    reference: RegistryRef,
    /// `https://host/v2/name`.
    pub base: String,
    /// Asked for whole layers first.
    mirrors: Vec<Arc<Endpoint>>,
    /// Its own counters.
    stats: Option<Arc<EndpointStats>>,
}

impl Registry {
    pub async fn open(
        reference: RegistryRef,
        options: &SourceOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<Self, Error> {
        let mut registry = Self::connect(reference, options, false, progress.clone()).await?;
        if let Some(fetcher) = &options.fetcher {
            registry.mirrors = fetcher.mirrors(&registry.reference, options, progress).await?;
            registry.stats = Some(fetcher.stats().endpoint(&registry.reference.registry));
        }
        Ok(registry)
    }

    /// To read from, or to write to as well.
    pub async fn connect(
        reference: RegistryRef,
        options: &SourceOptions,
        write: bool,
        progress: Arc<dyn Progress>,
    ) -> Result<Self, Error> {
        let Address { plain, base } = Address::of(&reference.registry, options.plain_http);
        let wire = if write { patient_client() } else { client() };
        let wire = wire.map_err(|failure| no_client(&reference.registry, &failure))?;
        let party = Party {
            name: reference.registry.clone(),
            registry: reference.registry.clone(),
            base: base.clone(),
            plain,
            credentials: options.credentials.clone(),
            login: options.credentials.login(&reference.registry).await?,
            scope: format!(
                "repository:{}:{}",
                reference.repository,
                if write { "pull,push" } else { "pull" }
            ),
        };
        let connection = Connection::new(
            party,
            Arc::new(wire),
            options.retry,
            progress,
            Arc::new(Unobserved),
        )?;
        let base = format!("{base}/v2/{}", reference.repository);
        Ok(Self {
            connection: Arc::new(connection),
            reference,
            base,
            mirrors: Vec::new(),
            stats: None,
        })
    }

    pub async fn manifest_at(&self, version: &str, what: &str) -> Result<(Option<String>, Vec<u8>), Error> {
        let url = format!("{}/manifests/{version}", self.base);
        let accept = [OCI_MANIFEST, OCI_INDEX, DOCKER_MANIFEST, DOCKER_LIST].join(", ");
        let request = Request {
            accept: Some(&accept),
            ..Request::get(&url, what)
        };
        let response = self.connection.get(&request).await?;
        let media_type = response
            .headers()
            .get(CONTENT_TYPE)
            .and_then(|it| it.to_str().ok());
        // Parameters, as in "application/json; charset=utf-8", are none of the type.
        let media_type = media_type
            .and_then(|it| it.split(';').next())
            .map(|it| it.trim().to_owned());
        Ok((media_type, self.body(response, what, MAX_MANIFEST).await?))
    }

    pub async fn body(&self, mut response: Response, what: &str, limit: u64) -> Result<Vec<u8>, Error> {
        let expected = response.content_length();
        let mut body = Vec::new();
        loop {
            match self.connection.wait_for(1, response.chunk()).await {
                Ok(Some(bytes)) => body.extend_from_slice(&bytes),
                Ok(None) => return Ok(body),
                Err(error) => {
                    return Err(match expected {
                        Some(expected) if !error.is_timeout() => Error::TruncatedLayer {
                            what: what.into(),
                            expected,
                            got: body.len() as u64,
                        },
                        _ => self.connection.unreachable(&Failure::from(error)),
                    });
                }
            }
            if body.len() as u64 > limit {
                return Err(Error::malformed(what, format!("it is larger than {limit} bytes")));
            }
        }
    }
}

/// Where a registry is.
pub struct Address {
    /// Without TLS.
    pub plain: bool,
    /// `https://host[:port]`.
    pub base: String,
}

impl Address {
    pub fn of(registry: &str, plain_http: bool) -> Self {
        let host = if registry == DEFAULT_REGISTRY {
            HUB_HOST
        } else {
            registry
        };
        let plain = plain_http || is_loopback(host) || listed(host);
        let base = format!("{}://{host}", if plain { "http" } else { "https" });
        Self { plain, base }
    }
}

/// Without an HTTP client nothing can be asked.
pub fn no_client(registry: &str, failure: &Failure) -> Error {
    Error::RegistryUnreachable {
        registry: registry.into(),
        reason: failure.reason.clone(),
        advice: "check the certificates of this host (SSL_CERT_FILE)".into(),
    }
}

/// Loopback is the one place where plain HTTP is safe without asking.
pub fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(rest),
        None => host.split(':').next().unwrap_or(host),
    };
    name == "localhost" || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn listed(host: &str) -> bool {
    std::env::var("THAW_PLAIN_HTTP").is_ok_and(|list| list.split(',').any(|it| it.trim() == host))
}

#[async_trait]
impl Source for Registry {
    async fn root(&self) -> Result<Root, Error> {
        let what = format!(
            "manifest {}:{}",
            self.reference.repository,
            self.reference.version()
        );
        let (media_type, bytes) = self.manifest_at(&self.reference.version(), &what).await?;
        if let Some(expected) = self.reference.digest {
            let got = Digest::of(&bytes);
            if got != expected {
                return Err(Error::DigestMismatch { what, expected, got });
            }
        }
        Ok(Root::Document { media_type, bytes })
    }

    async fn manifest(&self, descriptor: &Descriptor) -> Result<Vec<u8>, Error> {
        let what = format!("manifest {}", descriptor.digest);
        let (_, bytes) = self.manifest_at(&descriptor.digest.to_string(), &what).await?;
        verify("manifest", bytes, descriptor)
    }

    async fn config(&self, descriptor: &Descriptor) -> Result<Vec<u8>, Error> {
        let what = format!("config {}", descriptor.digest);
        let url = format!("{}/blobs/{}", self.base, descriptor.digest);
        let response = self.connection.get(&Request::get(&url, &what)).await?;
        verify(
            "config",
            self.body(response, &what, MAX_CONFIG).await?,
            descriptor,
        )
    }

    async fn open(&self, layer: &LayerSource, place: usize) -> Result<LayerBody, Error> {
        let what = layer.name();
        let own = format!("{}/blobs/{}", self.base, layer.digest.unwrap_or(layer.diff_id));
        let mut download = Download {
            connection: self.connection.clone(),
            url: own,
            what,
            foreign: false,
            size: layer.size,
            received: 0,
            mirrored: None,
        };
        let stored = layer.digest.zip(layer.size);
        let response = match stored {
            Some((digest, size)) => download.mirror(&self.mirrors, place, digest, size).await,
            None => None,
        };
        let rank = match (&response, &download.mirrored) {
            (Some((at, _)), Some(mirrored)) => Rank::Mirror {
                next: at + 1,
                wrong: mirrored.wrong.clone(),
            },
            _ => Rank::Last(self.stats.clone()),
        };
        let name = match &download.mirrored {
            Some(mirrored) => mirrored.name().to_owned(),
            None => self.connection.registry.clone(),
        };
        let response = match response {
            Some((_, response)) => Ok(response),
            None => download.request().await,
        };
        let response = match response {
            Err(Error::RegistryNotFound { .. }) if !layer.urls.is_empty() => {
                download.elsewhere(&layer.urls).await?
            }
            answer => answer?,
        };
        let (sender, receiver) = mpsc::channel(CHANNEL);
        let task = tokio::spawn(async move {
            let end = match download.run(response, &sender).await {
                Ok(()) => Piece::End,
                Err(error) => Piece::Failed(error),
            };
            // The reader may be gone: then nobody wants to know.
            let _ = sender.send(end).await;
        });
        let transfer = task.abort_handle();
        let body = Body {
            receiver,
            current: bytes::Bytes::new(),
            ended: false,
            task: transfer.clone(),
        };
        Ok(LayerBody {
            reader: Box::new(body),
            transfer: Some(transfer),
            sender: Sender { name, rank },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::is_loopback;

    #[test]
    fn loopback() {
        for host in [
            "localhost",
            "localhost:5000",
            "127.0.0.1",
            "127.1.2.3:80",
            "[::1]:5000",
        ] {
            assert!(is_loopback(host), "{host}");
        }
        for host in [
            "localhost.example",
            "10.0.0.1",
            "[2001:db8::1]:5000",
            "registry-1.docker.io",
        ] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
