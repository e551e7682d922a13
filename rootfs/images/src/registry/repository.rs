//! One repository of a registry: its manifests, and bodies of bounded size.

use std::sync::Arc;

use reqwest::Response;
use reqwest::header::CONTENT_TYPE;

use crate::error::Error;
use crate::manifest::{DOCKER_LIST, DOCKER_MANIFEST, MAX_MANIFEST, OCI_INDEX, OCI_MANIFEST};

use super::connection::Connection;
use super::request::Request;
use super::wire::Failure;

pub struct Repository {
    pub connection: Arc<Connection>,
    /// `https://host/v2/name`.
    pub base: String,
}

impl Repository {
    pub(super) fn new(connection: Arc<Connection>, base: String) -> Self {
        Self { connection, base }
    }

    /// A manifest or an index by tag or digest, unverified, and the media type the registry gives it.
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
        // Parameters, as in "application/json; charset=utf-8", are not part of the type.
        let media_type = media_type
            .and_then(|it| it.split(';').next())
            .map(|it| it.trim().to_owned());
        Ok((media_type, self.body(response, what, MAX_MANIFEST).await?))
    }

    /// A body to its end.
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
