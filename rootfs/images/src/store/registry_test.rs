//! Pulling from a registry that works, refuses, limits, lies and breaks off.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::source::fixture::{Answer, Asked, Server, content};

use super::*;

fn two_layers() -> (Blobs, Digest, [Layer; 2]) {
    static MADE: OnceLock<(Blobs, Digest, [Layer; 2])> = OnceLock::new();
    let make = || {
        let mut blobs = Blobs::default();
        let layers = [big_layer(1, TAR_GZIP), big_layer(2, TAR_ZSTD)];
        let image = blobs.image("amd64", &layers);
        let index = blobs.index(&[image]);
        (blobs, digest_of(&index), layers)
    };
    MADE.get_or_init(make).clone()
}

/// A registry whose answers `change` may alter; it receives the original answer.
fn altered(change: impl Fn(&Asked, Answer) -> Answer + Send + Sync + 'static) -> (Server, Blobs, [Layer; 2]) {
    let (blobs, manifest, layers) = two_layers();
    let served = blobs.clone();
    let server = Server::start(move |asked| change(asked, content(&served, "v1", manifest, asked)));
    (server, blobs, layers)
}

fn reference(server: &Server) -> String {
    format!("{}/team/app:v1", server.address)
}

#[tokio::test]
async fn an_image_is_pulled_and_then_needs_no_registry() {
    let bench = Bench::new();
    let (blobs, manifest, _) = two_layers();
    let server = Server::registry(blobs, "v1", manifest);
    let pulled = bench.pull(&reference(&server)).await.unwrap();
    assert_eq!(pulled.blobs.len(), 2);
    assert!(open_blob(&pulled.blobs[1]).is_ready(0, pulled.blobs[1].length));
    let asked = server.count("");
    assert_eq!(
        bench.pull(&reference(&server)).await.unwrap().digest,
        pulled.digest
    );
    assert_eq!(server.count(""), asked);
    // Also by digest; `always` asks the registry again but transfers no layer.
    bench
        .pull(&format!("{}/team/app@{manifest}", server.address))
        .await
        .unwrap();
    let always = PullOptions {
        policy: PullPolicy::Always,
        ..options()
    };
    let parsed = reference(&server).parse().unwrap();
    bench
        .store
        .pull(
            &parsed,
            &Platform::linux_amd64(),
            &always,
            Arc::new(Log::default()),
        )
        .await
        .unwrap();
    assert_eq!(server.count("manifests/v1"), 2);
    assert_eq!(bench.store.images().unwrap().len(), 1);
}

