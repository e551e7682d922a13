//! Credentials while a sandbox runs, and redirects.

use std::sync::Mutex;
use std::time::Duration;

use reqwest::header::WWW_AUTHENTICATE;

use crate::registry::testing::{Network, Reply};

use super::*;

const REFERENCE: &str = "registry.example/app:1";
const CHALLENGE: &str =
    r#"Bearer realm="https://auth.example/token",service="s",scope="repository:app:pull""#;

fn header<'a>(request: &'a reqwest::Request, name: &str) -> &'a str {
    request.headers().get(name).map_or("", |it| it.to_str().unwrap())
}

fn base64(user: &str) -> String {
    crate::registry::auth::basic(user, "p")
}

/// The state of a registry and its token service.
struct Issuer {
    blob: Vec<u8>,
    /// The user whose password is valid, if one is required.
    user: Mutex<Option<&'static str>>,
    /// The token that is good.
    valid: Mutex<String>,
    issued: Calls,
    life: u64,
}

impl Issuer {
    fn new(blob: &[u8], life: u64) -> Arc<Self> {
        Arc::new(Self {
            blob: blob.to_vec(),
            user: Mutex::default(),
            valid: Mutex::default(),
            issued: Calls::default(),
            life,
        })
    }

    fn revoke(&self) {
        self.valid.lock().unwrap().clear();
    }

    fn answer(&self, request: &reqwest::Request) -> Reply {
        if request.url().host_str() == Some("auth.example") {
            let user = *self.user.lock().unwrap();
            if user.is_some_and(|user| header(request, "authorization") != base64(user)) {
                return Reply::status(401);
            }
            let token = format!("token{}", self.issued.next());
            *self.valid.lock().unwrap() = token.clone();
            let answer = serde_json::json!({"token": token, "expires_in": self.life});
            return Reply::status(200)
                .body(answer.to_string().as_bytes())
                .after(Duration::from_millis(50));
        }
        let valid = self.valid.lock().unwrap().clone();
        if valid.is_empty() || header(request, "authorization") != format!("Bearer {valid}") {
            return Reply::status(401).header(WWW_AUTHENTICATE, CHALLENGE);
        }
        Reply::range(request, &self.blob)
    }

    fn network(self: &Arc<Self>) -> Arc<Network> {
        let issuer = self.clone();
        Network::new(move |request| issuer.answer(request))
    }
}

#[tokio::test(start_paused = true)]
async fn a_token_that_expires_mid_run_is_replaced() {
    let blob = pattern(10_000);
    let issuer = Issuer::new(&blob, 3600);
    let network = issuer.network();
    let client = Client::with_wire(Config::default(), network.clone());
    let reader = reader(&client, REFERENCE, Credentials::Anonymous).await;
    read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
    read(&*reader, &blob, 10..20, Priority::Demand).await.unwrap();
    assert_eq!(issuer.issued.count(), 1);
    issuer.revoke();
    read(&*reader, &blob, 20..30, Priority::Demand).await.unwrap();
    assert_eq!(issuer.issued.count(), 2);
    let counts = counts(&client, "registry.example");
    assert_eq!((counts.logins, counts.retries, counts.breaker_opens), (2, 0, 0));
    assert_eq!(
        network.to("auth.example")[0].url,
        "https://auth.example/token?service=s&scope=repository%3Aapp%3Apull"
    );
}

#[tokio::test(start_paused = true)]
async fn credentials_that_changed_mid_run_are_read_again() {
    let blob = pattern(10_000);
    let issuer = Issuer::new(&blob, 3600);
    let network = issuer.network();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config.json");
    let write = |user: &str| {
        let entry = serde_json::json!({"auths": {"registry.example": {"username": user, "password": "p"}}});
        std::fs::write(&path, entry.to_string()).unwrap();
        user.to_owned()
    };
    write("monday");
    *issuer.user.lock().unwrap() = Some("monday");
    let client = Client::with_wire(Config::default(), network);
    let reader = reader(&client, REFERENCE, Credentials::ConfigFile(path.clone())).await;
    read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
    // Yesterday's password is no longer valid; a tool has written today's.
    *issuer.user.lock().unwrap() = Some("tuesday");
    issuer.revoke();
    write("tuesday");
    read(&*reader, &blob, 10..20, Priority::Demand).await.unwrap();
    // No tool has written tomorrow's.
    *issuer.user.lock().unwrap() = Some("wednesday");
    issuer.revoke();
    let error = read(&*reader, &blob, 20..30, Priority::Demand).await.unwrap_err();
    assert_eq!(error.code(), "registry_denied");
}

