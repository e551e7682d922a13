//! Over real connections: the HTTP client's own behaviour, and places without a network.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;

use crate::source::fixture::{Answer, Asked, Blobs, Layer, Server, TAR_GZIP, content, tagged, tar};

use super::*;

/// Short time limits, because everything here is quick unless something is wrong.
fn config() -> Config {
    Config {
        pause_ms: 1,
        longest_pause_ms: 10,
        ..Config::default()
    }
}

fn serve(blob: &[u8], mut change: impl FnMut(&Asked, Answer) -> Answer + Send + 'static) -> Server {
    let mut blobs = Blobs::default();
    let digest = blobs.add(blob.to_vec());
    let change = std::sync::Mutex::new(move |asked: &Asked, answer| change(asked, answer));
    Server::keeping(move |asked| {
        let answer = content(&blobs, "latest", digest, asked);
        change.lock().unwrap()(asked, answer)
    })
}

async fn of(server: &Server, config: Config) -> (Arc<Client>, Arc<dyn Ranges>) {
    let client = Client::new(config).unwrap();
    let reference = format!("{}/app", server.address);
    let reader = reader(&client, &reference, Credentials::Anonymous).await;
    (client, reader)
}

#[tokio::test]
async fn connections_are_kept_and_reads_run_side_by_side() {
    let blob = pattern(1 << 18);
    let server = serve(&blob, |_, answer| answer);
    let (client, reader) = of(&server, config()).await;
    for i in 0..20 {
        read(&*reader, &blob, i * 1000..i * 1000 + 5000, Priority::Demand)
            .await
            .unwrap();
    }
    assert_eq!(server.connections.load(Ordering::Relaxed), 1);
    let reads = (0..16).map(|i| read(&*reader, &blob, i * 16384..(i + 1) * 16384, Priority::Prefetch));
    for result in futures_util::future::join_all(reads).await {
        result.unwrap();
    }
    let connections = server.connections.load(Ordering::Relaxed);
    assert!(
        (1..=client.config().prefetch_requests).contains(&connections),
        "{connections}"
    );
    assert_eq!(counts(&client, &server.address.to_string()).requests, 36);
}

#[tokio::test]
async fn a_connection_that_breaks_off_in_the_middle_is_made_anew() {
    let blob = pattern(1 << 20);
    let mut calls = 0;
    let server = serve(&blob, move |_, answer| {
        calls += 1;
        Answer {
            cut: (calls <= 2).then_some(10_000),
            ..answer
        }
    });
    let (_, reader) = of(&server, config()).await;
    let bytes = read(&*reader, &blob, 0..1 << 20, Priority::Demand).await.unwrap();
    assert_eq!(bytes, blob);
    let asked = server.asked.lock().unwrap();
    let last = asked.last().unwrap();
    assert_eq!(last.headers["range"], "bytes=20000-1048575");
}

#[tokio::test]
async fn huge_headers_are_refused_and_another_mirror_asked() {
    let blob = pattern(10_000);
    let good = serve(&blob, |_, answer| answer);
    for (count, length) in [(10_000, 10), (1, 1 << 20)] {
        let huge = serve(&blob, move |_, mut answer| {
            for i in 0..count {
                answer = answer.header(&format!("x-{i}"), &"y".repeat(length));
            }
            answer
        });
        let mut config = config();
        let url = format!("http://{}", huge.address);
        config
            .mirrors
            .insert("*".into(), vec![mirror(&url, MirrorKind::Registry)]);
        let (client, reader) = of(&good, config).await;
        read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
        assert_eq!(
            counts(&client, &huge.address.to_string()).retries,
            1,
            "{count} of {length}"
        );
    }
}

#[tokio::test]
async fn a_server_that_ignores_ranges_does_not_cost_the_whole_blob() {
    let blob = pattern(3 << 20);
    let server = serve(&blob, |_, answer| answer);
    let whole = {
        let mut blobs = Blobs::default();
        let digest = blobs.add(blob.clone());
        Server::keeping(move |asked| {
            let mut asked = asked.clone();
            asked.headers.remove("range");
            content(&blobs, "latest", digest, &asked)
        })
    };
    let mut config = config();
    let url = format!("http://{}", whole.address);
    config
        .mirrors
        .insert("*".into(), vec![mirror(&url, MirrorKind::Registry)]);
    let (client, reader) = of(&server, config).await;
    read(&*reader, &blob, 2 << 20..(2 << 20) + 10, Priority::Demand)
        .await
        .unwrap();
    read(&*reader, &blob, 0..10, Priority::Demand).await.unwrap();
    assert!(counts(&client, &whole.address.to_string()).demand_bytes < 1 << 20);
}

