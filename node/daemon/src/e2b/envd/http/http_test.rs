use std::io::Write;

use axum::body::{Body, Bytes};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use crate::e2b::envd::test_client::Bed;

const BYTES: (&str, &str) = ("content-type", "application/octet-stream");
const FORM: (&str, &str) = ("content-type", "multipart/form-data; boundary=xyz");

async fn post(bed: &Bed, query: &str, headers: &[(&str, &str)], body: impl Into<Body>) -> (u16, Value) {
    let (status, body) = bed.plain("POST", &format!("/files{query}"), headers, body).await;
    (status, serde_json::from_slice(&body).unwrap())
}

fn part(name: &str, file: &str, data: &str) -> String {
    format!("--xyz\r\nContent-Disposition: form-data; name=\"{name}\"; filename=\"{file}\"\r\n\r\n{data}\r\n")
}

fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

#[tokio::test]
async fn body_becomes_a_file() {
    let bed = Bed::new().await;
    let data: Vec<u8> = (0..700_000_u32).map(|n| (n % 251) as u8).collect();
    let (status, written) = post(&bed, "?path=new/dir/a", &[BYTES], data.clone()).await;
    let expected = json!([{"name": "a", "type": "file", "path": "/root/new/dir/a"}]);
    assert_eq!((status, written), (200, expected));
    let response = bed
        .send(bed.request("GET", "/files?path=/root/new/dir/a", &[], ""))
        .await;
    assert_eq!(response.headers()["content-length"], "700000");
    assert_eq!(
        response.headers()["content-disposition"],
        "attachment; filename*=UTF-8''a"
    );
    assert_eq!(crate::api::test_client::whole(response).await, data);
    let gzipped = [BYTES, ("content-encoding", "gzip")];
    assert_eq!(post(&bed, "?path=/b", &gzipped, gzip(&data)).await.0, 200);
    assert_eq!(std::fs::read(bed.guest.root().join("b")).unwrap(), data);
    // As another user.
    let (_, written) = post(&bed, "?path=c&username=user", &[BYTES], "x").await;
    assert_eq!(written[0]["path"], "/home/user/c");
}

#[tokio::test]
async fn parts_of_a_form_become_files() {
    let bed = Bed::new().await;
    let form = [
        part("file", "/d/a b.txt", "one"),
        part("other", "/no", "x"),
        part("file", "two", "2"),
    ]
    .concat();
    let (status, written) = post(&bed, "", &[FORM], format!("{form}--xyz--\r\n")).await;
    let expected = json!([{"name": "a b.txt", "type": "file", "path": "/d/a b.txt"},
        {"name": "two", "type": "file", "path": "/root/two"}]);
    assert_eq!((status, written), (200, expected));
    assert_eq!(std::fs::read(bed.guest.root().join("d/a b.txt")).unwrap(), b"one");
    assert!(!bed.guest.root().join("no").exists());
    let one = format!("{}--xyz--\r\n", part("file", "ignored", "x"));
    assert_eq!(post(&bed, "?path=/p", &[FORM], one).await.1[0]["path"], "/p");
    for bad in [
        format!("{form}--xyz--\r\n"),
        part("file", "cut", "x"),
        "--xyz--\r\n".to_owned(),
        "nothing".to_owned(),
    ] {
        assert_eq!(post(&bed, "?path=/p", &[FORM], bad.clone()).await.0, 400, "{bad}");
    }
}

