//! What a registry answers: statuses, headers (`WWW-Authenticate`, `Location`, `Link`, `Content-Type`, `Retry-After`, `Content-Range`), tokens and
//! documents, over HTTP, while an image is resolved and its layers and referrers are asked for.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use thaw_imagefs::Digest;
use thaw_images::progress::Silent;
use thaw_images::reference::{ImageRef, RegistryRef};
use thaw_images::source::{Credentials, Fallback, Platform, Retry, SourceOptions, open, referrers, resolve};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::runtime::block_on;
use crate::script::Script;

/// Answers of one input; then every question is answered by the last.
const ANSWERS: usize = 8;
const STATUSES: [u16; 12] = [200, 200, 200, 401, 401, 206, 204, 307, 403, 404, 429, 503];
const HEADERS: [&str; 7] = [
    "WWW-Authenticate",
    "Location",
    "Link",
    "Content-Type",
    "Retry-After",
    "Content-Range",
    "Docker-Content-Digest",
];
/// Bytes of a layer that are read.
const MOST: u64 = 1 << 20;

struct Answer {
    status: u16,
    headers: Vec<(&'static str, Vec<u8>)>,
    body: Vec<u8>,
}

/// An answer is a byte for its status, one for how many headers, for each which and its value, and its body's length and bytes.
/// In values and bodies `$HERE` becomes the server's address, `$NEXT` and `$SIZE` the digest and length of the next answer's body.
pub fn run(input: &[u8]) {
    let mut script = Script::new(input);
    let mut answers = Vec::new();
    while !script.is_empty() && answers.len() < ANSWERS {
        answers.push(answer(&mut script));
    }
    block_on(ask(answers));
}

fn answer(script: &mut Script<'_>) -> Answer {
    let status = STATUSES[usize::from(script.byte()) % STATUSES.len()];
    let headers = 0..script.byte() % 4;
    let headers = headers.map(|_| {
        let name = HEADERS[usize::from(script.byte()) % HEADERS.len()];
        (name, script.run().to_vec())
    });
    let headers = headers.collect();
    let length = script.word().into();
    Answer {
        status,
        headers,
        body: script.bytes(length).to_vec(),
    }
}

async fn ask(mut answers: Vec<Answer>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let here = listener.local_addr().expect("it is bound").to_string();
    name(&mut answers, &here);
    let server = tokio::spawn(serve(listener, answers));
    let registry = ImageRef::Registry(RegistryRef {
        registry: here,
        repository: "fuzz".into(),
        tag: Some("latest".into()),
        digest: None,
    });
    let options = SourceOptions {
        plain_http: true,
        credentials: Credentials::Anonymous,
        retry: Retry {
            attempts: 2,
            first: Duration::ZERO,
            longest: Duration::ZERO,
        },
        ..SourceOptions::default()
    };
    if let Ok(source) = open(&registry, &options, Arc::new(Silent)).await
        && let Ok(image) = resolve(&*source, &Platform::linux_amd64()).await
    {
        assert_eq!(image.digest, Digest::of(&image.manifest));
        for layer in image.layers.iter().take(2) {
            if let Ok(body) = Fallback::new(&*source, layer).open().await {
                // Its reader waits for the runtime's only thread.
                let read = move || body.reader.take(MOST).read_to_end(&mut Vec::new());
                let _ = tokio::task::spawn_blocking(read).await;
            }
        }
    }
    let _ = referrers(&registry, &Digest::of(b"fuzz"), &options, Arc::new(Silent)).await;
    server.abort();
}

/// Has the answers speak of this server and of each other.
fn name(answers: &mut [Answer], here: &str) {
    let (mut next, mut size) = (Digest::of(b"").to_string(), "0".to_owned());
    for answer in answers.iter_mut().rev() {
        let put = |text: &[u8]| {
            let text = replace(text, b"$HERE", here.as_bytes());
            let text = replace(&text, b"$NEXT", next.as_bytes());
            replace(&text, b"$SIZE", size.as_bytes())
        };
        answer.headers.iter_mut().for_each(|(_, value)| *value = put(value));
        answer.body = put(&answer.body);
        (next, size) = (Digest::of(&answer.body).to_string(), answer.body.len().to_string());
    }
}

fn replace(text: &[u8], what: &[u8], by: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.windows(what.len()).position(|window| window == what) {
        out.extend_from_slice(&rest[..at]);
        out.extend_from_slice(by);
        rest = &rest[at + what.len()..];
    }
    out.extend_from_slice(rest);
    out
}

async fn serve(listener: TcpListener, answers: Vec<Answer>) {
    let mut next = 0;
    while let Ok((stream, _)) = listener.accept().await {
        let Some(answer) = answers.get(next).or(answers.last()) else { return };
        next += 1;
        let _ = give(stream, answer).await;
    }
}

async fn give(mut stream: TcpStream, answer: &Answer) -> std::io::Result<()> {
    let mut request = Vec::new();
    while !request.windows(4).any(|window| window == b"\r\n\r\n") {
        if stream.read_buf(&mut request).await? == 0 {
            return Ok(());
        }
    }
    let length = answer.body.len();
    let mut head = format!(
        "HTTP/1.1 {} fuzz\r\nContent-Length: {length}\r\nConnection: close\r\n",
        answer.status
    )
    .into_bytes();
    for (name, value) in &answer.headers {
        head.extend_from_slice(name.as_bytes());
        head.extend_from_slice(b": ");
        head.extend_from_slice(value);
        head.extend_from_slice(b"\r\n");
    }
    head.extend_from_slice(b"\r\n");
    head.extend_from_slice(&answer.body);
    stream.write_all(&head).await?;
    stream.shutdown().await
}