/// A stand-in for Dragonfly's dfdaemon: it fetches from the registry that the header names, with the client's own authorization, and
/// answers with a range.
fn dfdaemon(broken: bool) -> Server {
    Server::keeping(move |asked| {
        let Some(registry) = asked.headers.get("x-dragonfly-registry") else {
            return Answer::new(400, "no registry");
        };
        if broken {
            return Answer::new(500, "no peer");
        }
        let upstream = registry.strip_prefix("http://").unwrap();
        let mut connection = TcpStream::connect(upstream).unwrap();
        let mut request = format!(
            "GET {} HTTP/1.1\r\nhost: {upstream}\r\nconnection: close\r\n",
            asked.path
        );
        for name in ["range", "authorization"] {
            if let Some(value) = asked.headers.get(name) {
                request += &format!("{name}: {value}\r\n");
            }
        }
        connection.write_all(format!("{request}\r\n").as_bytes()).unwrap();
        let mut answer = Vec::new();
        connection.read_to_end(&mut answer).unwrap();
        let end = answer.windows(4).position(|it| it == b"\r\n\r\n").unwrap();
        let head = String::from_utf8_lossy(&answer[..end]).into_owned();
        let status = head.split_whitespace().nth(1).unwrap().parse().unwrap();
        let mut out = Answer::new(status, &answer[end + 4..]);
        for line in head.lines().skip(1) {
            let (name, value) = line.split_once(": ").unwrap();
            if ["content-range", "www-authenticate"].contains(&name) {
                out = out.header(name, value);
            }
        }
        out
    })
}

#[tokio::test]
async fn dragonfly_serves_ranges_of_a_registry_that_wants_a_login() {
    let blob = pattern(1 << 20);
    let mut blobs = Blobs::default();
    let digest = blobs.add(blob.clone());
    let upstream = Server::start(move |asked| match asked.headers.get("authorization") {
        Some(shown) if *shown == crate::registry::auth::basic("u", "p") => {
            content(&blobs, "latest", digest, asked)
        }
        _ => Answer::new(401, "").header("www-authenticate", "Basic realm=\"x\""),
    });
    for broken in [false, true] {
        let daemon = dfdaemon(broken);
        let mut config = config();
        let url = format!("http://{}", daemon.address);
        config
            .mirrors
            .insert("*".into(), vec![mirror(&url, MirrorKind::Dragonfly)]);
        let client = Client::new(config).unwrap();
        let credentials = Credentials::Basic {
            user: "u".into(),
            password: "p".into(),
        };
        let reference = format!("{}/app", upstream.address);
        let reader = reader(&client, &reference, credentials).await;
        for i in 0..8 {
            read(&*reader, &blob, i * 5000..i * 5000 + 4096, Priority::Demand)
                .await
                .unwrap();
        }
        let through = counts(&client, &daemon.address.to_string());
        let direct = counts(&client, &upstream.address.to_string());
        if broken {
            assert_eq!((through.demand_bytes, direct.demand_bytes), (0, 8 * 4096));
            assert!(through.breaker_opens >= 1);
        } else {
            assert_eq!((through.demand_bytes, direct.requests), (8 * 4096, 0));
        }
    }
}

