use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use axum::body::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::*;
use crate::api::fake::Fake;
use crate::api::request_gate::{Bounds, Gate};
use crate::api::router::router;

#[path = "lease_test.rs"]
mod lease;
#[path = "tcp_roles_test.rs"]
mod roles;

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

fn certificate_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/certificates")
        .join(name)
}

/// A file with one token, accessible only to its owner.
fn tokens() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("tester {TOKEN}\n")).unwrap();
    file
}

fn config(tls: bool, client_ca: bool, tokens: Option<&tempfile::NamedTempFile>) -> ApiConfig {
    ApiConfig {
        listen: Some(([127, 0, 0, 1], 0).into()),
        certificate: tls.then(|| certificate_file("server.pem")),
        key: tls.then(|| certificate_file("server.key")),
        client_ca: client_ca.then(|| certificate_file("ca.pem")),
        client_roles: None,
        tokens: tokens.map(|file| file.path().to_owned()),
        separate_tenants: false,
    }
}

/// Serves until it is dropped.
struct Served {
    address: SocketAddr,
    credentials: Arc<Credentials>,
    stop: watch::Sender<()>,
    serving: tokio::task::JoinHandle<()>,
}

async fn serve(config: &ApiConfig) -> Served {
    serve_at(Tcp::open(config).await.unwrap().unwrap())
}

fn serve_at(tcp: Tcp) -> Served {
    let (address, credentials) = (tcp.address().unwrap(), tcp.credentials());
    let (_fake, daemon) = Fake::daemon(true);
    let routes = router(daemon.clone(), Gate::new(Bounds::default()));
    let (stop, stopped) = watch::channel(());
    let serving = async move { tcp.serve(&daemon, routes, stopped, Duration::from_secs(5)).await };
    let serving = tokio::spawn(serving);
    Served {
        address,
        credentials,
        stop,
        serving,
    }
}

