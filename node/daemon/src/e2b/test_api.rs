//! E2B's API over fakes, for tests: requests without a server.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode};
use serde_json::{Value, json};
use thaw_sandbox::admission::Admission;
use thaw_sandbox::config::api::ApiConfig;
use thaw_sandbox::config::e2b::{E2bConfig, E2bTemplate};

use super::builds::engine::Builds;
use super::envd::access::ForSandbox;
use super::envd::local_guest::LocalGuest;
use super::listener::routes;
use super::members::Members;
use super::notes::Notes;
use super::service::Service;
use super::target::Domain;
use super::template::Templates;
use super::token::AccessTokens;
use crate::api::credentials::Credentials;
use crate::api::daemon::Daemon;
use crate::api::fake::Fake;
use crate::api::request_gate::{Bounds, Gate};
use crate::api::test_client::{send, whole};

/// API keys, by role and tenant.
pub const ACME: &str = "operate-acme-0123456789abcdef";
pub const ACME_READ: &str = "read-acme-0123456789abcdef";
pub const OTHER: &str = "operate-other-0123456789abcdef";
pub const ADMIN: &str = "admin-0123456789abcdef0123456";

pub const DOMAIN: &str = "sandboxes.example";
/// Longest wait for something that happens soon.
pub const SOON: Duration = Duration::from_secs(30);

/// A file with these keys, accessible only to its owner.
pub fn keys() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    let lines = format!(
        "acme {ACME} role=operate tenant=acme\nreader {ACME_READ} role=read tenant=acme\n\
         other {OTHER} role=operate tenant=other\nadmin {ADMIN} role=admin\n"
    );
    std::fs::write(file.path(), lines).unwrap();
    file
}

/// The templates `base`, of an image, and `gone`, of an image that does not exist.
pub fn config() -> E2bConfig {
    let of = |image: &str| E2bTemplate {
        image: Some(image.into()),
        disk_mib: Some(1024),
        ..E2bTemplate::default()
    };
    E2bConfig {
        listen: Some(([127, 0, 0, 1], 0).into()),
        domain: Some(DOMAIN.into()),
        templates: [("base".into(), of("x")), ("gone".into(), of("missing"))].into(),
        cluster: None,
    }
}

/// The ids of the sandboxes in a list.
pub fn ids(list: &Value) -> Vec<String> {
    let all = list.as_array().unwrap().iter();
    all.map(|sandbox| sandbox["sandboxID"].as_str().unwrap().to_owned())
        .collect()
}

/// In place of a server for processes and files: answers with the sandbox that the request is for.
pub async fn echo(request: Request<Body>) -> String {
    let wanted = request
        .extensions()
        .get::<ForSandbox>()
        .map(|of| of.wanted.clone());
    format!("{} of {}", request.uri().path(), wanted.unwrap().text)
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Value,
}

impl Answer {
    /// Checks that it is an error in E2B's form, and returns its message.
    pub fn refused(self, status: u16, what: &str) -> String {
        assert_eq!(self.status.as_u16(), status, "{what}: {}", self.body);
        assert_eq!(self.body["code"], status, "{what}: {}", self.body);
        let message = self.body["message"].as_str().unwrap_or_default().to_owned();
        assert!(!message.is_empty(), "{what}");
        message
    }

    /// Checks that it has this status, and returns the body.
    pub fn ok(self, status: u16) -> Value {
        assert_eq!(self.status.as_u16(), status, "{}", self.body);
        self.body
    }
}

/// The API.
pub struct Api {
    pub fake: Arc<Fake>,
    pub daemon: Arc<Daemon>,
    pub service: Arc<Service>,
    pub routes: Router,
    _keys: tempfile::NamedTempFile,
    _data: tempfile::TempDir,
}

impl Api {
    pub fn new() -> Api {
        Api::with(None)
    }

    /// With a server of the protocol for processes and files.
    pub fn with(envd: Option<Router>) -> Api {
        Api::of_node(envd, Admission::default(), None)
    }