#[tokio::test]
async fn layouts_and_archives_are_read_in_place() {
    let directory = tempfile::tempdir().unwrap();
    let layout = directory.path().join("layout");
    let raw = tar(&[("a", &pattern(5000))]);
    let layer = Layer::new(TAR_GZIP, &raw);
    let stored_bytes = layer.stored.clone();
    let mut blobs = Blobs::default();
    let image = blobs.image("amd64", &[layer]);
    blobs.write_layout(&layout, &[tagged(image, "1")]);
    let client = Client::new(Config::default()).unwrap();
    let of_layout = reader(
        &client,
        &format!("oci:{}:1", layout.display()),
        Credentials::Anonymous,
    )
    .await;
    let bytes = read(&*of_layout, &stored_bytes, 3..50, Priority::Demand)
        .await
        .unwrap();
    assert_eq!(bytes, stored_bytes[3..50]);
    // One that is missing, one with other content, one that is too short.
    let other = pattern(100);
    let error = read(&*of_layout, &other, 0..10, Priority::Demand)
        .await
        .unwrap_err();
    assert_eq!(error.code(), "not_found");
    let error = of_layout
        .read(
            &stored(&stored_bytes),
            0..10,
            Priority::Demand,
            exactly(b"0123456789"),
        )
        .await
        .unwrap_err();
    assert_eq!(error.code(), "malformed");
    let longer = StoredBlob {
        size: stored_bytes.len() as u64 + 1,
        ..stored(&stored_bytes)
    };
    let error = of_layout
        .read(&longer, 0..10, Priority::Demand, exactly(&stored_bytes[..10]))
        .await;
    assert_eq!(error.unwrap_err().code(), "truncated_layer");

    // `docker save` of old: layers by name, known by their DiffIDs.
    let config = serde_json::json!({"architecture": "amd64", "os": "linux", "config": {},
        "rootfs": {"type": "layers", "diff_ids": [Digest::of(&raw)]}})
    .to_string();
    let manifest = r#"[{"Config": "config.json", "RepoTags": ["app:1"], "Layers": ["x/layer.tar"]}]"#;
    let archive = tar(&[
        ("config.json", config.as_bytes()),
        ("manifest.json", manifest.as_bytes()),
        ("x/layer.tar", &raw),
    ]);
    let path = directory.path().join("saved.tar");
    std::fs::write(&path, archive).unwrap();
    let of_archive = reader(
        &client,
        &format!("docker-archive:{}", path.display()),
        Credentials::Anonymous,
    )
    .await;
    let bytes = read(&*of_archive, &raw, 512..1512, Priority::Prefetch)
        .await
        .unwrap();
    assert_eq!(bytes, raw[512..1512]);
    let counts = counts(&client, "local");
    assert_eq!(
        (counts.demand_bytes, counts.prefetch_bytes, counts.wrong_bytes),
        (57, 1000, 1)
    );
}

async fn whole(fallback: &mut crate::source::Fallback<'_>) -> Vec<u8> {
    let mut body = fallback.open().await.unwrap().reader;
    let read = move || {
        let mut bytes = Vec::new();
        body.read_to_end(&mut bytes).map(|_| bytes)
    };
    tokio::task::spawn_blocking(read).await.unwrap().unwrap()
}

#[tokio::test]
async fn layer_from_broken_mirror_continues_from_registry() {
    let blob = pattern(200_000);
    let wrong: Vec<u8> = blob.iter().map(|byte| byte ^ 1).collect();
    for (cut, wrong) in [(None, None), (Some(100_000), None), (None, Some(wrong))] {
        let server = serve(&blob, |_, answer| answer);
        let sends = wrong.clone();
        let near = serve(&blob, move |_, mut answer| {
            answer.cut = cut;
            answer.body = sends.clone().unwrap_or(answer.body);
            answer
        });
        let mut config = config();
        let url = format!("http://{}", near.address);
        config
            .mirrors
            .insert("*".into(), vec![mirror(&url, MirrorKind::Registry)]);
        let client = Client::new(config).unwrap();
        let options = SourceOptions {
            credentials: Credentials::Anonymous,
            client: Some(client.clone()),
            ..SourceOptions::default()
        };
        let reference: ImageRef = format!("{}/app", server.address).parse().unwrap();
        let source = crate::source::open(&reference, &options, Arc::new(Silent))
            .await
            .unwrap();
        let layer = crate::source::LayerSource {
            diff_id: Digest::of(b"tar"),
            digest: Some(stored(&blob).digest),
            size: Some(200_000),
            urls: Vec::new(),
            member: None,
        };
        let mut fallback = crate::source::Fallback::new(&*source, &layer);
        let first = whole(&mut fallback).await;
        let counted = counts(&client, &near.address.to_string());
        assert_eq!(counted.wrong_bytes, u64::from(wrong.is_some()));
        if wrong.is_some() {
            // A reader notices that, and asks the next place.
            assert_ne!(first, blob);
            fallback.failed(Error::Cancelled).unwrap();
            assert_eq!(whole(&mut fallback).await, blob);
        } else {
            assert_eq!(first, blob);
        }
        fallback.failed(Error::Cancelled).unwrap_err();
        assert_eq!(counted.demand_bytes, cut.unwrap_or(200_000) as u64);
        assert_eq!(server.count("blobs") > 0, cut.is_some() || wrong.is_some());
    }
}
