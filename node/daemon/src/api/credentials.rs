//! The credentials of the API over TCP: thawd's certificate, and which certificates and tokens have access. They come from the files
//! that `[api]` names.
//!
//! Invariant: the credentials in force were read completely, from files that were all valid; a reload of invalid files changes nothing.

use std::path::Path;
use std::sync::{Arc, RwLock};
use std::time::SystemTime;

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ServerConfig, WebPkiClientVerifier};
use thaw_sandbox::config::api::ApiConfig;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sys::lock::Share;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use super::client_roles::{ClientCertificate, ClientRoles};
use super::connection::Versions;
use super::grant::Grant;
use super::peer::{Admission, Peer};
use super::problem::{ApiCode, Refusal};
use super::tokens::Tokens;

/// The credentials that a caller presents.
pub struct Presented {
    /// From the handshake of its connection.
    pub certificate: Option<Arc<ClientCertificate>>,
    /// The `Authorization` headers of its request.
    pub headers: HeaderMap,
}

impl Presented {
    /// Takes the token out of a request's headers, so that no handler sees it.
    pub fn take(certificate: Option<Arc<ClientCertificate>>, headers: &mut HeaderMap) -> Presented {
        let mut taken = HeaderMap::new();
        // A request with two or more has no token.
        for value in headers.get_all(header::AUTHORIZATION).iter().take(2) {
            // A copy: the value itself holds the buffer that the whole head was read into.
            if let Ok(mut copy) = HeaderValue::from_bytes(value.as_bytes()) {
                copy.set_sensitive(true);
                taken.append(header::AUTHORIZATION, copy);
            }
        }
        headers.remove(header::AUTHORIZATION);
        Presented {
            certificate,
            headers: taken,
        }
    }

    /// Takes a token out of another header than `Authorization`, and removes both, so that no handler sees a token.
    pub(crate) fn take_from(name: &HeaderName, headers: &mut HeaderMap) -> Presented {
        let mut given = headers.get_all(name).iter();
        let one = match (given.next(), given.next()) {
            (Some(token), None) => HeaderValue::from_bytes(&[b"Bearer ", token.as_bytes()].concat()).ok(),
            _ => None,
        };
        headers.remove(name);
        headers.remove(header::AUTHORIZATION);
        if let Some(token) = one {
            headers.insert(header::AUTHORIZATION, token);
        }
        Presented::take(None, headers)
    }
}

/// The contents of the files when they were last valid.
pub struct Credentials {
    config: ApiConfig,
    in_force: RwLock<InForce>,
    generation: watch::Sender<u64>,
    clock: Clock,
}

/// Returns the time.
type Clock = Box<dyn Fn() -> SystemTime + Send + Sync>;

/// TLS settings that differ in the versions of HTTP that they offer.
#[derive(Clone)]
struct Tls {
    http1: TlsAcceptor,
    http1_and_2: TlsAcceptor,
}

#[derive(Clone)]
struct InForce {
    /// `None`: connections are not encrypted, which is allowed only on this host.
    tls: Option<Tls>,
    tokens: Option<Arc<Tokens>>,
    /// `None`: every caller with a certificate is an administrator.
    client_roles: Option<Arc<ClientRoles>>,
}

impl Credentials {
    /// Reads the files that a configuration names. Blocks.
    ///
    /// # Errors
    /// `config-invalid`: one of them is missing, or cannot be used.
    pub fn read(config: &ApiConfig) -> Result<Credentials, Error> {
        Credentials::read_by(config, Box::new(SystemTime::now))
    }

    /// The same with another clock.
    pub(super) fn read_by(config: &ApiConfig, clock: Clock) -> Result<Credentials, Error> {
        let in_force = InForce::read(config)?;
        in_force.warn_of_administrators(config);
        Ok(Credentials {
            config: config.clone(),
            in_force: RwLock::new(in_force),
            generation: watch::Sender::new(0),
            clock,
        })
    }

    /// Reads the files again. From now on their contents decide about every request, including those on existing connections, and callers
    /// that lost access lose their open streams. A connection keeps the certificate of its handshake.
    ///
    /// # Errors
    /// Those of [`Credentials::read`]; nothing has changed then.
    pub fn reload(&self) -> Result<(), Error> {
        let read = InForce::read(&self.config)?;
        read.warn_of_administrators(&self.config);
        *self.in_force.writing() = read;
        self.generation.send_modify(|generation| *generation += 1);
        Ok(())
    }

    /// The TLS settings for a new connection, which offer these versions of HTTP; `None` if connections are not encrypted.
    pub fn tls(&self, versions: Versions) -> Option<TlsAcceptor> {
        let tls = self.in_force().tls?;
        Some(match versions {
            Versions::Http1 => tls.http1,
            Versions::Http1And2 => tls.http1_and_2,
        })
    }

