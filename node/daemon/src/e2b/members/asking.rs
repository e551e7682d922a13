//! Short requests to another server.
//!
//! Invariant: an answer has a maximum size, and a request a time limit.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::time::timeout;

use super::endpoint::Endpoint;
use crate::api::write_timeout::{WRITE_TIMEOUT, WriteTimeout};

/// How long an answer may take, from the connection to its last byte.
const ASK_LIMIT: Duration = Duration::from_secs(5);
/// Largest head of an answer, bytes.
const MAX_HEAD: usize = 64 << 10;

/// A whole answer.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// Sends a request, and returns the whole answer, whose body has at most `most` bytes.
///
/// # Errors
/// Why there is no such answer.
pub async fn ask(endpoint: &Endpoint, request: Request, most: usize) -> Result<Answer, String> {
    match timeout(ASK_LIMIT, exchange(endpoint, request, most)).await {
        Ok(answer) => answer,
        Err(_) => Err(format!("no whole answer within {} s", ASK_LIMIT.as_secs())),
    }
}

async fn exchange(endpoint: &Endpoint, request: Request<Body>, most: usize) -> Result<Answer, String> {
    let stream = endpoint.connect().await?;
    let io = TokioIo::new(WriteTimeout::new(stream, WRITE_TIMEOUT));
    let mut http = http1::Builder::new();
    http.max_buf_size(MAX_HEAD);
    let (mut sender, connection) = http.handshake(io).await.map_err(|e| e.to_string())?;
    let exchanged = async {
        let answer = sender.send_request(request).await.map_err(|e| e.to_string())?;
        let (head, body) = answer.into_parts();
        let body = Limited::new(body, most).collect().await;
        let body = body.map_err(|e| format!("its answer cannot be used: {e}"))?;
        Ok::<_, String>(Answer {
            status: head.status,
            headers: head.headers,
            body: body.to_bytes(),
        })
    };
    let mut exchanged = std::pin::pin!(exchanged);
    // The connection has no task of its own, so that it ends with this future.
    tokio::select! {
        answer = exchanged.as_mut() => answer,
        ended = connection => match ended {
            // The rest of the answer has arrived already.
            Ok(()) => exchanged.await,
            Err(e) => Err(e.to_string()),
        },
    }
}