#[tokio::test(start_paused = true)]
async fn many_readers_need_one_new_token() {
    let blob = pattern(10_000);
    let issuer = Issuer::new(&blob, 3600);
    let client = Client::with_wire(Config::default(), issuer.network());
    let reader = reader(&client, REFERENCE, Credentials::Anonymous).await;
    for round in 1..=3 {
        let reads = (0..40).map(|i| read(&*reader, &blob, i * 100..i * 100 + 100, Priority::Demand));
        for result in futures_util::future::join_all(reads).await {
            result.unwrap();
        }
        assert_eq!(issuer.issued.count(), round);
        issuer.revoke();
    }
}

#[tokio::test(start_paused = true)]
async fn a_token_about_to_expire_is_renewed_before_it_is_refused() {
    let blob = pattern(10_000);
    let issuer = Issuer::new(&blob, 100);
    let network = issuer.network();
    let client = Client::with_wire(Config::default(), network.clone());
    let reader = reader(&client, REFERENCE, Credentials::Anonymous).await;
    read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
    tokio::time::advance(Duration::from_secs(85)).await;
    read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
    assert_eq!(issuer.issued.count(), 1);
    tokio::time::advance(Duration::from_secs(6)).await;
    let before = network.to("registry.example").len();
    read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
    assert_eq!(issuer.issued.count(), 2);
    assert_eq!(network.to("registry.example").len(), before + 1);
}