    /// How often they were reloaded: a caller that waits for a change watches this.
    pub fn generation(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }

    /// The time by which tokens expire.
    pub fn now(&self) -> SystemTime {
        (self.clock)()
    }

    /// Authenticates a caller: by its certificate, if that has a role, or else by its token.
    ///
    /// # Errors
    /// [`ApiCode::Unauthenticated`]: neither is known here. [`ApiCode::NoRole`]: the certificate has no role here.
    pub fn admit(&self, presented: &Presented) -> Result<Admission, Refusal> {
        let in_force = self.in_force();
        let granted = |certificate: &ClientCertificate| match &in_force.client_roles {
            None => Ok(Peer::certificate(certificate.whole(), Grant::admin())),
            Some(roles) => roles.of(certificate).map(|(name, grant)| {
                // By name, so that a renewed certificate is still the same caller.
                Peer::certificate(name.to_string().as_bytes(), grant.clone())
            }),
        };
        let no_role = match presented.certificate.as_deref().map(granted) {
            Some(Ok(peer)) => return Ok(Admission { peer, until: None }),
            Some(Err(why)) => Some(why),
            None => None,
        };
        let tokens = in_force.tokens.as_ref();
        let by_token = tokens.and_then(|tokens| tokens.bearer(&presented.headers, self.now()));
        by_token.ok_or_else(|| match no_role {
            Some(why) => Refusal::new(ApiCode::NoRole, format!("this certificate has no role: {why}")),
            None => {
                let what = "neither a certificate nor a token that is known here came with the request";
                Refusal::new(ApiCode::Unauthenticated, what)
            }
        })
    }

    fn in_force(&self) -> InForce {
        self.in_force.reading().clone()
    }
}

impl InForce {
    fn read(config: &ApiConfig) -> Result<InForce, Error> {
        let tls = match (&config.certificate, &config.key) {
            (Some(certificate), Some(key)) => Some(acceptor(config, certificate, key)?),
            _ => None,
        };
        let tokens = config.tokens.as_deref().map(Tokens::read).transpose()?;
        let client_roles = config
            .client_roles
            .as_deref()
            .map(ClientRoles::read)
            .transpose()?;
        Ok(InForce {
            tls,
            tokens: tokens.map(Arc::new),
            client_roles: client_roles.map(Arc::new),
        })
    }

    /// Warns about administrators by default: without roles, every caller is one.
    fn warn_of_administrators(&self, config: &ApiConfig) {
        if config.client_ca.is_some() && self.client_roles.is_none() {
            tracing::warn!(
                "[api] names client_ca and no client_roles: whoever shows a certificate of it is an administrator of this node"
            );
        }
        let names = self
            .tokens
            .as_ref()
            .map_or(&[][..], |tokens| tokens.without_role());
        if !names.is_empty() {
            tracing::warn!(
                "tokens without role= are administrators of this node: {}",
                names.join(", ")
            );
        }
    }
}

fn acceptor(config: &ApiConfig, certificate: &Path, key: &Path) -> Result<Tls, Error> {
    let unusable = |path: &Path, why: &dyn std::fmt::Display| {
        let what = format!("[api]: {} cannot be used: {why}", path.display());
        Error::new(ErrorKind::ConfigInvalid, what)
    };
    let chain = |path: &Path| {
        let chain = CertificateDer::pem_file_iter(path).map_err(|e| unusable(path, &e))?;
        let chain: Vec<_> = chain.collect::<Result<_, _>>().map_err(|e| unusable(path, &e))?;
        match chain.is_empty() {
            true => Err(unusable(path, &"there is no certificate in it")),
            false => Ok(chain),
        }
    };
    let provider: Arc<CryptoProvider> = rustls::crypto::ring::default_provider().into();
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|e| unusable(certificate, &e))?;
    let builder = match &config.client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for root in chain(path)? {
                roots.add(root).map_err(|e| unusable(path, &e))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider);
            let verifier = match config.tokens {
                // A caller without a certificate may have a token.
                Some(_) => verifier.allow_unauthenticated(),
                None => verifier,
            };
            builder.with_client_cert_verifier(verifier.build().map_err(|e| unusable(path, &e))?)
        }
    };
    let private = PrivateKeyDer::from_pem_file(key).map_err(|e| unusable(key, &e))?;
    let tls = builder
        .with_single_cert(chain(certificate)?, private)
        .map_err(|e| unusable(certificate, &e))?;
    let offering = |versions: Versions| {
        let mut tls = tls.clone();
        tls.alpn_protocols = versions.names();
        TlsAcceptor::from(Arc::new(tls))
    };
    Ok(Tls {
        http1: offering(Versions::Http1),
        http1_and_2: offering(Versions::Http1And2),
    })
}
