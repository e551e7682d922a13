//! Sends requests to the routes of a sandbox without a server, for tests.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, BodyDataStream};
use axum::http::{Request, Response};
use futures_util::StreamExt;
use prost::{Message, Name};
use serde_json::Value;
use thaw_protocol::connect::envelope::{Decoder, Envelope};
use thaw_sandbox::state::Behalf;

use super::access::{Access, ForSandbox};
use super::local_guest::LocalGuest;
use super::router;
use crate::api::daemon::Daemon;
use crate::api::fake::{Fake, request};
use crate::api::scope::Wanted;
use crate::api::test_client::{send, whole};
use crate::e2b::context::Context;
use crate::e2b::notes::Notes;

pub const JSON: &str = "application/json";
pub const STREAM: &str = "application/connect+json";
/// Longest wait for something that happens soon.
pub const SOON: Duration = Duration::from_secs(20);

/// A sandbox whose guest is this host, and the routes to it.
pub struct Bed {
    pub fake: Arc<Fake>,
    pub daemon: Arc<Daemon>,
    pub guest: Arc<LocalGuest>,
    pub routes: Router,
    pub wanted: Wanted,
}

impl Bed {
    pub async fn new() -> Bed {
        Bed::of_template(Context::default()).await
    }

    /// The same, of a template that says this of processes.
    pub async fn of_template(context: Context) -> Bed {
        let guest = Arc::new(LocalGuest::default());
        let (fake, daemon) = Fake::daemon(true);
        *fake.guest.lock().unwrap() = Some(guest.clone());
        let notes = Notes {
            context,
            ..Notes::default()
        };
        Bed::over(fake, daemon, guest, notes).await
    }

    /// The same with the fakes of the API's tests as its guest.
    pub async fn of_fakes() -> Bed {
        let (fake, daemon) = Fake::daemon(true);
        Bed::over(fake, daemon, Arc::new(LocalGuest::default()), Notes::default()).await
    }

    async fn over(fake: Arc<Fake>, daemon: Arc<Daemon>, guest: Arc<LocalGuest>, notes: Notes) -> Bed {
        let behalf = Behalf {
            annotations: notes.annotations().unwrap(),
            ..Behalf::default()
        };
        let made = daemon.create(request("x"), behalf).await.unwrap();
        Bed {
            fake,
            routes: router(daemon.clone()),
            daemon,
            guest,
            wanted: Wanted::on_node(made.sandbox.id.clone()),
        }
    }

    /// A request of a caller who may do everything.
    pub fn request(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Body>,
    ) -> Request<Body> {
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let of = ForSandbox {
            wanted: self.wanted.clone(),
        };
        request
            .extension(of)
            .extension(Access::Open)
            .body(body.into())
            .unwrap()
    }

    pub async fn send(&self, request: Request<Body>) -> Response<Body> {
        send(&self.routes, request).await
    }

    /// The status and body of a request.
    pub async fn plain(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Body>,
    ) -> (u16, Vec<u8>) {
        let response = self.send(self.request(method, path, headers, body)).await;
        (response.status().as_u16(), whole(response).await.to_vec())
    }

    /// A unary call in JSON.
    pub async fn call(&self, path: &str, message: Value) -> (u16, Value) {
        let (status, body) = self
            .plain("POST", path, &[("content-type", JSON)], message.to_string())
            .await;
        (status, serde_json::from_slice(&body).unwrap())
    }

    /// A unary call in protobuf.
    pub async fn call_proto<A: Message + Default>(&self, path: &str, message: &impl Name) -> A {
        let headers = [
            ("content-type", "application/proto"),
            ("connect-protocol-version", "1"),
        ];
        let (status, body) = self.plain("POST", path, &headers, message.encode_to_vec()).await;
        assert_eq!(status, 200, "{}", String::from_utf8_lossy(&body));
        A::decode(&body[..]).unwrap()
    }

    /// A stream in JSON.
    pub async fn open(&self, path: &str, headers: &[(&str, &str)], message: Value) -> Frames {
        let body = Envelope::encode(false, message.to_string().as_bytes()).unwrap();
        let headers = [&[("content-type", STREAM)][..], headers].concat();
        let response = self.send(self.request("POST", path, &headers, body)).await;
        assert_eq!(response.status(), 200);
        Frames::of(response)
    }
}

/// The frames of an answer.
pub struct Frames {
    body: BodyDataStream,
    rest: Vec<u8>,
    decoder: Decoder,
}

impl Frames {
    pub fn of(response: Response<Body>) -> Frames {
        Frames {
            body: response.into_body().into_data_stream(),
            rest: Vec::new(),
            decoder: Decoder::new(usize::MAX),
        }
    }

    /// The next frame.
    pub async fn next(&mut self) -> Envelope {
        let next = async {
            loop {
                let mut input = &self.rest[..];
                let envelope = self.decoder.next(&mut input).unwrap();
                self.rest = input.to_vec();
                if let Some(envelope) = envelope {
                    return envelope;
                }
                self.rest = self.body.next().await.unwrap().unwrap().to_vec();
            }
        };
        tokio::time::timeout(SOON, next).await.unwrap()
    }

    /// The next message; or, of the last frame, its error.
    pub async fn message(&mut self) -> Result<Value, Value> {
        let envelope = self.next().await;
        let value: Value = serde_json::from_slice(&envelope.data).unwrap();
        match envelope.is_last {
            false => Ok(value),
            true => Err(value["error"].clone()),
        }
    }

    /// All messages, and the error after them, which is null if there is none.
    pub async fn all(mut self) -> (Vec<Value>, Value) {
        let mut messages = Vec::new();
        loop {
            match self.message().await {
                Ok(message) => messages.push(message),
                Err(error) => return (messages, error),
            }
        }
    }
}