    /// The same on a node with these limits, among these nodes.
    pub fn of_node(
        envd: Option<Router>,
        admission: Admission,
        members: Option<(Members, AccessTokens)>,
    ) -> Api {
        let (fake, daemon) = Fake::daemon_within(true, admission);
        let (members, tokens) = members.unzip();
        let (keys, data) = (keys(), tempfile::tempdir().unwrap());
        let credentials = Credentials::read(&ApiConfig {
            tokens: Some(keys.path().to_owned()),
            ..ApiConfig::default()
        });
        let service = Arc::new(Service {
            daemon: daemon.clone(),
            tokens: tokens.unwrap_or_else(|| AccessTokens::open(data.path()).unwrap()),
            templates: Templates::read(&config()).unwrap(),
            builds: Arc::new(Builds::open(data.path()).unwrap()),
            domain: Some(Domain::parse(DOMAIN).unwrap()),
            is_encrypted: false,
            members: members.map(Arc::new),
        });
        let gate = Gate::new(Bounds::default());
        let routes = routes(service.clone(), gate, Arc::new(credentials.unwrap()), envd);
        Api {
            fake,
            daemon,
            service,
            routes,
            _keys: keys,
            _data: data,
        }
    }

    /// Sends a request with these headers.
    pub async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = send(&self.routes, request.body(Body::from(body.to_owned())).unwrap()).await;
        let (status, headers) = (response.status(), response.headers().clone());
        let body = whole(response).await;
        let text = || Value::String(String::from_utf8_lossy(&body).into_owned());
        Answer {
            status,
            headers,
            body: serde_json::from_slice(&body).unwrap_or_else(|_| text()),
        }
    }

    /// Sends a request to the control plane with an API key.
    pub async fn ask(&self, key: &str, method: &str, path: &str, body: Value) -> Answer {
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        let headers = [("x-api-key", key), ("content-type", "application/json")];
        self.send(method, path, &headers, &body).await
    }

    /// Creates a sandbox of the template `base` with these fields too, and returns its id.
    pub async fn make(&self, key: &str, fields: Value) -> String {
        let mut body = json!({"templateID": "base"});
        body.as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        let made = self.ask(key, "POST", "/v2/sandboxes", body).await.ok(201);
        made["sandboxID"].as_str().unwrap().to_owned()
    }

    /// All pages of a list.
    pub async fn pages(&self, key: &str, list: &str) -> Vec<Value> {
        let (mut pages, mut next) = (Vec::new(), String::new());
        loop {
            let path = format!("{list}&nextToken={next}");
            let page = self.ask(key, "GET", &path, Value::Null).await;
            let token = page.headers.get("x-next-token").cloned();
            pages.push(page.ok(200));
            match token {
                Some(token) => next = token.to_str().unwrap().to_owned(),
                None => return pages,
            }
        }
    }

    /// The API whose guests run processes of this host.
    pub fn with_guest() -> (Api, Arc<LocalGuest>) {
        let (api, guest) = (Api::new(), Arc::new(LocalGuest::default()));
        *api.fake.guest.lock().unwrap() = Some(guest.clone());
        (api, guest)
    }

    /// Requests a build, and returns the ids of the template and the build.
    pub async fn request_build(&self, key: &str, name: &str) -> (String, String) {
        let made = self.ask(key, "POST", "/v3/templates", json!({"name": name}));
        let made = made.await.ok(202);
        let text = |field: &str| made[field].as_str().unwrap().to_owned();
        (text("templateID"), text("buildID"))
    }

    /// Starts a build, and returns the path of its status.
    pub async fn start_build(&self, key: &str, name: &str, what: Value) -> String {
        let (template, build) = self.request_build(key, name).await;
        let path = format!("/v2/templates/{template}/builds/{build}");
        self.ask(key, "POST", &path, what).await.ok(202);
        format!("/templates/{template}/builds/{build}/status")
    }

    /// Builds a template, and returns the status of the build that is over.
    pub async fn build(&self, key: &str, name: &str, what: Value) -> Value {
        let path = self.start_build(key, name, what).await;
        let over = async {
            loop {
                let status = self.ask(key, "GET", &path, Value::Null).await.ok(200);
                match status["status"].as_str().unwrap() {
                    "waiting" | "building" => tokio::time::sleep(Duration::from_millis(20)).await,
                    _ => return status,
                }
            }
        };
        tokio::time::timeout(SOON, over).await.expect("the build ends")
    }

    /// What E2B's API describes of a sandbox.
    pub async fn shown(&self, key: &str, id: &str) -> Value {
        self.ask(key, "GET", &format!("/sandboxes/{id}"), Value::Null)
            .await
            .ok(200)
    }

    /// What is kept with a sandbox.
    pub fn notes(&self, id: &str) -> Notes {
        self.service.own_notes(id).unwrap()
    }
}
