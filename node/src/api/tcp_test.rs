use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_rustls::TlsConnector;

use super::*;
use crate::api::fake::Fake;
use crate::api::limits::{Bounds, Gate};
use crate::api::router::router;

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

fn testing(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("src/api/testing")
        .join(name)
}

/// A file of one token, which is its owner's alone.
fn tokens() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("tester {TOKEN}\n")).unwrap();
    file
}

fn config(tls: bool, client_ca: bool, tokens: Option<&tempfile::NamedTempFile>) -> ApiConfig {
    ApiConfig {
        listen: Some(([127, 0, 0, 1], 0).into()),
        certificate: tls.then(|| testing("server.pem")),
        key: tls.then(|| testing("server.key")),
        client_ca: client_ca.then(|| testing("ca.pem")),
        tokens: tokens.map(|file| file.path().to_owned()),
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
    let tcp = Tcp::open(config).await.unwrap().unwrap();
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

/// As a client with a certificate, or none.
async fn over_tls(served: &Served, certificate: Option<&str>, fields: &str) -> std::io::Result<String> {
    let mut roots = RootCertStore::empty();
    let ca = CertificateDer::from_pem_file(testing("ca.pem")).unwrap();
    roots.add(ca).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let config = match certificate {
        None => builder.with_no_client_auth(),
        Some(name) => {
            let chain = CertificateDer::from_pem_file(testing(&format!("{name}.pem"))).unwrap();
            let key = PrivateKeyDer::from_pem_file(testing(&format!("{name}.key"))).unwrap();
            builder.with_client_auth_cert(vec![chain], key).unwrap()
        }
    };
    let stream = TcpStream::connect(served.address).await?;
    let name = ServerName::from(served.address.ip());
    let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
    ask(stream, fields).await
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
    assert!(TcpStream::connect(served.address).await.is_err());
}

#[tokio::test]
async fn a_certificate_of_the_right_hand_is_enough_and_any_other_is_too_little() {
    let served = serve(&config(true, true, None)).await;
    let answer = over_tls(&served, Some("client"), "").await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(over_tls(&served, None, "").await.is_err());
    assert!(over_tls(&served, Some("stranger"), "").await.is_err());
    // What is no TLS at all is not answered.
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
async fn who_may_ask_is_read_again_and_what_cannot_be_used_changes_nothing() {
    let (file, place) = (tokens(), tempfile::tempdir().unwrap());
    let own = |name: &str| place.path().join(name);
    let put = |from: &str| {
        std::fs::copy(testing(&format!("{from}.pem")), own("pem")).unwrap();
        std::fs::copy(testing(&format!("{from}.key")), own("key")).unwrap();
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
    served.credentials.read_again().unwrap();
    assert!(answers(TOKEN).await.starts_with("HTTP/1.1 401"));
    assert!(answers(&other).await.starts_with("HTTP/1.1 200"));

    // The tokens are good, and are not taken alone.
    std::fs::write(file.path(), format!("tester {TOKEN}\n")).unwrap();
    std::fs::write(own("pem"), "no certificate").unwrap();
    let failure = served.credentials.read_again().unwrap_err();
    assert!(failure.to_string().contains("no certificate"), "{failure}");
    assert!(answers(&other).await.starts_with("HTTP/1.1 200"));
    put("server");
    std::fs::write(file.path(), "tester").unwrap();
    let failure = served.credentials.read_again().unwrap_err();
    assert!(failure.to_string().contains("line 1"), "{failure}");
    assert!(answers(&other).await.starts_with("HTTP/1.1 200"));

    std::fs::write(file.path(), format!("tester {TOKEN}\n")).unwrap();
    put("stranger");
    served.credentials.read_again().unwrap();
    assert!(
        over_tls(&served, None, &bearer(TOKEN)).await.is_err(),
        "it is another's"
    );
    put("server");
    served.credentials.read_again().unwrap();
    assert!(answers(TOKEN).await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn half_of_a_configuration_is_refused() {
    let file = tokens();
    assert!(Tcp::open(&ApiConfig::default()).await.unwrap().is_none());
    let anywhere = |config: ApiConfig| ApiConfig {
        listen: Some(([0, 0, 0, 0], 0).into()),
        ..config
    };
    let open = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(open.path(), format!("tester {TOKEN}\n")).unwrap();
    std::fs::set_permissions(open.path(), PermissionsExt::from_mode(0o644)).unwrap();
    let good = || config(true, true, Some(&file));
    for (config, why) in [
        (config(false, false, None), "who may ask"),
        (config(true, false, None), "who may ask"),
        (config(false, true, None), "certificate and key"),
        (anywhere(config(false, false, Some(&file))), "loopback"),
        (config(false, false, Some(&open)), "mode is 644"),
        (
            ApiConfig {
                listen: None,
                ..good()
            },
            "listen",
        ),
        (ApiConfig { key: None, ..good() }, "go together"),
        (
            ApiConfig {
                key: Some(testing("server.pem")),
                ..good()
            },
            "server.pem",
        ),
        (
            ApiConfig {
                key: Some(testing("client.key")),
                ..good()
            },
            "server.pem",
        ),
        (
            ApiConfig {
                certificate: Some(testing("server.key")),
                ..good()
            },
            "no certificate",
        ),
        (
            ApiConfig {
                client_ca: Some("/nowhere".into()),
                ..good()
            },
            "/nowhere",
        ),
        (
            ApiConfig {
                tokens: Some("/nowhere".into()),
                ..good()
            },
            "/nowhere",
        ),
    ] {
        let failure = match Tcp::open(&config).await {
            Err(failure) => failure,
            Ok(_) => panic!("{why}"),
        };
        assert_eq!(failure.code, ExitCode::ConfigInvalid);
        assert!(failure.to_string().contains(why), "{why}: {failure}");
        assert!(!failure.to_string().contains(TOKEN));
    }
}
