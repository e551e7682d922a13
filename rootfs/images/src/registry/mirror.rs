//! Mirrors of a registry: checks a mirror's configuration and makes its endpoint.

use std::sync::Arc;

use reqwest::Url;
use reqwest::header::{AUTHORIZATION, CONTENT_LENGTH, HOST, HeaderName, HeaderValue, RANGE};

use crate::error::Error;
use crate::reference::{RegistryRef, is_loopback};

use super::account::RegistryAccount;
use super::address::Address;
use super::auth::Credentials;
use super::endpoint::Place;
use super::plan::Plan;
use super::token::Access;
use super::{Mirror, MirrorKind, Options};

/// Names the registry from which dfdaemon fetches.
const DRAGONFLY_REGISTRY: HeaderName = HeaderName::from_static("x-dragonfly-registry");
/// Headers that cannot be configured, because each request sets them itself.
const OWN_HEADERS: [HeaderName; 4] = [AUTHORIZATION, CONTENT_LENGTH, HOST, RANGE];

impl Mirror {
    /// The address, with the path up to the repository, and the headers.
    pub(super) fn checked(&self) -> Result<(Url, Vec<(HeaderName, HeaderValue)>), Error> {
        let refuse =
            |problem: String| Error::malformed(format!("the configuration's mirror {:?}", self.url), problem);
        let mut url = Url::parse(&self.url).map_err(|error| refuse(error.to_string()))?;
        let plain = url.username().is_empty()
            && url.password().is_none()
            && url.query().is_none()
            && url.fragment().is_none();
        if !(matches!(url.scheme(), "http" | "https") && url.has_host() && plain) {
            return Err(refuse(
                "it has to be http:// or https://, a host, perhaps a port and a path".into(),
            ));
        }
        let path = match url.path().trim_end_matches('/') {
            "" => "/v2".to_owned(),
            path if path.split('/').any(|part| part == "v2") => path.to_owned(),
            _ => return Err(refuse("a path has to have /v2 in it".into())),
        };
        url.set_path(&path);
        let header = |(name, value): (&String, &String)| {
            let parsed = HeaderName::try_from(name)
                .ok()
                .zip(HeaderValue::try_from(value).ok());
            let (name, mut value) = parsed.ok_or_else(|| refuse(format!("the header {name:?} cannot be")))?;
            if OWN_HEADERS.contains(&name) {
                return Err(refuse(format!("the header {name} is not to be set")));
            }
            value.set_sensitive(true);
            Ok((name, value))
        };
        let headers = self.headers.iter().map(header).collect::<Result<_, Error>>()?;
        Ok((url, headers))
    }

    pub(super) async fn plan(
        &self,
        reference: &RegistryRef,
        upstream: &Address,
        scope: &str,
        options: &Options,
        access: Option<&Arc<Access>>,
    ) -> Result<Plan, Error> {
        let (url, mut headers) = self.checked()?;
        let name = authority(&url);
        let base = format!("{}/{}", url.as_str().trim_end_matches('/'), reference.repository);
        let registry = &reference.registry;
        let loopback = is_loopback(&name);
        let (filed, plain, strict, query) = match self.kind {
            MirrorKind::Registry => {
                let ns: String = reqwest::Url::parse_with_params("http://x/", [("ns", registry)])
                    .map(|url| format!("?{}", url.query().unwrap_or_default()))
                    .unwrap_or_default();
                (name.clone(), url.scheme() == "http", false, ns)
            }
            MirrorKind::Dragonfly => {
                let value = HeaderValue::try_from(&upstream.base)
                    .map_err(|error| Error::malformed(&upstream.base, error))?;
                if !headers.iter().any(|(name, _)| *name == DRAGONFLY_REGISTRY) {
                    headers.push((DRAGONFLY_REGISTRY, value));
                }
                (registry.clone(), upstream.plain, true, String::new())
            }
        };
        let safe = url.scheme() == "https" || loopback || self.credentials_in_clear;
        let credentials = if safe {
            options.credentials.clone()
        } else {
            Credentials::Anonymous
        };
        let login = credentials.login(&filed).await?;
        Ok(Plan {
            account: RegistryAccount {
                name: format!("{registry} through {name}"),
                registry: filed,
                base: url.to_string(),
                plain,
                credentials,
                login,
                scope: scope.to_owned(),
            },
            name,
            place: Place::Repository { base, query },
            headers,
            strict,
            last: false,
            access: access
                .filter(|_| self.kind == MirrorKind::Dragonfly && safe)
                .cloned(),
        })
    }
}

/// `HOST[:PORT]`, as registries are named.
pub(super) fn authority(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    url.port()
        .map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"))
}
