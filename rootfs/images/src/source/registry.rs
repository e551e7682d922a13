//! A registry as a source of images (OCI distribution specification).
//!
//! A task receives a layer's body, and another thread reads it, through a bounded channel. If the body breaks off, it is resumed where it
//! stopped; the digest of the whole shows whether the parts fit.

use std::sync::Arc;

use async_trait::async_trait;
use thaw_imagefs::digest::Digest;
use tokio::sync::mpsc;

use crate::error::Error;
use crate::manifest::{Descriptor, MAX_CONFIG};
use crate::progress::Progress;
use crate::reference::RegistryRef;
use crate::registry::Rights;
use crate::registry::download::{Body, CHANNEL, Download, Piece};
use crate::registry::endpoint::Endpoint;
use crate::registry::repository::Repository;
use crate::registry::request::Request;
use crate::registry::stats::EndpointStats;

use super::fallback::{Rank, Sender};
use super::{LayerBody, LayerSource, Root, Source, SourceOptions, verify};

pub struct Registry {
    repository: Repository,
    reference: RegistryRef,
    /// Asked for whole layers first.
    mirrors: Vec<Arc<Endpoint>>,
    /// Its own counters.
    stats: Arc<EndpointStats>,
}

impl Registry {
    pub async fn open(
        reference: RegistryRef,
        options: &SourceOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<Self, Error> {
        let (client, registry) = (options.client()?, options.registry());
        Ok(Self {
            repository: client
                .repository(&reference, &registry, Rights::Pull, progress.clone())
                .await?,
            mirrors: client.mirrors(&reference, &registry, progress).await?,
            stats: client.stats().endpoint(&reference.registry),
            reference,
        })
    }
}

#[async_trait]
impl Source for Registry {
    async fn root(&self) -> Result<Root, Error> {
        let what = format!(
            "manifest {}:{}",
            self.reference.repository,
            self.reference.version()
        );
        let (media_type, bytes) = self
            .repository
            .manifest_at(&self.reference.version(), &what)
            .await?;
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
        let (_, bytes) = self
            .repository
            .manifest_at(&descriptor.digest.to_string(), &what)
            .await?;
        verify("manifest", bytes, descriptor)
    }

    async fn config(&self, descriptor: &Descriptor) -> Result<Vec<u8>, Error> {
        let what = format!("config {}", descriptor.digest);
        let url = format!("{}/blobs/{}", self.repository.base, descriptor.digest);
        let response = self.repository.connection.get(&Request::get(&url, &what)).await?;
        verify(
            "config",
            self.repository.body(response, &what, MAX_CONFIG).await?,
            descriptor,
        )
    }

    async fn open(&self, layer: &LayerSource, place: usize) -> Result<LayerBody, Error> {
        let what = layer.name();
        let own = format!(
            "{}/blobs/{}",
            self.repository.base,
            layer.digest.unwrap_or(layer.diff_id)
        );
        let mut download = Download {
            connection: self.repository.connection.clone(),
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
            _ => Rank::Last(Some(self.stats.clone())),
        };
        let name = match &download.mirrored {
            Some(mirrored) => mirrored.name().to_owned(),
            None => self.repository.connection.registry.clone(),
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
            // The reader may be gone, and then the error is useless.
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
