//! HTTP/1.1 on connections that stay open: messages whose bodies have a length, and no others.

use std::io;
use std::net::SocketAddr;

use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// Largest body, bytes.
const MAX_BODY: usize = 1 << 20;
/// The body of all answers of [`serve`].
pub const SMALL: &[u8] = b"small\n";

/// The head of a message.
#[derive(Debug, Default)]
struct Head {
    /// Its first line.
    first: String,
    /// Bytes of its body.
    length: usize,
    /// The connection ends after it.
    closes: bool,
}

/// Reads a head; `None` if the peer has left.
async fn head(stream: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<Head>> {
    let mut head = Head::default();
    if stream.read_line(&mut head.first).await? == 0 {
        return Ok(None);
    }
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let line = line.trim_end();
        if line.is_empty() {
            return Ok(Some(head));
        }
        let (name, value) = line.split_once(':').unwrap_or_default();
        let value = value.trim();
        match name.to_ascii_lowercase().as_str() {
            "content-length" => {
                let length = value.parse().ok().filter(|length| *length <= MAX_BODY);
                head.length = length.ok_or_else(|| unexpected(line))?;
            }
            "connection" => head.closes = value.eq_ignore_ascii_case("close"),
            "transfer-encoding" => return Err(unexpected(line)),
            _ => {}
        }
    }
}

fn unexpected(line: &str) -> io::Error {
    io::Error::other(format!("unexpected in a head: {:?}", line.trim_end()))
}

async fn body(stream: &mut (impl AsyncBufRead + Unpin), head: &Head) -> io::Result<Vec<u8>> {
    let mut body = vec![0; head.length];
    stream.read_exact(&mut body).await?;
    Ok(body)
}

/// A client's connection.
#[derive(Debug)]
pub struct Connection(BufReader<TcpStream>);

impl Connection {
    /// Opens one.
    pub async fn open(to: SocketAddr) -> io::Result<Connection> {
        let stream = TcpStream::connect(to).await?;
        stream.set_nodelay(true)?;
        Ok(Connection(BufReader::new(stream)))
    }

    /// Sends a part of a request, or all of it.
    pub async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all(bytes).await
    }

    /// The status and the body of the next answer. An answer after which the connection ends is an error.
    pub async fn answer(&mut self) -> io::Result<(u16, Vec<u8>)> {
        let head = head(&mut self.0).await?;
        let head = head.ok_or(io::ErrorKind::UnexpectedEof)?;
        let status: Option<u16> = head.first.split(' ').nth(1).and_then(|word| word.parse().ok());
        let status = status.ok_or_else(|| unexpected(&head.first))?;
        let body = body(&mut self.0, &head).await?;
        match head.closes {
            true => Err(io::Error::other(format!(
                "the connection ends after {status} {}",
                String::from_utf8_lossy(&body)
            ))),
            false => Ok((status, body)),
        }
    }

    /// Sends a request and reads its answer.
    pub async fn ask(&mut self, request: &[u8]) -> io::Result<(u16, Vec<u8>)> {
        self.send(request).await?;
        self.answer().await
    }
}

/// Answers every request with [`SMALL`], once all of it has arrived.
pub async fn serve(listener: TcpListener) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(async move {
            // A caller that leaves ends its own connection.
            let _ = answer_all(stream).await;
        });
    }
}

async fn answer_all(stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut stream = BufReader::new(stream);
    let mut answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", SMALL.len()).into_bytes();
    answer.extend(SMALL);
    while let Some(head) = head(&mut stream).await? {
        body(&mut stream, &head).await?;
        stream.write_all(&answer).await?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "http_test.rs"]
mod tests;