async fn ask(mut stream: impl AsyncRead + AsyncWrite + Unpin, fields: &str) -> std::io::Result<String> {
    let request = format!("GET /v1/sandboxes HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{fields}\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(String::from_utf8(answer).unwrap())
}

/// Opens a connection as a client, with a certificate if one is given.
async fn tls(served: &Served, certificate: Option<&str>) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    let ca = CertificateDer::from_pem_file(certificate_file("ca.pem")).unwrap();
    roots.add(ca).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let config = match certificate {
        None => builder.with_no_client_auth(),
        Some(name) => {
            let chain = CertificateDer::from_pem_file(certificate_file(&format!("{name}.pem"))).unwrap();
            let key = PrivateKeyDer::from_pem_file(certificate_file(&format!("{name}.key"))).unwrap();
            builder.with_client_auth_cert(vec![chain], key).unwrap()
        }
    };
    let stream = TcpStream::connect(served.address).await?;
    let name = ServerName::from(served.address.ip());
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

/// Sends one request as a client, with a certificate if one is given.
async fn over_tls(served: &Served, certificate: Option<&str>, fields: &str) -> std::io::Result<String> {
    ask(tls(served, certificate).await?, fields).await
}

/// A connection that is kept for many requests.
struct Kept(SendRequest<Full<Bytes>>);

impl Kept {
    async fn over(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Kept {
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (sender, connection) = handshake.unwrap();
        tokio::spawn(connection);
        Kept(sender)
    }

    async fn plain(served: &Served) -> Kept {
        Kept::over(TcpStream::connect(served.address).await.unwrap()).await
    }

    /// A request's status, and the answer.
    async fn ask(&mut self, method: &str, path: &str, token: Option<&str>, body: &str) -> (u16, String) {
        let request = hyper::Request::builder()
            .method(method)
            .uri(path)
            .header("host", "x");
        let request = request.header("content-type", "application/json");
        let request = match token {
            Some(token) => request.header("authorization", format!("Bearer {token}")),
            None => request,
        };
        let request = request.body(Full::new(Bytes::from(body.to_owned()))).unwrap();
        self.0.ready().await.unwrap();
        let response = self.0.send_request(request).await.unwrap();
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }
}

fn bearer(token: &str) -> String {
    format!("authorization: Bearer {token}\r\n")
}

#[tokio::test]
async fn a_token_is_asked_for_and_taken() {
    let file = tokens();
    let served = serve(&config(false, false, Some(&file))).await;
    let plain = async |fields: &str| {
        let stream = TcpStream::connect(served.address).await.unwrap();
        ask(stream, fields).await.unwrap()
    };
    assert!(plain(&bearer(TOKEN)).await.starts_with("HTTP/1.1 200"));
    for wrong in [
        "",
        "authorization: Basic eDp5\r\n",
        &bearer(&TOKEN[1..]),
        &bearer(TOKEN).repeat(2),
    ] {
        let answer = plain(wrong).await;
        assert!(answer.starts_with("HTTP/1.1 401"), "{answer}");
        assert!(
            answer.contains("www-authenticate: Bearer") && answer.contains(r#""code":"unauthenticated""#)
        );
        assert!(answer.contains(r#""instance":"/v1/sandboxes""#), "{answer}");
    }
    drop(served.stop);
    served.serving.await.unwrap();
    // A process that another test is starting may hold a copy of the listener for a moment.
    while TcpStream::connect(served.address).await.is_ok() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn only_certificates_of_the_configured_authority_are_accepted() {
    let served = serve(&config(true, true, None)).await;
    let answer = over_tls(&served, Some("client"), "").await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(over_tls(&served, None, "").await.is_err());
    assert!(over_tls(&served, Some("stranger"), "").await.is_err());
    assert!(over_tls(&served, Some("expired"), "").await.is_err());
    // A connection without TLS gets no answer.
    let stream = TcpStream::connect(served.address).await.unwrap();
    let answer = ask(stream, "").await.unwrap_or_default();
    assert!(!answer.contains("200"), "{answer}");
}

#[tokio::test]
async fn where_both_are_known_either_will_do() {
    let file = tokens();
    let served = serve(&config(true, true, Some(&file))).await;
    for (certificate, fields, status) in [
        (Some("client"), String::new(), "200"),
        (Some("client"), bearer("wrong"), "200"),
        (None, bearer(TOKEN), "200"),
        (None, bearer("wrong"), "401"),
        (None, String::new(), "401"),
    ] {
        let answer = over_tls(&served, certificate, &fields).await.unwrap();
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")),
            "{certificate:?} {fields}: {answer}"
        );
    }
    assert!(over_tls(&served, Some("stranger"), &bearer(TOKEN)).await.is_err());
}

#[tokio::test]
async fn reload_changes_credentials_unless_a_file_is_invalid() {
    let (file, place) = (tokens(), tempfile::tempdir().unwrap());
    let own = |name: &str| place.path().join(name);
    let put = |from: &str| {
        std::fs::copy(certificate_file(&format!("{from}.pem")), own("pem")).unwrap();
        std::fs::copy(certificate_file(&format!("{from}.key")), own("key")).unwrap();
    };
    put("server");
    let served = serve(&ApiConfig {
        certificate: Some(own("pem")),
        key: Some(own("key")),
        ..config(true, true, Some(&file))
    })
    .await;
    let answers = async |token: &str| over_tls(&served, None, &bearer(token)).await.unwrap();
    let other = TOKEN.replace('0', "x");
    assert!(answers(TOKEN).await.starts_with("HTTP/1.1 200"));
    assert!(answers(&other).await.starts_with("HTTP/1.1 401"));

    std::fs::write(file.path(), format!("tester {other}\n")).unwrap();
    assert!(answers(TOKEN).await.starts_with("HTTP/1.1 200"), "nobody said so");
    served.credentials.reload().unwrap();
    assert!(answers(TOKEN).await.starts_with("HTTP/1.1 401"));
    assert!(answers(&other).await.starts_with("HTTP/1.1 200"));

    // The tokens are valid, but not sufficient alone.
    std::fs::write(file.path(), format!("tester {TOKEN}\n")).unwrap();
    std::fs::write(own("pem"), "no certificate").unwrap();
    let failure = served.credentials.reload().unwrap_err();
    assert!(failure.to_string().contains("no certificate"), "{failure}");
    assert!(answers(&other).await.starts_with("HTTP/1.1 200"));
    put("server");
    std::fs::write(file.path(), "tester").unwrap();
    let failure = served.credentials.reload().unwrap_err();
    assert!(failure.to_string().contains("line 1"), "{failure}");
    assert!(answers(&other).await.starts_with("HTTP/1.1 200"));

    std::fs::write(file.path(), format!("tester {TOKEN}\n")).unwrap();
    put("stranger");
    served.credentials.reload().unwrap();
    assert!(
        over_tls(&served, None, &bearer(TOKEN)).await.is_err(),
        "it is another's"
    );
    put("server");
    served.credentials.reload().unwrap();
    assert!(answers(TOKEN).await.starts_with("HTTP/1.1 200"));
}

/// Tokens of two tenants: one of each role, and an expired one.
const OPERATE: &str = "operate-acme-000000000000000000";
const READ: &str = "read-acme-111111111111111111111";
const OTHER: &str = "operate-other-2222222222222222222";
const EXPIRED: &str = "operate-acme-3333333333333333333";

fn role_tokens() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    let lines = [
        format!("admin {TOKEN}"),
        format!("operate {OPERATE} role=operate tenant=acme"),
        format!("read {READ} tenant=acme role=read"),
        format!("other {OTHER} role=operate tenant=other expires=9999-12-31"),
        format!("expired {EXPIRED} role=operate tenant=acme expires=2020-01-01"),
    ];
    std::fs::write(file.path(), lines.join("\n")).unwrap();
    file
}

const CREATE: &str = r#"{"image":"x","cpus":1,"memory_mib":128,"name":"web"}"#;

/// A file with the roles of certificates.
fn client_roles(lines: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), lines).unwrap();
    file
}

const BUILDER: &str = "uri:spiffe://cluster.example/ns/acme/sa/builder role=operate tenant=acme\n";

/// Opening fails, with this text in the error and no token.
async fn is_refused(config: &ApiConfig, why: &str) {
    let failure = match Tcp::open(config).await {
        Err(failure) => failure,
        Ok(_) => panic!("{why}"),
    };
    assert_eq!(failure.kind, ErrorKind::ConfigInvalid);
    assert!(failure.to_string().contains(why), "{why}: {failure}");
    assert!(!failure.to_string().contains(TOKEN));
}

#[tokio::test]
async fn incomplete_configuration_is_refused() {
    let file = tokens();
    assert!(Tcp::open(&ApiConfig::default()).await.unwrap().is_none());
    is_refused(&config(false, false, None), "who may ask").await;
    is_refused(&config(true, false, None), "who may ask").await;
    is_refused(&config(false, true, None), "certificate and key").await;
    let anywhere = ApiConfig {
        listen: Some(([0, 0, 0, 0], 0).into()),
        ..config(false, false, Some(&file))
    };
    is_refused(&anywhere, "loopback").await;
    let roles_alone = ApiConfig {
        client_roles: Some("/nowhere".into()),
        ..config(true, false, Some(&file))
    };
    is_refused(&roles_alone, "goes client_ca").await;
    let mut without_address = config(true, true, Some(&file));
    without_address.listen = None;
    is_refused(&without_address, "listen").await;
    let mut without_key = config(true, true, Some(&file));
    without_key.key = None;
    is_refused(&without_key, "go together").await;
}

#[tokio::test]
async fn files_that_cannot_be_used_are_refused() {
    let file = tokens();
    let open = tokens();
    std::fs::set_permissions(open.path(), PermissionsExt::from_mode(0o644)).unwrap();
    is_refused(&config(false, false, Some(&open)), "mode is 644").await;
    let refused = async |change: &dyn Fn(&mut ApiConfig), why: &str| {
        let mut changed = config(true, true, Some(&file));
        change(&mut changed);
        is_refused(&changed, why).await;
    };
    let nowhere = || Some(PathBuf::from("/nowhere"));
    refused(&|c| c.key = Some(certificate_file("server.pem")), "server.pem").await;
    refused(&|c| c.key = Some(certificate_file("client.key")), "server.pem").await;
    refused(
        &|c| c.certificate = Some(certificate_file("server.key")),
        "no certificate",
    )
    .await;
    refused(&|c| c.client_ca = nowhere(), "/nowhere").await;
    refused(&|c| c.client_roles = nowhere(), "/nowhere").await;
    refused(&|c| c.client_roles = Some(file.path().to_owned()), "line 1").await;
    refused(&|c| c.tokens = nowhere(), "/nowhere").await;
}
