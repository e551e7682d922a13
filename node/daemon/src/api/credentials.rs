//! Who may ask over TCP, and by what this end is known: what the files that `[api]` names say, now.
//!
//! Invariant: what is in force was read whole, from files all of which were good; files that are not leave it in force.

use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::SystemTime;

use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ServerConfig, WebPkiClientVerifier};
use thaw_sandbox::config::api::ApiConfig;
use thaw_sandbox::exit::{ExitCode, Failure};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use super::client_roles::{ClientCertificate, ClientRoles};
use super::grant::Grant;
use super::lease::Shown;
use super::peer::{Admission, Peer};
use super::problem::{ApiCode, Refusal};
use super::tokens::Tokens;

/// What the files said when they were last read and good.
pub struct Credentials {
    config: ApiConfig,
    in_force: RwLock<InForce>,
    generation: watch::Sender<u64>,
    clock: Clock,
}

/// What says the time.
type Clock = Box<dyn Fn() -> SystemTime + Send + Sync>;

#[derive(Clone)]
struct InForce {
    /// Without it, what is said can be read on the way: only on this host.
    tls: Option<TlsAcceptor>,
    tokens: Option<Arc<Tokens>>,
    /// Without it, every certificate is an administrator's.
    client_roles: Option<Arc<ClientRoles>>,
}

impl Credentials {
    /// Reads the files that a configuration names. Blocks.
    ///
    /// # Errors
    /// `config-invalid`: one of them is missing, or cannot be used.
    pub fn read(config: &ApiConfig) -> Result<Credentials, Failure> {
        Credentials::read_by(config, Box::new(SystemTime::now))
    }

    /// The same by another clock.
    pub(super) fn read_by(config: &ApiConfig, clock: Clock) -> Result<Credentials, Failure> {
        let in_force = InForce::read(config)?;
        in_force.tell(config);
        Ok(Credentials {
            config: config.clone(),
            in_force: RwLock::new(in_force),
            generation: watch::Sender::new(0),
            clock,
        })
    }

    /// Reads them again: from now on they say who may ask, also on connections there are, and end what callers have open that may not
    /// ask any more ([`super::lease`]); what a connection showed in its handshake stays known of it.
    ///
    /// # Errors
    /// As [`Credentials::read`]; nothing has changed then.
    pub fn read_again(&self) -> Result<(), Failure> {
        let read = InForce::read(&self.config)?;
        read.tell(&self.config);
        *self.in_force.write().unwrap_or_else(PoisonError::into_inner) = read;
        self.generation.send_modify(|generation| *generation += 1);
        Ok(())
    }

    /// How a connection that comes now is secured, if it is.
    pub fn tls(&self) -> Option<TlsAcceptor> {
        self.in_force().tls
    }

    /// Counts how often they were read again: whoever waits for a change sees it by that.
    pub fn generation(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }

    /// What time it is for expiries.
    pub fn now(&self) -> SystemTime {
        (self.clock)()
    }

    /// Who asks: whoever the certificate is of that the connection showed, if that has a role, or else whose token the request brings.
    ///
    /// # Errors
    /// [`ApiCode::Unauthenticated`]: neither is known. [`ApiCode::NoRole`]: the certificate has no role here.
    pub fn admit(&self, shown: &Shown) -> Result<Admission, Refusal> {
        let in_force = self.in_force();
        let granted = |certificate: &ClientCertificate| match &in_force.client_roles {
            None => Ok(Peer::certificate(certificate.whole(), Grant::admin())),
            Some(roles) => roles.of(certificate).map(|(name, grant)| {
                // Whoever has that name: a certificate that is renewed is its owner's as before.
                Peer::certificate(name.to_string().as_bytes(), grant.clone())
            }),
        };
        let no_role = match shown.certificate.as_deref().map(granted) {
            Some(Ok(peer)) => return Ok(Admission { peer, until: None }),
            Some(Err(why)) => Some(why),
            None => None,
        };
        let tokens = in_force.tokens.as_ref();
        let by_token = tokens.and_then(|tokens| tokens.bearer(&shown.headers, self.now()));
        by_token.ok_or_else(|| match no_role {
            Some(why) => Refusal::new(ApiCode::NoRole, format!("this certificate has no role: {why}")),
            None => {
                let what = "neither a certificate nor a token that is known here came with the request";
                Refusal::new(ApiCode::Unauthenticated, what)
            }
        })
    }

    fn in_force(&self) -> InForce {
        self.in_force
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl InForce {
    fn read(config: &ApiConfig) -> Result<InForce, Failure> {
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

    /// Says in the log who is an administrator because nothing says otherwise, as all callers were before there were roles.
    fn tell(&self, config: &ApiConfig) {
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

fn acceptor(config: &ApiConfig, certificate: &Path, key: &Path) -> Result<TlsAcceptor, Failure> {
    let unusable = |path: &Path, why: &dyn std::fmt::Display| {
        let what = format!("[api]: {} cannot be used: {why}", path.display());
        Failure::new(ExitCode::ConfigInvalid, what)
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
                // Who has none may bring a token.
                Some(_) => verifier.allow_unauthenticated(),
                None => verifier,
            };
            builder.with_client_cert_verifier(verifier.build().map_err(|e| unusable(path, &e))?)
        }
    };
    let private = PrivateKeyDer::from_pem_file(key).map_err(|e| unusable(key, &e))?;
    let mut tls = builder
        .with_single_cert(chain(certificate)?, private)
        .map_err(|e| unusable(certificate, &e))?;
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(tls)))
}
