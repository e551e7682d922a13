//! The address of another server, and connections to it.
//!
//! Invariant: a connection is encrypted, and the server has shown a certificate for its name, unless the server is on this host's loopback.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderValue, Uri};
use hickory_resolver::TokioResolver;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::OnceCell;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// How long a server may take to accept a connection, its name's resolution and the TLS handshake included.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// A connection.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// Whose certificates are trusted.
#[derive(Clone)]
pub struct Trust {
    http1: TlsConnector,
    http2: TlsConnector,
}

impl std::fmt::Debug for Trust {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trust").finish_non_exhaustive()
    }
}

impl Trust {
    /// The authorities in a file, PEM. Blocks.
    ///
    /// # Errors
    /// The file cannot be read, or has no certificate that can be an authority's.
    pub fn read(file: &Path) -> Result<Trust, String> {
        let unusable = |why: &dyn std::fmt::Display| format!("{} cannot be used: {why}", file.display());
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(file).map_err(|e| unusable(&e))? {
            let certificate = certificate.map_err(|e| unusable(&e))?;
            roots.add(certificate).map_err(|e| unusable(&e))?;
        }
        if roots.is_empty() {
            return Err(unusable(&"there is no certificate in it"));
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|e| unusable(&e))?;
        let config = builder.with_root_certificates(roots).with_no_client_auth();
        let speaking = |version: &[u8]| {
            let mut config = config.clone();
            config.alpn_protocols = vec![version.to_vec()];
            TlsConnector::from(Arc::new(config))
        };
        Ok(Trust {
            http1: speaking(b"http/1.1"),
            http2: speaking(b"h2"),
        })
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Endpoint {
    host: Host,
    port: u16,
    /// What requests call it.
    authority: HeaderValue,
    /// `None`: it is on the loopback.
    tls: Option<(Trust, ServerName<'static>)>,
}

impl PartialEq for Endpoint {
    /// Whether both are the same server with the same name. All endpoints of one kind trust the same authorities.
    fn eq(&self, other: &Endpoint) -> bool {
        let certified = |of: &Endpoint| of.tls.as_ref().map(|(_, name)| name.clone());
        (&self.host, self.port, &self.authority) == (&other.host, other.port, &other.authority)
            && certified(self) == certified(other)
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Host {
    Address(IpAddr),
    Name(Name),
}

/// A name in DNS, and what resolves it: without glibc's loadable modules, which a static binary lacks. It caches answers for their time.
#[derive(Clone)]
struct Name {
    name: String,
    resolver: Arc<OnceCell<TokioResolver>>,
}

impl PartialEq for Name {
    fn eq(&self, other: &Name) -> bool {
        self.name == other.name
    }
}

impl std::fmt::Debug for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Name").field(&self.name).finish()
    }
}

impl Name {
    async fn addresses(&self, port: u16) -> Result<Vec<SocketAddr>, String> {
        let failed = |e: &dyn std::fmt::Display| format!("{} is not resolved: {e}", self.name);
        let make = || async { TokioResolver::builder_tokio()?.build() };
        let resolver = self.resolver.get_or_try_init(make).await;
        let resolver = resolver.map_err(|e| failed(&e))?;
        let found = resolver.lookup_ip(self.name.as_str()).await;
        let found = found.map_err(|e| failed(&e))?;
        Ok(found.iter().map(|address| (address, port).into()).collect())
    }
}

impl Endpoint {
    /// Reads the URL of a server: `https://HOST[:PORT]`, or `http://` and a loopback address.
    ///
    /// # Errors
    /// It is something else, or there is no `trust` for `https`.
    pub fn parse(url: &str, trust: Option<&Trust>) -> Result<Endpoint, String> {
        let wrong = || format!("{url:?} is no URL of a node, such as https://a.example:3000");
        let uri: Uri = url.parse().map_err(|_| wrong())?;
        let (scheme, authority) = (uri.scheme_str(), uri.authority().ok_or_else(wrong)?);
        if authority.as_str().contains('@') || !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(wrong());
        }
        let name = authority.host().trim_start_matches('[').trim_end_matches(']');
        let host = match name.parse() {
            Ok(address) => Host::Address(address),
            Err(_) => Host::Name(Name {
                name: name.to_owned(),
                resolver: Arc::default(),
            }),
        };
        let tls = match (scheme, trust, &host) {
            (Some("https"), Some(trust), _) => {
                let name = ServerName::try_from(name.to_owned()).map_err(|_| wrong())?;
                Some((trust.clone(), name))
            }
            (Some("https"), None, _) => {
                return Err(format!(
                    "{url} needs ca: the authorities that sign its certificate"
                ));
            }
            (Some("http"), _, Host::Address(address)) if address.is_loopback() => None,
            (Some("http"), ..) => {
                return Err(format!("{url}: without TLS only loopback addresses are accepted"));
            }
            _ => return Err(wrong()),
        };
        let port = authority
            .port_u16()
            .unwrap_or(if tls.is_some() { 443 } else { 80 });
        Ok(Endpoint {
            host,
            port,
            authority: HeaderValue::try_from(authority.as_str()).map_err(|_| wrong())?,
            tls,
        })
    }

    /// The server at an address, whose certificate has another name.
    ///
    /// # Errors
    /// This is no name in certificates.
    pub fn at(address: SocketAddr, name: &str, trust: &Trust) -> Result<Endpoint, String> {
        let wrong = || format!("server_name is {name:?}, which is not a host name");
        Ok(Endpoint {
            host: Host::Address(address.ip()),
            port: address.port(),
            authority: HeaderValue::try_from(name).map_err(|_| wrong())?,
            tls: Some((
                trust.clone(),
                ServerName::try_from(name.to_owned()).map_err(|_| wrong())?,
            )),
        })
    }

    /// What requests call it: the value of `Host`.
    pub fn authority(&self) -> &HeaderValue {
        &self.authority
    }

    /// Opens a connection for HTTP/1.1.
    ///
    /// # Errors
    /// Why there is none: it is refused, comes too late, or the certificate is not the server's.
    pub async fn connect(&self) -> Result<Box<dyn Stream>, String> {
        self.connect_for(false).await
    }

    /// Opens a connection for HTTP/2, or for HTTP/1.1.
    ///
    /// # Errors
    /// Those of [`Endpoint::connect`]; the server does not speak HTTP/2.
    pub async fn connect_for(&self, is_http2: bool) -> Result<Box<dyn Stream>, String> {
        match timeout(CONNECT_LIMIT, self.open(is_http2)).await {
            Ok(opened) => opened,
            Err(_) => Err(format!("no connection within {} s", CONNECT_LIMIT.as_secs())),
        }
    }

    async fn open(&self, is_http2: bool) -> Result<Box<dyn Stream>, String> {
        let addresses = match &self.host {
            Host::Address(address) => vec![(*address, self.port).into()],
            Host::Name(name) => name.addresses(self.port).await?,
        };
        let stream = TcpStream::connect(addresses.as_slice()).await;
        let stream = stream.map_err(|e| e.to_string())?;
        stream.set_nodelay(true).map_err(|e| e.to_string())?;
        match &self.tls {
            None => Ok(Box::new(stream)),
            Some((trust, name)) => {
                let tls = if is_http2 { &trust.http2 } else { &trust.http1 };
                let encrypted = tls.connect(name.clone(), stream).await;
                Ok(Box::new(encrypted.map_err(|e| e.to_string())?))
            }
        }
    }
}

#[cfg(test)]
#[path = "endpoint_test.rs"]
mod tests;
