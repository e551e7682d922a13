//! A registry in memory: what can be pushed to and pulled from it. It lies, is slow and is down when told to.
//!
//! Plain HTTP/1.1 on loopback, a thread a connection. It knows the requests of the distribution specification that a push in
//! one request and a pull make, and refuses a blob whose bytes have another digest.

use std::collections::BTreeMap;
use std::io::{self, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::proxy::http::{Answer, Head};

/// A registry. Its thread ends with the process.
pub struct Registry {
    state: Arc<Mutex<State>>,
    address: SocketAddr,
}

#[derive(Default)]
struct State {
    blobs: BTreeMap<String, Vec<u8>>,
    /// By tag and by digest, of every repository.
    manifests: BTreeMap<String, Vec<u8>>,
    /// Sent instead of the blob with this digest.
    lies: BTreeMap<String, Vec<u8>>,
    uploads: usize,
    /// Closes every connection without an answer.
    is_down: bool,
    /// How long each answer with a part of a blob takes.
    delay: Duration,
    /// Methods and targets, in order.
    asked: Vec<String>,
}

/// `sha256:` and the digest of these bytes.
pub fn digest(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
    format!("sha256:{hex}")
}

impl Registry {
    /// An empty one, on a free port.
    pub fn start() -> io::Result<Registry> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let state: Arc<Mutex<State>> = Arc::default();
        let shared = state.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = shared.clone();
                thread::spawn(move || drop(serve(&stream, &state)));
            }
        });
        Ok(Registry { state, address })
    }

    /// `127.0.0.1:PORT`, to be used as the registry's name.
    pub fn host(&self) -> String {
        self.address.to_string()
    }

    /// The manifest with this tag or digest.
    pub fn manifest(&self, name: &str) -> Option<Vec<u8>> {
        self.state().manifests.get(name).cloned()
    }

    /// Names a manifest.
    pub fn put_manifest(&self, name: &str, bytes: &[u8]) {
        self.state().put_manifest(name, bytes.to_vec());
    }

    /// The blob with this digest.
    pub fn blob(&self, digest: &str) -> Option<Vec<u8>> {
        self.state().blobs.get(digest).cloned()
    }

    /// Adds a blob. Returns its digest.
    pub fn put_blob(&self, bytes: &[u8]) -> String {
        let digest = digest(bytes);
        self.state().blobs.insert(digest.clone(), bytes.to_vec());
        digest
    }

    /// Sends these bytes from now on when the blob with this digest is asked for.
    pub fn lie(&self, digest: &str, bytes: &[u8]) {
        self.state().lies.insert(digest.into(), bytes.to_vec());
    }

    /// Answers nothing from now on, or again.
    pub fn set_down(&self, is_down: bool) {
        self.state().is_down = is_down;
    }

    /// Takes so long from now on for each answer with a part of a blob.
    pub fn set_delay(&self, delay: Duration) {
        self.state().delay = delay;
    }

    /// The requests since this was last called, as `METHOD TARGET`.
    pub fn take_asked(&self) -> Vec<String> {
        std::mem::take(&mut self.state().asked)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

fn serve(stream: &TcpStream, state: &Mutex<State>) -> io::Result<()> {
    let mut from = BufReader::new(stream);
    let mut to = stream;
    while let Some(head) = Head::read(&mut from)? {
        if head.header("expect").is_some() {
            to.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        }
        let mut body = Vec::new();
        head.request_body()?.copy(&mut from, &mut body)?;
        let (answer, delay) = {
            let mut state = state.lock().unwrap();
            if state.is_down {
                break;
            }
            (state.answer(&head, body), state.delay)
        };
        if answer.status == 206 {
            thread::sleep(delay);
            if state.lock().unwrap().is_down {
                break;
            }
        }
        let length = answer.bytes.len();
        // The head of the answer to HEAD tells the length of the body that GET would have.
        let end = answer.bytes.windows(4).position(|at| at == b"\r\n\r\n");
        let sent = match head.method.as_str() {
            "HEAD" => end.map_or(length, |end| end + 4),
            _ => length,
        };
        to.write_all(&answer.bytes[..sent])?;
        if head.closes() {
            break;
        }
    }
    Ok(())
}

impl State {
    fn put_manifest(&mut self, name: &str, bytes: Vec<u8>) {
        self.manifests.insert(digest(&bytes), bytes.clone());
        self.manifests.insert(name.into(), bytes);
    }

    fn answer(&mut self, head: &Head, body: Vec<u8>) -> Answer {
        let (path, query) = head.target.split_once('?').unwrap_or((head.target.as_str(), ""));
        self.asked.push(format!("{} {path}", head.method));
        let last = path.rsplit('/').next().unwrap_or_default().to_owned();
        let empty = |status| Answer::new(status, &[], b"");
        let header = |name: &str, value: &str| [(name.to_owned(), value.to_owned())];
        match (head.method.as_str(), path) {
            ("GET" | "HEAD", "/v2/") => empty(200),
            ("POST", path) if path.ends_with("/blobs/uploads/") => {
                self.uploads += 1;
                let place = format!("{path}{}", self.uploads);
                Answer::new(202, &header("Location", &place), b"")
            }
            ("PUT", path) if path.contains("/blobs/uploads/") => {
                let said = query.replace("%3A", ":");
                let is_right = said.ends_with(&format!("digest={}", digest(&body)));
                if !is_right {
                    return empty(400);
                }
                self.blobs.insert(digest(&body), body);
                empty(201)
            }
            ("PUT", path) if path.contains("/manifests/") => {
                self.put_manifest(&last, body);
                empty(201)
            }
            ("GET" | "HEAD", path) if path.contains("/manifests/") => match self.manifests.get(&last) {
                Some(bytes) => {
                    let kind = header("Content-Type", "application/vnd.oci.image.manifest.v1+json");
                    Answer::new(200, &kind, bytes)
                }
                None => empty(404),
            },
            ("GET" | "HEAD", _) => match self.lies.get(&last).or(self.blobs.get(&last)) {
                Some(bytes) => match head.header("range").and_then(|range| part(range, bytes)) {
                    Some((told, part)) => Answer::new(206, &header("Content-Range", &told), part),
                    None => Answer::new(200, &[], bytes),
                },
                None => empty(404),
            },
            _ => empty(405),
        }
    }
}

/// The part of these bytes that a `Range` of one range asks for, and its `Content-Range`.
fn part<'a>(range: &str, bytes: &'a [u8]) -> Option<(String, &'a [u8])> {
    let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
    let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
    let part = bytes.get(first..last.checked_add(1)?.min(bytes.len()))?;
    let told = format!("bytes {first}-{}/{}", first + part.len() - 1, bytes.len());
    (!part.is_empty()).then_some((told, part))
}
