//! An HTTP server that a snapshot is made of: its page shows what a thaw must keep, and what each clone must have anew.

use std::net::SocketAddr;

use serde_json::Value;

use crate::page;

/// The port on which it listens.
pub const PORT: u16 = 8000;

/// Fills memory before it listens. Not `http.server.HTTPServer`, which asks name servers for its host's name.
const PROGRAM: &str = r#"
import http.server, json, os, socket, socketserver, sys

filled = [os.urandom(1 << 20) for _ in range(int(sys.argv[1]))]
warm, served = os.urandom(8).hex(), 0

class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global served
        served += 1
        page = {"warm": warm, "served": served, "random": os.urandom(8).hex(), "host": socket.gethostname()}
        page = json.dumps(page).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_):
        pass

socketserver.TCPServer.allow_reuse_address = True
socketserver.TCPServer(("", 8000), Page).serve_forever()
"#;

/// The command that runs it in Python's image, and has it first fill so many MiB with random bytes.
pub fn command(filled_mib: u32) -> [String; 4] {
    let filled_mib = filled_mib.to_string();
    ["python3", "-c", PROGRAM, &filled_mib].map(str::to_owned)
}

/// What its page shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Drawn when the server started: all its clones have the same.
    pub warm: String,
    /// Requests until now, this one included.
    pub served: u64,
    /// From getrandom, for this request.
    pub random: String,
    pub host: String,
}

/// Asks a server that may be about to start for its page.
pub fn ask(at: impl Into<SocketAddr>) -> Answer {
    let answer = page::fetch(at);
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    assert!(head.starts_with("HTTP/1.0 200"), "{answer}");
    let shown: Value = serde_json::from_str(body).unwrap_or_else(|e| panic!("{e}: {answer}"));
    let text = |field: &str| shown[field].as_str().unwrap_or_default().to_owned();
    Answer {
        warm: text("warm"),
        served: shown["served"].as_u64().unwrap_or_default(),
        random: text("random"),
        host: text("host"),
    }
}