#[tokio::test]
async fn long_form_is_taken_piece_by_piece() {
    let bed = Bed::new().await;
    let data = "x".repeat(5_000_000);
    let form = format!("{}--xyz--\r\n", part("file", "/long", &data));
    let pieces: Vec<_> = form
        .as_bytes()
        .chunks(300_000)
        .map(Bytes::copy_from_slice)
        .collect();
    let pieces = futures_util::stream::iter(pieces.into_iter().map(Ok::<_, std::io::Error>));
    assert_eq!(post(&bed, "", &[FORM], Body::from_stream(pieces)).await.0, 200);
    assert_eq!(
        std::fs::read(bed.guest.root().join("long")).unwrap().len(),
        data.len()
    );
    // A head that does not end.
    let endless =
        futures_util::stream::repeat_with(|| Ok::<_, std::io::Error>(Bytes::from(vec![b'x'; 100_000])));
    let endless = futures_util::StreamExt::chain(
        futures_util::stream::iter([Ok(Bytes::from_static(b"--xyz\r\nContent-Disposition: "))]),
        endless,
    );
    assert_eq!(post(&bed, "", &[FORM], Body::from_stream(endless)).await.0, 400);
}

#[tokio::test]
async fn uploads_that_cannot_be_are_refused() {
    let bed = Bed::new().await;
    let gzipped = [BYTES, ("content-encoding", "gzip")];
    let cut = gzip(b"hello")[..12].to_vec();
    let (brotli, formed) = (
        [BYTES, ("content-encoding", "br")],
        [FORM, ("content-encoding", "gzip")],
    );
    let (text, metadata) = ([("content-type", "text/plain")], [BYTES, ("x-metadata-a", "b")]);
    let huge = [BYTES, ("content-length", "9999999999")];
    for (query, headers, body, status) in [
        ("", &[BYTES][..], b"x".to_vec(), 400),
        ("?path=/", &[BYTES][..], b"x".to_vec(), 400),
        ("?path=/x&username=a%00", &[BYTES][..], b"x".to_vec(), 400),
        ("?path=/x", &gzipped[..], b"not gzip".to_vec(), 400),
        ("?path=/x", &gzipped[..], cut, 400),
        ("?path=/x", &brotli[..], b"x".to_vec(), 400),
        ("?path=/x", &formed[..], b"x".to_vec(), 400),
        ("?path=/x", &text[..], b"x".to_vec(), 400),
        ("?path=/x", &metadata[..], b"x".to_vec(), 501),
        ("?path=/x", &huge[..], Vec::new(), 413),
    ] {
        let (got, body) = post(&bed, query, headers, body).await;
        assert_eq!(
            (got, body["code"].as_u64()),
            (status, Some(status.into())),
            "{query} {headers:?}"
        );
        assert!(!body["message"].as_str().unwrap().is_empty());
    }
    let left: Vec<_> = std::fs::read_dir(bed.guest.root())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(left.len(), 2, "nothing is left of them: {left:?}");
}

#[tokio::test]
async fn downloads_that_cannot_be_are_refused() {
    let bed = Bed::new().await;
    for (query, status) in [
        ("?path=/none", 404),
        ("?path=/", 400),
        ("?path=/etc", 400),
        ("", 400),
    ] {
        let (got, body) = bed.plain("GET", &format!("/files{query}"), &[], "").await;
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!((got, &body["code"]), (status, &json!(status)), "{query}");
    }
}

#[tokio::test]
async fn condition_of_the_sandbox_is_told() {
    let bed = Bed::new().await;
    assert_eq!(bed.plain("GET", "/health", &[], "").await, (204, Vec::new()));
    let (_, metrics) = bed.plain("GET", "/metrics", &[], "").await;
    let metrics: Value = serde_json::from_slice(&metrics).unwrap();
    assert_eq!(
        (&metrics["cpu_count"], &metrics["mem_total"]),
        (&json!(1), &json!(128 << 20))
    );
    let proc = bed.guest.root().join("proc/1");
    std::fs::create_dir_all(&proc).unwrap();
    std::fs::write(proc.join("environ"), b"A=1\0B=x=y\0").unwrap();
    let (_, envs) = bed.plain("GET", "/envs", &[], "").await;
    assert_eq!(
        serde_json::from_slice::<Value>(&envs).unwrap(),
        json!({"A": "1", "B": "x=y"})
    );
}