#[tokio::test]
async fn tokens_are_fetched_with_and_without_credentials() {
    let realm = Arc::new(Mutex::new(String::new()));
    let told = realm.clone();
    let (server, ..) = altered(move |asked, answer| {
        if asked.path.starts_with("/token") {
            assert!(
                asked.path.contains("scope=repository%3Ateam%2Fapp%3Apull"),
                "{}",
                asked.path
            );
            let login = asked.headers.get("authorization").map(String::as_str);
            return match login {
                None | Some("Basic dTpw") => Answer::new(200, r#"{"token":"secret-token"}"#),
                Some(_) => Answer::new(
                    401,
                    r#"{"errors":[{"code":"UNAUTHORIZED","message":"bad password"}]}"#,
                ),
            };
        }
        if asked
            .headers
            .get("authorization")
            .is_some_and(|it| it == "Bearer secret-token")
        {
            return answer;
        }
        let challenge = format!(
            r#"Bearer realm="{}/token",service="test",scope="repository:team/app:pull""#,
            told.lock().unwrap()
        );
        Answer::new(401, "{}").header("www-authenticate", &challenge)
    });
    *realm.lock().unwrap() = format!("http://{}", server.address);
    Bench::new().pull(&reference(&server)).await.unwrap();
    assert_eq!(server.count("/token"), 1);

    let login = |user: &str| PullOptions {
        credentials: Credentials::Basic {
            user: user.into(),
            password: "p".into(),
        },
        ..options()
    };
    let parsed = reference(&server).parse().unwrap();
    let pull = |options| {
        let parsed = &parsed;
        async move {
            let bench = Bench::new();
            bench
                .store
                .pull(
                    parsed,
                    &Platform::linux_amd64(),
                    &options,
                    Arc::new(Log::default()),
                )
                .await
        }
    };
    pull(login("u")).await.unwrap();
    let error = pull(login("x")).await.unwrap_err();
    assert_eq!(error.code(), "registry_denied");
    assert!(error.to_string().contains("bad password"), "{error}");

    // The same from a Docker configuration, and by a credential helper.
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("config.json");
    std::fs::write(
        &config,
        format!(r#"{{"auths": {{"{}": {{"auth": "dTpw"}}}}}}"#, server.address),
    )
    .unwrap();
    pull(PullOptions {
        credentials: Credentials::ConfigFile(config),
        ..options()
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn basic_authentication_works() {
    let (server, ..) = altered(|asked, answer| {
        if asked
            .headers
            .get("authorization")
            .is_some_and(|it| it == "Basic dTpw")
        {
            return answer;
        }
        Answer::new(401, "").header("www-authenticate", "Basic realm=\"x\"")
    });
    let basic = Credentials::Basic {
        user: "u".into(),
        password: "p".into(),
    };
    let bench = Bench::new();
    let with = PullOptions {
        credentials: basic,
        ..options()
    };
    bench.pull_with(&reference(&server), &with).await.unwrap();
    let error = Bench::new().pull(&reference(&server)).await.unwrap_err();
    assert!(
        matches!(error, Error::RegistryDenied { status: 401, .. }),
        "{error}"
    );
}

/// Every way in which a registry can refuse or fail, for the manifest and for a layer.
#[tokio::test]
async fn failures_are_told_apart_and_leave_nothing() {
    for (status, code, asked_times) in [
        (401, "registry_denied", 1),
        (403, "registry_denied", 1),
        (404, "registry_not_found", 1),
        (429, "registry_rate_limited", 3),
        (500, "registry_failed", 3),
        (503, "registry_failed", 3),
        (418, "registry_failed", 1),
    ] {
        for part in ["manifests/v1", "layer"] {
            let layer = Digest::of(&two_layers().2[0].stored).to_string();
            let part = if part == "layer" { layer } else { part.to_owned() };
            let refused = part.clone();
            let (server, ..) = altered(move |asked, answer| {
                if asked.path.ends_with(&refused) {
                    Answer::new(status, "<html>no</html>")
                } else {
                    answer
                }
            });
            let bench = Bench::new();
            let error = bench.pull(&reference(&server)).await.unwrap_err();
            assert_eq!(error.code(), code, "{error}");
            assert!(error.to_string().contains(&server.address.to_string()), "{error}");
            assert_eq!(server.count(&part), asked_times, "{status} {part}");
            assert_eq!(bench.leftovers(), Vec::<String>::new());
        }
    }
}

#[tokio::test]
async fn a_registry_is_asked_again_when_it_says_when() {
    let limited = AtomicUsize::new(0);
    let (server, ..) = altered(move |asked, answer| {
        if asked.path.ends_with("manifests/v1") && limited.fetch_add(1, Ordering::SeqCst) < 1 {
            return Answer::new(429, "").header("retry-after", "1");
        }
        answer
    });
    let log = Arc::new(Log::default());
    let start = Instant::now();
    Bench::new().pull_logged(&reference(&server), &log).await.unwrap();
    assert!(start.elapsed() >= Duration::from_secs(1));
    assert_eq!(
        log.count(|it| matches!(it, Event::Retrying { wait, .. } if *wait == Duration::from_secs(1))),
        1
    );

    // A registry that requests a pause of an hour is not waited for.
    let (server, ..) = altered(|_, _| Answer::new(429, "").header("retry-after", "3600"));
    let error = Bench::new().pull(&reference(&server)).await.unwrap_err();
    assert!(
        matches!(
            error,
            Error::RegistryRateLimited {
                retry_after: Some(3600),
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(server.count(""), 1);

    // Failures that pass.
    let failed = AtomicUsize::new(0);
    let (server, ..) = altered(move |_, answer| match failed.fetch_add(1, Ordering::SeqCst) % 3 {
        2 => answer,
        number => Answer::new([500, 502][number], ""),
    });
    let patient = Retry {
        attempts: 5,
        ..options().retry
    };
    let bench = Bench::new();
    let with = PullOptions {
        retry: patient,
        ..options()
    };
    bench.pull_with(&reference(&server), &with).await.unwrap();
}

#[tokio::test]
async fn a_body_that_breaks_off_is_resumed() {
    for ranges in [true, false] {
        let layer = two_layers().2[0].clone();
        let path = Digest::of(&layer.stored).to_string();
        let part = path.clone();
        let times = AtomicUsize::new(0);
        let (server, ..) = altered(move |asked, mut answer| {
            if asked.path.ends_with(&part) {
                if !ranges && answer.status == 206 {
                    answer = Answer::new(200, layer.stored.clone());
                }
                // Each connection brings a third more.
                let third = layer.stored.len() / 3 + 1;
                let end = third * (times.fetch_add(1, Ordering::SeqCst) + 1);
                let begin = layer.stored.len() - answer.body.len();
                answer.cut = Some(end.saturating_sub(begin).min(answer.body.len()));
            }
            answer
        });
        let bench = Bench::new();
        bench.pull(&reference(&server)).await.unwrap();
        assert_eq!(server.count(&path), 3);
    }
}

#[tokio::test]
async fn short_body_is_truncated_and_wrong_body_is_mismatch() {
    let layer = two_layers().2[0].clone();
    let part = Digest::of(&layer.stored).to_string();
    let wrong = part.clone();
    let stored = layer.stored.clone();
    let (server, ..) = altered(move |asked, mut answer| {
        if asked.path.ends_with(&part) {
            answer = Answer::new(200, &stored[..]);
            answer.cut = Some(1000);
        }
        answer
    });
    let bench = Bench::new();
    let error = bench.pull(&reference(&server)).await.unwrap_err();
    assert!(
        matches!(error, Error::TruncatedLayer { got: 1000, .. }),
        "{error}"
    );
    assert_eq!(bench.leftovers(), Vec::<String>::new());

    let part = wrong.clone();
    let (server, ..) = altered(move |asked, mut answer| {
        if asked.path.ends_with(&part) {
            answer.body[5000] ^= 1;
        }
        answer
    });
    let error = bench.pull(&reference(&server)).await.unwrap_err();
    assert_eq!(error.code(), "digest_mismatch", "{error}");

    // A manifest by digest that is another manifest.
    let (server, ..) = altered(|asked, mut answer| {
        if asked.path.contains("/manifests/") {
            answer.body.push(b' ');
        }
        answer
    });
    let by_digest = format!("{}/team/app@{}", server.address, two_layers().1);
    assert_eq!(
        bench.pull(&by_digest).await.unwrap_err().code(),
        "digest_mismatch"
    );
    assert_eq!(bench.leftovers(), Vec::<String>::new());
}

#[tokio::test]
async fn redirects_are_followed_without_the_password() {
    let (blobs, manifest, _) = two_layers();
    let elsewhere = Arc::new(Server::registry(blobs, "v1", manifest));
    let target = elsewhere.address;
    let (server, ..) = altered(move |asked, answer| {
        if !asked.headers.contains_key("authorization") {
            return Answer::new(401, "").header("www-authenticate", "Basic realm=\"x\"");
        }
        if asked.path.contains("/blobs/") {
            // Another name, so another host.
            let location = format!("http://localhost:{}{}", target.port(), asked.path);
            return Answer::new(307, "").header("location", &location);
        }
        answer
    });
    let with = PullOptions {
        credentials: Credentials::Basic {
            user: "u".into(),
            password: "p".into(),
        },
        ..options()
    };
    let bench = Bench::new();
    bench.pull_with(&reference(&server), &with).await.unwrap();
    let seen = elsewhere.asked.lock().unwrap();
    assert_eq!(seen.len(), 3);
    assert!(
        seen.iter()
            .all(|asked| !asked.headers.contains_key("authorization"))
    );
}

#[tokio::test]
async fn nobody_there_is_unreachable() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let bench = Bench::new();
    let error = bench.pull(&format!("{closed}/x:y")).await.unwrap_err();
    assert_eq!(error.code(), "registry_unreachable", "{error}");
    assert!(error.to_string().contains("refused"), "{error}");
    // A request over TLS to a plain HTTP server.
    let (server, ..) = altered(|_, answer| answer);
    let url = format!("host.invalid:{}/x:y", server.address.port());
    assert_eq!(bench.pull(&url).await.unwrap_err().code(), "registry_unreachable");
}

#[tokio::test]
async fn foreign_layers_come_from_their_own_address() {
    let mut foreign = big_layer(1, TAR_GZIP);
    foreign.media_type = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip".into();
    let stored = foreign.stored.clone();
    let elsewhere = Server::start(move |asked| {
        assert!(!asked.headers.contains_key("authorization"));
        Answer::new(200, stored.clone())
    });
    let mut blobs = Blobs::default();
    let image = blobs.image("amd64", &[foreign.clone()]);
    let bytes = blobs.0.remove(&digest_of(&image)).unwrap();
    let mut manifest: Value = serde_json::from_slice(&bytes).unwrap();
    manifest["layers"][0]["urls"] = serde_json::json!([format!("http://{}/foreign", elsewhere.address)]);
    let digest = blobs.add(manifest.to_string().into_bytes());
    blobs.0.remove(&Digest::of(&foreign.stored));
    let server = Server::registry(blobs, "v1", digest);
    Bench::new().pull(&reference(&server)).await.unwrap();
    assert_eq!(elsewhere.count("/foreign"), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_pulls_of_one_image_fetch_each_layer_once() {
    let (blobs, manifest, layers) = two_layers();
    let server = Server::registry(blobs, "v1", manifest);
    let bench = Bench::new();
    let pulls = (0..8).map(|_| {
        // Each opens the store itself, like a process of its own.
        let store = Store::open(bench.store.root()).unwrap();
        let reference: ImageRef = reference(&server).parse().unwrap();
        async move {
            store
                .pull(
                    &reference,
                    &Platform::linux_amd64(),
                    &options(),
                    Arc::new(Log::default()),
                )
                .await
                .unwrap()
        }
    });
    let images = futures_util::future::join_all(pulls).await;
    assert!(images.iter().all(|image| image.digest == images[0].digest));
    for layer in &layers {
        assert_eq!(server.count(&format!("blobs/{}", Digest::of(&layer.stored))), 1);
    }
}

#[tokio::test]
async fn a_dropped_pull_stops_and_leaves_nothing() {
    let part = Digest::of(&two_layers().2[1].stored).to_string();
    let (server, ..) = altered(move |asked, mut answer| {
        if asked.path.ends_with(&part) {
            answer.cut = Some(10_000);
            answer.stall = true;
        }
        answer
    });
    let bench = Bench::new();
    let log = Arc::new(Log::default());
    let unpacked = |log: &Log| log.count(|event| matches!(event, Event::Unpacked { .. }));
    let name = reference(&server);
    tokio::select! {
        pulled = bench.pull_logged(&name, &log) => panic!("{pulled:?}"),
        () = async { while unpacked(&log) == 0 { tokio::time::sleep(Duration::from_millis(5)).await; } } => {}
    }
    // The threads release the store; the next process that opens it removes the complete layer.
    let store = bench.store.clone();
    tokio::task::spawn_blocking(move || drop(store.lock_exclusive("store").unwrap()))
        .await
        .unwrap();
    Store::open(bench.store.root()).unwrap();
    assert_eq!(bench.leftovers(), Vec::<String>::new());
}