#[tokio::test(start_paused = true)]
async fn token_without_renewal_is_used_until_refused() {
    let blob = pattern(10_000);
    let issuer = Issuer::new(&blob, 100);
    let answers = issuer.clone();
    let network = Network::new(move |request| {
        let again = request.url().host_str() == Some("auth.example") && answers.issued.count() > 0;
        if again {
            Reply::status(503)
        } else {
            answers.answer(request)
        }
    });
    let client = Client::with_wire(Config::default(), network.clone());
    let reader = reader(&client, REFERENCE, Credentials::Anonymous).await;
    read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
    tokio::time::advance(Duration::from_secs(95)).await;
    for _ in 0..3 {
        read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
    }
    // Tried once, not for every read.
    assert_eq!(network.to("auth.example").len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_password_that_expired_behind_a_403_is_read_again() {
    let blob = pattern(10_000);
    let content = blob.clone();
    let good = Arc::new(Mutex::new("monday"));
    let now = good.clone();
    let network = Network::new(move |request| match header(request, "authorization") {
        "" => Reply::status(401).header(WWW_AUTHENTICATE, "Basic realm=\"x\""),
        shown if shown == base64(&now.lock().unwrap()) => Reply::range(request, &content),
        _ => Reply::status(403),
    });
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config.json");
    let write = |user: &str| {
        let entry = serde_json::json!({"auths": {"registry.example": {"username": user, "password": "p"}}});
        std::fs::write(&path, entry.to_string()).unwrap();
    };
    write("monday");
    let client = Client::with_wire(Config::default(), network);
    let reader = reader(&client, REFERENCE, Credentials::ConfigFile(path.clone())).await;
    read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
    *good.lock().unwrap() = "tuesday";
    write("tuesday");
    read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn redirect_is_cached_without_credentials_until_it_expires() {
    let blob = pattern(10_000);
    let content = blob.clone();
    let signed = Arc::new(Calls::default());
    let expired = Arc::new(Mutex::new(String::new()));
    let gone = expired.clone();
    let network = Network::new(move |request| match request.url().host_str() {
        Some("cdn.example") if request.url().query() == Some(&**gone.lock().unwrap()) => Reply::status(403),
        Some("cdn.example") => Reply::range(request, &content),
        _ if header(request, "authorization").is_empty() => {
            Reply::status(401).header(WWW_AUTHENTICATE, "Basic realm=\"x\"")
        }
        _ => Reply::redirect(&format!("https://cdn.example/data?signature={}", signed.next())),
    });
    let client = Client::with_wire(Config::default(), network.clone());
    let credentials = Credentials::Basic {
        user: "u".into(),
        password: "p".into(),
    };
    let reader = reader(&client, REFERENCE, credentials).await;
    for i in 0..5 {
        read(&*reader, &blob, i * 10..i * 10 + 10, Priority::Demand)
            .await
            .unwrap();
    }
    // One refused without credentials, one redirected; later ones go directly to the redirect's target.
    assert_eq!(network.to("registry.example").len(), 2);
    let there = network.to("cdn.example");
    assert_eq!(there.len(), 5);
    assert!(there.iter().all(|it| it.header("authorization").is_none()));
    assert_eq!(there[4].header("range"), Some("bytes=40-49"));
    "signature=0".clone_into(&mut expired.lock().unwrap());
    read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
    assert_eq!(network.to("registry.example").len(), 3);
    assert!(
        network
            .to("cdn.example")
            .last()
            .unwrap()
            .url
            .ends_with("signature=1")
    );
    let counts = counts(&client, "registry.example");
    assert_eq!((counts.redirects, counts.retries, counts.wrong_bytes), (2, 0, 0));
    // The address is forgotten after its time.
    tokio::time::advance(Duration::from_secs(301)).await;
    read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
    assert_eq!(network.to("registry.example").len(), 4);
}

#[tokio::test(start_paused = true)]
async fn endless_and_plain_http_redirects_are_not_followed() {
    let blob = pattern(100);
    for (location, says) in [
        ("https://registry.example/b", "circle"),
        ("/deeper", "too many redirects"),
        ("http://cdn.example/x", "plain HTTP"),
        ("file:///etc/passwd", "no address of HTTP"),
        ("https://", "no address of HTTP"),
    ] {
        let network = Network::new(move |request| match (location, request.url().path()) {
            ("/deeper", path) => Reply::redirect(&format!("{path}/deeper")),
            ("https://registry.example/b", "/b") => Reply::redirect("/c"),
            ("https://registry.example/b", "/c") => Reply::redirect("/b"),
            _ => Reply::redirect(location),
        });
        let client = Client::with_wire(Config::default(), network.clone());
        let reader = reader(&client, REFERENCE, Credentials::Anonymous).await;
        let error = read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap_err();
        assert_eq!(error.code(), "registry_unreachable");
        assert!(error.to_string().contains(says), "{location}: {error}");
        assert!(network.to("cdn.example").is_empty());
        assert!(network.seen.lock().unwrap().len() <= 24);
    }
}

#[tokio::test(start_paused = true)]
async fn refresh_token_is_not_redirected_to_another_origin() {
    let blob = pattern(100);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config.json");
    let entry = serde_json::json!({"auths": {"registry.example": {"identitytoken": "refresh"}}});
    std::fs::write(&path, entry.to_string()).unwrap();
    for (location, is_refused) in [("https://other.example/token", true), ("/elsewhere", false)] {
        let data = blob.clone();
        let network = Network::new(move |request| match request.url().host_str() {
            Some("auth.example") if request.url().path() == "/token" => {
                Reply::status(307).header(reqwest::header::LOCATION, location)
            }
            Some("registry.example") if header(request, "authorization").is_empty() => {
                Reply::status(401).header(WWW_AUTHENTICATE, CHALLENGE)
            }
            Some("registry.example") => Reply::range(request, &data),
            _ => {
                let sent = request.body().and_then(|body| body.as_bytes()).unwrap();
                assert!(String::from_utf8_lossy(sent).contains("refresh_token=refresh"));
                Reply::status(200).body(br#"{"token": "t"}"#)
            }
        });
        let client = Client::with_wire(Config::default(), network.clone());
        let reader = reader(&client, REFERENCE, Credentials::ConfigFile(path.clone())).await;
        let got = read(&*reader, &blob, 0..10, Priority::Demand).await;
        match is_refused {
            true => assert!(got.unwrap_err().to_string().contains("another origin")),
            false => drop(got.unwrap()),
        }
        assert!(network.to("other.example").is_empty());
    }
}

fn dragonfly(url: &str) -> Config {
    Config {
        mirrors: [("*".to_owned(), vec![mirror(url, MirrorKind::Dragonfly)])].into(),
        ..Config::default()
    }
}

#[tokio::test(start_paused = true)]
async fn dragonfly_gets_the_token_on_loopback_only() {
    let blob = pattern(10_000);
    for (url, host, shown) in [
        ("http://127.0.0.1:4001", "127.0.0.1:4001", true),
        ("http://peer.example:4001", "peer.example:4001", false),
        ("https://peer.example:4001", "peer.example:4001", true),
    ] {
        let issuer = Issuer::new(&blob, 3600);
        *issuer.user.lock().unwrap() = Some("u");
        let network = issuer.network();
        let client = Client::with_wire(dragonfly(url), network.clone());
        let credentials = Credentials::Basic {
            user: "u".into(),
            password: "p".into(),
        };
        let reader = reader(&client, REFERENCE, credentials).await;
        read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
        let asked = network.to(host);
        assert!(
            asked[0].url.starts_with(&format!("{url}/v2/app/blobs/sha256:")),
            "{}",
            asked[0].url
        );
        assert_eq!(
            asked[0].header("x-dragonfly-registry"),
            Some("https://registry.example")
        );
        assert_eq!(
            asked.last().unwrap().header("authorization").is_some(),
            shown,
            "{url}"
        );
        // If the mirror may not receive credentials, the registry itself is asked.
        assert_eq!(network.to("registry.example").is_empty(), shown, "{url}");
    }
}

#[tokio::test(start_paused = true)]
async fn dragonfly_without_challenge_gets_the_registrys_token() {
    let blob = pattern(10_000);
    let issuer = Issuer::new(&blob, 3600);
    let answers = issuer.clone();
    let network = Network::new(move |request| {
        let denied = header(request, "authorization").is_empty();
        match request.url().port() {
            Some(4001) if denied => Reply::status(401),
            _ => answers.answer(request),
        }
    });
    let client = Client::with_wire(dragonfly("http://127.0.0.1:4001"), network.clone());
    let reader = reader(&client, REFERENCE, Credentials::Anonymous).await;
    read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
    tokio::time::advance(Duration::from_secs(6)).await;
    let before = network.to("registry.example").len();
    for _ in 0..3 {
        read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
    }
    assert_eq!(network.to("registry.example").len(), before);
    assert_eq!(issuer.issued.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn dragonfly_without_content_range_is_not_trusted() {
    let blob = pattern(10_000);
    let content = blob.clone();
    let network = Network::new(move |request| match request.url().port() {
        Some(4001) => Reply::status(200).body(&content),
        _ => Reply::range(request, &content),
    });
    let client = Client::with_wire(dragonfly("http://127.0.0.1:4001"), network.clone());
    let reader = reader(&client, REFERENCE, Credentials::Anonymous).await;
    read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
    assert_eq!(network.to("127.0.0.1:4001").len(), 1);
    assert_eq!(network.to("registry.example").len(), 1);
    assert!(
        network.to("registry.example")[0]
            .header("x-dragonfly-registry")
            .is_none()
    );
}

#[tokio::test(start_paused = true)]
async fn headers_for_a_mirror_do_not_leave_it() {
    let blob = pattern(10_000);
    let content = blob.clone();
    let network = Network::new(move |request| match request.url().host_str() {
        Some("mirror.example") => Reply::redirect("https://cdn.example/x"),
        _ => Reply::range(request, &content),
    });
    let mut config = mirrored(&["https://mirror.example/v2/proxied"]);
    let mirrors = config.mirrors.get_mut("*").unwrap();
    mirrors[0].headers.insert("X-Api-Key".into(), "secret".into());
    let client = Client::with_wire(config, network.clone());
    let reader = reader(&client, REFERENCE, Credentials::Anonymous).await;
    for _ in 0..2 {
        read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
    }
    let asked = network.to("mirror.example");
    assert_eq!(asked.len(), 1);
    assert!(
        asked[0]
            .url
            .starts_with("https://mirror.example/v2/proxied/app/blobs/"),
        "{}",
        asked[0].url
    );
    assert_eq!(asked[0].header("x-api-key"), Some("secret"));
    let there = network.to("cdn.example");
    assert_eq!(there.len(), 2);
    assert!(there.iter().all(|it| it.header("x-api-key").is_none()));
}

#[test]
fn mirrors_that_cannot_be_are_refused() {
    for url in [
        "ftp://x",
        "x:5000",
        "https://u:p@x",
        "https://x/path",
        "https://x/v2?y=z",
        "https://",
    ] {
        assert!(Client::new(mirrored(&[url])).is_err(), "{url}");
    }
    for (name, value) in [("authorization", "x"), ("Range", "x"), ("a b", "x"), ("a", "\n")] {
        let mut config = mirrored(&["https://x"]);
        config.mirrors.get_mut("*").unwrap()[0]
            .headers
            .insert(name.into(), value.into());
        assert!(Client::new(config).is_err(), "{name}");
    }
    let none = Config {
        prefetch_bandwidth: Some(0),
        ..Config::default()
    };
    assert!(Client::new(none).is_err());
}

#[test]
fn the_configuration_is_strict_and_complete_without_a_word() {
    let parse = |text: &str| serde_json::from_str::<Config>(text);
    assert_eq!(parse("{}").unwrap(), Config::default());
    assert!(parse(r#"{"budget": 1}"#).is_err());
    assert!(parse(r#"{"mirrors": {"docker.io": [{"url": "https://x", "knd": "dragonfly"}]}}"#).is_err());
    let config =
        parse(r#"{"mirrors": {"docker.io": [{"url": "http://127.0.0.1:4001", "kind": "dragonfly"}]}}"#)
            .unwrap();
    assert_eq!(config.mirrors_of("docker.io")[0].kind, MirrorKind::Dragonfly);
    assert!(config.mirrors_of("ghcr.io").is_empty());
}
