//! Who may ask over TCP, and by what this end is known: what the files that `[api]` names say, now.
//!
//! Invariant: what is in force was read whole, from files all of which were good; files that are not leave it in force.

use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ServerConfig, WebPkiClientVerifier};
use tokio_rustls::TlsAcceptor;

use super::tokens::Tokens;
use crate::config::api::ApiConfig;
use crate::exit::{ExitCode, Failure};

/// What the files said when they were last read and good.
pub struct Credentials {
    config: ApiConfig,
    now: RwLock<InForce>,
}

#[derive(Clone)]
struct InForce {
    /// Without it, what is said can be read on the way: only on this host.
    tls: Option<TlsAcceptor>,
    tokens: Option<Arc<Tokens>>,
}

impl Credentials {
    /// Reads the files that a configuration names. Blocks.
    ///
    /// # Errors
    /// `config-invalid`: one of them is missing, or cannot be used.
    pub fn read(config: &ApiConfig) -> Result<Credentials, Failure> {
        Ok(Credentials {
            now: RwLock::new(InForce::read(config)?),
            config: config.clone(),
        })
    }

    /// Reads them again: from now on they say who may ask, also on connections there are; what a connection showed in its
    /// handshake stays known of it.
    ///
    /// # Errors
    /// As [`Credentials::read`]; nothing has changed then.
    pub fn read_again(&self) -> Result<(), Failure> {
        let read = InForce::read(&self.config)?;
        *self.now.write().unwrap_or_else(PoisonError::into_inner) = read;
        Ok(())
    }

    /// How a connection that comes now is secured, if it is.
    pub fn tls(&self) -> Option<TlsAcceptor> {
        self.now().tls
    }

    /// The tokens that are good now, if any are.
    pub fn tokens(&self) -> Option<Arc<Tokens>> {
        self.now().tokens
    }

    fn now(&self) -> InForce {
        self.now.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl InForce {
    fn read(config: &ApiConfig) -> Result<InForce, Failure> {
        let tls = match (&config.certificate, &config.key) {
            (Some(certificate), Some(key)) => Some(acceptor(config, certificate, key)?),
            _ => None,
        };
        let tokens = config.tokens.as_deref().map(Tokens::read).transpose()?;
        Ok(InForce {
            tls,
            tokens: tokens.map(Arc::new),
        })
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
