//! Roles and tenants, on every operation of the OpenAPI document: one that is added is tested by itself.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{Response, StatusCode};
use http_body_util::BodyExt;
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use thaw_protocol::api::{
    CreatedSandbox, ForkedSandbox, NodeUsage, Problem, Sandbox, SandboxList, WatchEvent,
};
use thaw_sandbox::id::is_id;

use super::daemon::Daemon;
use super::fake::{Fake, UNOWNED};
use super::grant::{Grant, Role};
use super::limits::{Bounds, Gate};
use super::peer::Peer;
use super::reserved::Reserved;
use super::router::{document, router};
use super::scope::Wanted;
use super::test_client::{JSON, ask, send, whole};

/// What the descriptions of fields say that only an administrator may use.
const MARK: &str = "Requires the role admin.";
/// Names of a file of the host, however it is reached.
const PATHS: [&str; 6] = [
    "/etc/passwd",
    "/tmp/../etc/passwd",
    "../etc/passwd",
    "/proc/self/root/etc/passwd",
    "file:///etc/passwd",
    "~/x",
];
/// Images that are one.
const IMAGES: [&str; 10] = [
    "oci:/etc",
    "oci:../etc:tag",
    "oci:x",
    "docker-archive:/etc/passwd",
    "docker-archive:./x:a:b",
    "oci:/proc/self/root/etc",
    "localhost:5000/x",
    "localhost/x:tag",
    "127.0.0.2:80/x",
    "[::1]:5000/x",
];
/// Fields with texts that name nothing of the host: of the guest, or of the sandbox's own description.
const OF_NO_FILE: [&str; 24] = [
    "CreateSandbox.command",
    "CreateSandbox.container.command",
    "CreateSandbox.container.entrypoint",
    "CreateSandbox.container.env",
    "CreateSandbox.container.readiness.http.host",
    "CreateSandbox.container.readiness.http.path",
    "CreateSandbox.container.user",
    "CreateSandbox.container.workdir",
    "CreateSandbox.hostname",
    "CreateSandbox.image", // of a registry, unless it says oci: or docker-archive:
    "CreateSandbox.name",
    "CreateSandbox.network",
    "CreateSandbox.network_policy.egress.allow",
    "CreateSandbox.network_policy.egress.deny",
    "CreateSandbox.network_policy.egress.ports",
    "CreateSandbox.network_policy.egress.protocol",
    "CreateSandbox.publish.protocol",
    "CreateSandbox.pull",
    "CreateSandbox.root",
    "ExecProcess.command",
    "ExecProcess.env",
    "ExecProcess.stdin",
    "ExecProcess.user",
    "ExecProcess.workdir",
];

fn peer(name: &str, role: Role, tenant: &str) -> Peer {
    Peer::token(name, Grant::new(role, Some(tenant.parse().unwrap())).unwrap())
}

fn operator(tenant: &str) -> Peer {
    peer("operator", Role::Operate, tenant)
}

fn daemon() -> (Arc<Fake>, Arc<Daemon>, Router) {
    let (fake, daemon) = Fake::daemon(true);
    let routes = router(daemon.clone(), Gate::new(Bounds::default()));
    (fake, daemon, routes)
}

fn of(peer: &Peer, mut request: Request) -> Request {
    request.extensions_mut().insert(peer.clone());
    request
}

async fn asked(
    routes: &Router,
    peer: &Peer,
    method: &str,
    path: &str,
    body: impl Into<Body>,
) -> Response<Body> {
    send(routes, of(peer, ask(method, path, JSON, body))).await
}

async fn read<T: serde::de::DeserializeOwned>(routes: &Router, peer: &Peer, path: &str) -> T {
    let response = asked(routes, peer, "GET", path, "").await;
    assert_eq!(response.status(), StatusCode::OK, "{path}");
    serde_json::from_slice(&whole(response).await).unwrap()
}

/// Its status, and the code of its problem if it is one.
async fn outcome(response: Response<Body>) -> (u16, String, String) {
    let status = response.status();
    // What follows for ever has its head alone.
    if status.is_success() {
        return (status.as_u16(), String::new(), String::new());
    }
    let body = whole(response).await;
    let problem: Problem = serde_json::from_slice(&body).unwrap_or_else(|e| panic!("{status}: {e}"));
    (status.as_u16(), problem.code, problem.detail)
}

async fn make(routes: &Router, peer: &Peer, body: &str) -> Sandbox {
    let response = asked(routes, peer, "POST", "/v1/sandboxes", body.to_owned()).await;
    assert_eq!(response.status(), StatusCode::CREATED, "{body}");
    let made: CreatedSandbox = serde_json::from_slice(&whole(response).await).unwrap();
    made.sandbox
}

fn named(name: &str) -> String {
    let container = json!({"command": ["x"]});
    json!({"image": "x", "cpus": 1, "memory_mib": 128, "name": name, "container": container}).to_string()
}

/// An operation of the document.
struct Operation {
    method: String,
    path: String,
    name: String,
    least: Role,
    /// With the parameters of the query that it cannot be without.
    query: String,
    /// The name of its JSON body's schema, if it takes one.
    body: Option<String>,
}

/// The document, for looking things up.
struct Document(Value);

impl Document {
    fn read() -> Document {
        Document(serde_json::from_str(&document()).unwrap())
    }

    fn operations(&self) -> Vec<Operation> {
        let mut all = Vec::new();
        for (path, methods) in self.0["paths"].as_object().unwrap() {
            for (method, said) in methods.as_object().unwrap() {
                let name = said["operationId"].as_str().unwrap().to_owned();
                let roles: Vec<&Value> = said["security"]
                    .as_array()
                    .unwrap_or_else(|| panic!("{name} says no role"))
                    .iter()
                    .flat_map(|way| way.as_object().unwrap().values())
                    .collect();
                assert_eq!(roles.len(), 2, "{name}: a token, a certificate");
                assert_eq!(roles[0], roles[1], "{name}");
                let least = roles[0][0].as_str().unwrap().parse().unwrap();
                let parameters = said["parameters"].as_array().into_iter().flatten();
                let query = parameters.filter(|p| p["in"] == "query" && p["required"] == true);
                let query = query.map(|p| {
                    let value = self.example(&p["schema"]);
                    format!("{}={}", p["name"].as_str().unwrap(), value.as_str().unwrap())
                });
                let body = &said["requestBody"]["content"]["application/json"]["schema"]["$ref"];
                all.push(Operation {
                    method: method.to_uppercase(),
                    path: path.clone(),
                    name,
                    least,
                    query: query.collect::<Vec<_>>().join("&"),
                    body: body.as_str().map(|r| r.rsplit('/').next().unwrap().to_owned()),
                });
            }
        }
        assert!(all.len() > 20, "{}", all.len());
        all
    }

    fn schema(&self, name: &str) -> &Value {
        let schema = &self.0["components"]["schemas"][name];
        assert!(schema.is_object(), "{name}");
        schema
    }

    /// What a reference, or the first of some forms, stands for.
    fn resolved<'a>(&'a self, schema: &'a Value) -> &'a Value {
        let first = schema["oneOf"].as_array().or(schema["allOf"].as_array());
        match (schema["$ref"].as_str(), first) {
            (Some(reference), _) => self.resolved(self.schema(reference.rsplit('/').next().unwrap())),
            (None, Some(forms)) => {
                let is_null = |form: &&Value| form["type"] == "null";
                self.resolved(forms.iter().find(|form| !is_null(form)).unwrap())
            }
            (None, None) => schema,
        }
    }

    fn is_type(schema: &Value, wanted: &str) -> bool {
        let kind = &schema["type"];
        kind == wanted
            || kind
                .as_array()
                .is_some_and(|kinds| kinds.iter().any(|k| k == wanted))
    }

    /// Something that fits a schema: as little as it takes, and not a default where there is a choice.
    fn example(&self, schema: &Value) -> Value {
        let schema = self.resolved(schema);
        if let Some(one) = schema["enum"].as_array() {
            return one.last().unwrap().clone();
        }
        let is = |wanted| Document::is_type(schema, wanted);
        if is("object") || schema["properties"].is_object() {
            let required = schema["required"].as_array().into_iter().flatten();
            let pairs = required.map(|name| {
                let name = name.as_str().unwrap();
                (name.to_owned(), self.example(&schema["properties"][name]))
            });
            return Value::Object(pairs.collect::<Map<_, _>>());
        }
        if is("array") {
            return json!([self.example(&schema["items"])]);
        }
        if is("integer") {
            return schema["minimum"].as_u64().unwrap_or(1).into();
        }
        if is("boolean") {
            return true.into();
        }
        let pattern = schema["pattern"].as_str().unwrap_or_default();
        match pattern
            .strip_prefix("^(")
            .and_then(|p| p.split(['|', ')']).next())
        {
            Some(first) => first.into(),
            None if pattern.starts_with("^/") => "/x".into(),
            None => "x".into(),
        }
    }

    /// The smallest body an operation takes.
    fn body(&self, operation: &Operation) -> String {
        match &operation.body {
            Some(name) => self.example(self.schema(name)).to_string(),
            None => String::new(),
        }
    }

    /// Every text in a schema, by the names of the fields that lead to it.
    fn texts(&self, at: &str, schema: &Value, found: &mut Vec<String>) {
        let schema = self.resolved(schema);
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            self.texts(&format!("{at}.{name}"), property, found);
        }
        if Document::is_type(schema, "array") {
            return self.texts(at, &schema["items"], found);
        }
        if Document::is_type(schema, "string") && schema["enum"].is_null() {
            found.push(at.to_owned());
        }
    }

    /// The smallest body of a schema with this text where those names lead.
    fn with(&self, schema: &Value, names: &[&str], text: &str) -> Value {
        let schema = self.resolved(schema);
        if Document::is_type(schema, "array") {
            return json!([self.with(&schema["items"], names, text)]);
        }
        let Some((first, rest)) = names.split_first() else {
            return text.into();
        };
        let mut whole = self.example(schema);
        whole[first] = self.with(&schema["properties"][first], rest, text);
        whole
    }
}

impl Operation {
    /// Of this sandbox, or image, or template.
    fn request(&self, subject: &str, body: String) -> Request {
        let mut path = self.path.clone();
        if let Some((before, rest)) = self.path.split_once('{') {
            let (_, after) = rest.split_once('}').unwrap();
            path = format!("{before}{subject}{after}");
        }
        if !self.query.is_empty() {
            path = format!("{path}?{}", self.query);
        }
        ask(&self.method, &path, JSON, body)
    }

    fn is_of_a_sandbox(&self) -> bool {
        self.path.starts_with("/v1/sandboxes/{id}")
    }

    /// One whose guest must be asked over a connection of its own: `tcp_test` has it.
    fn is_a_session(&self) -> bool {
        self.name == "openExecSession"
    }
}

#[tokio::test]
async fn every_operation_is_for_the_role_it_says_and_for_those_above() {
    let document = Document::read();
    for operation in document.operations() {
        let (_fake, _daemon, routes) = daemon();
        for role in Role::ALL {
            let caller = peer("x", role, "acme");
            let request = operation.request("nobody", document.body(&operation));
            let (status, code, detail) = outcome(send(&routes, of(&caller, request)).await).await;
            let is_refused = (status, code.as_str()) == (403, "role-too-low");
            let name = &operation.name;
            assert_eq!(
                is_refused,
                role < operation.least,
                "{name} as {role}: {status} {detail}"
            );
            if is_refused {
                assert!(detail.contains(operation.least.name()), "{name}: {detail}");
            }
        }
        let mut nobody = operation.request("nobody", document.body(&operation));
        nobody.extensions_mut().remove::<Peer>();
        assert_eq!(send(&routes, nobody).await.status(), StatusCode::FORBIDDEN);
    }
}

#[test]
fn what_tenants_share_is_an_administrators() {
    for operation in Document::read().operations() {
        let shared = [
            "/v1/images",
            "/v1/templates",
            "/v1/node/drain",
            "/metrics",
            "/v1/thaws",
        ];
        if shared.iter().any(|path| operation.path.starts_with(path)) {
            assert_eq!(operation.least, Role::Admin, "{}", operation.name);
        }
        if operation.method != "GET" {
            assert!(operation.least > Role::Read, "{}", operation.name);
        }
    }
}

/// Two tenants' sandboxes: one that runs and one that failed each, with the same names.
async fn two_tenants() -> (Arc<Fake>, Arc<Daemon>, Router, Vec<Sandbox>) {
    let (fake, daemon, routes) = daemon();
    let mut made = Vec::new();
    for tenant in ["acme", "other"] {
        for name in ["dead", "web"] {
            let sandbox = make(&routes, &operator(tenant), &named(name)).await;
            assert_eq!(sandbox.tenant.as_deref(), Some(tenant));
            made.push(sandbox);
        }
    }
    for dead in made.iter().filter(|s| s.name.as_deref() == Some("dead")) {
        daemon.running(&Wanted::on_node(&dead.id)).unwrap().kill();
        while daemon.cache.get(&dead.id).unwrap().state != "failed" {
            tokio::task::yield_now().await;
        }
    }
    (fake, daemon, routes, made)
}

#[tokio::test]
async fn sandbox_of_another_tenant_is_not_there_on_any_operation() {
    let document = Document::read();
    let (_fake, daemon, routes, made) = two_tenants().await;
    // Names that this tenant has not.
    let (others, _) = made.split_at(2);
    make(&routes, &operator("acme"), &named("theirs-alone")).await;
    let theirs = others.iter().map(|s| s.id.clone());
    let theirs: Vec<String> = theirs.chain(["theirs-alone".to_owned()]).collect();
    let before = daemon.cache.version();
    let mut asked_of = 0;
    for operation in document.operations().iter().filter(|o| o.is_of_a_sandbox()) {
        for role in [Role::Read, Role::Operate] {
            let caller = peer("intruder", role, "other");
            for subject in &theirs {
                let ask_of = async |subject: &str| {
                    let request = operation.request(subject, document.body(operation));
                    let (status, code, detail) = outcome(send(&routes, of(&caller, request)).await).await;
                    (status, code, detail.replace(subject, "SUBJECT"))
                };
                let (of_theirs, of_nothing) = (ask_of(subject).await, ask_of("0123456789ab").await);
                let name = &operation.name;
                assert_eq!(of_theirs, of_nothing, "{name} as {role} of {subject}");
                let expected = match (role.suffices(operation.least), operation.is_a_session()) {
                    (false, _) => (403, "role-too-low"),
                    (true, true) => (426, "upgrade-required"),
                    (true, false) => (404, "sandbox-not-found"),
                };
                assert_eq!(
                    (of_theirs.0, of_theirs.1.as_str()),
                    expected,
                    "{name} of {subject}"
                );
                asked_of += 1;
            }
        }
    }
    assert!(asked_of > 60, "{asked_of}");
    assert_eq!(daemon.cache.version(), before, "nothing has changed");
}

/// That the test above can fail: the same requests are answered to whose the sandbox is.
#[tokio::test]
async fn ones_own_sandbox_is_there_on_every_operation() {
    let document = Document::read();
    let all = document.operations();
    let mine = |o: &&Operation| o.is_of_a_sandbox() && o.least < Role::Admin && !o.is_a_session();
    for operation in all.iter().filter(mine) {
        for by_name in [false, true] {
            let (_fake, _daemon, routes, made) = two_tenants().await;
            let subject = if by_name { "web" } else { &made[3].id };
            let request = operation.request(subject, document.body(operation));
            let response = send(&routes, of(&operator("other"), request)).await;
            let (status, code, detail) = outcome(response).await;
            let is_there = status < 300 || code == "file-not-found";
            assert!(is_there, "{}: {status} {code} {detail}", operation.name);
        }
    }
}

#[tokio::test]
async fn lists_usage_and_watches_have_ones_own_sandboxes_alone() {
    let (_fake, _daemon, routes, made) = two_tenants().await;
    let of_tenant = |tenant: &str| {
        let all = made.iter().filter(|s| s.tenant.as_deref() == Some(tenant));
        all.map(|s| s.id.clone()).collect::<Vec<_>>()
    };
    let ids = |list: SandboxList| list.items.into_iter().map(|s| s.id).collect::<Vec<_>>();
    for role in [Role::Read, Role::Operate] {
        let caller = peer("x", role, "other");
        assert_eq!(
            ids(read(&routes, &caller, "/v1/sandboxes").await),
            of_tenant("other")
        );
        let theirs = "/v1/sandboxes?fieldSelector=tenant=acme";
        assert!(ids(read(&routes, &caller, theirs).await).is_empty());
        // Whatever place to go on from is made up.
        for after in made.iter().map(|s| &s.id) {
            let version = read::<SandboxList>(&routes, &caller, "/v1/sandboxes").await;
            let token = super::watch::page::Token {
                version: version.resource_version,
                after: after.clone(),
            };
            let path = format!("/v1/sandboxes?continue={}", token.encode());
            let listed = ids(read(&routes, &caller, &path).await);
            assert!(
                listed.iter().all(|id| of_tenant("other").contains(id)),
                "{listed:?}"
            );
        }
        let usage: NodeUsage = read(&routes, &caller, "/v1/node/usage").await;
        let used: Vec<_> = usage.sandboxes.iter().map(|s| s.id.clone()).collect();
        assert_eq!((used, usage.pools.len()), (vec![made[3].id.clone()], 0));
    }
    let admin = Peer::user(0);
    assert_eq!(
        read::<SandboxList>(&routes, &admin, "/v1/sandboxes")
            .await
            .items
            .len(),
        4
    );
    let of_acme = ids(read(&routes, &admin, "/v1/sandboxes?fieldSelector=tenant=acme").await);
    assert_eq!(of_acme, of_tenant("acme"));
    let usage: NodeUsage = read(&routes, &admin, "/v1/node/usage").await;
    assert_eq!((usage.sandboxes.len(), usage.pools.len()), (2, 1));

    let watching = asked(&routes, &operator("other"), "GET", "/v1/sandboxes?watch=1", "").await;
    make(&routes, &operator("acme"), &named("unseen")).await;
    make(&routes, &admin, &named("unseen")).await;
    let seen = make(&routes, &operator("other"), &named("seen")).await;
    let line = watching.into_body().frame().await.unwrap().unwrap();
    let event: WatchEvent = serde_json::from_slice(&line.into_data().unwrap()).unwrap();
    assert_eq!(event, WatchEvent::Added(seen));
}

#[tokio::test]
async fn name_means_the_sandbox_of_the_callers_tenant() {
    let (_fake, _daemon, routes, made) = two_tenants().await;
    let id = async |peer: &Peer, wanted: &str| {
        let path = format!("/v1/sandboxes/{wanted}");
        let response = asked(&routes, peer, "GET", &path, "").await;
        let body = whole(response).await;
        serde_json::from_slice::<Sandbox>(&body).ok().map(|s| s.id)
    };
    assert_eq!(id(&operator("acme"), "web").await, Some(made[1].id.clone()));
    assert_eq!(id(&operator("other"), "web").await, Some(made[3].id.clone()));
    // An administrator's names are its own; others' sandboxes it reaches by id.
    assert_eq!(id(&Peer::user(0), "web").await, None);
    let of_acme = peer("a", Role::Admin, "acme");
    assert_eq!(id(&of_acme, "web").await, Some(made[1].id.clone()));
    for sandbox in &made {
        assert_eq!(id(&Peer::user(0), &sandbox.id).await, Some(sandbox.id.clone()));
        assert_eq!(id(&of_acme, &sandbox.id).await, Some(sandbox.id.clone()));
    }
    let ours = make(&routes, &Peer::user(0), &named("web")).await;
    assert_eq!(
        (id(&Peer::user(0), "web").await, ours.tenant),
        (Some(ours.id), None)
    );
}

#[tokio::test]
async fn name_of_a_tenants_sandbox_is_never_an_id() {
    let (_fake, _daemon, routes, made) = two_tenants().await;
    assert!(is_id(&made[0].id));
    for name in [made[0].id.as_str(), "0123456789ab"] {
        let asked = asked(&routes, &operator("other"), "POST", "/v1/sandboxes", named(name)).await;
        assert_eq!(
            outcome(asked).await.1,
            "invalid-body",
            "whether there is such an id or not"
        );
    }
}

#[tokio::test]
async fn key_of_another_tenant_answers_nothing() {
    let (fake, _daemon, routes) = daemon();
    let keyed = async |peer: &Peer| {
        let mut request = ask("POST", "/v1/sandboxes", JSON, named("web"));
        let key = "k".parse().unwrap();
        request.headers_mut().insert("idempotency-key", key);
        let response = send(&routes, of(peer, request)).await;
        let made: CreatedSandbox = serde_json::from_slice(&whole(response).await).unwrap();
        (made.sandbox.id, made.sandbox.tenant)
    };
    let first = keyed(&operator("acme")).await;
    assert_eq!(keyed(&operator("acme")).await, first);
    // The same token, after its line was given another tenant.
    let moved = keyed(&operator("other")).await;
    assert_ne!(moved.0, first.0);
    assert_eq!(moved.1.as_deref(), Some("other"));
    assert_eq!(fake.made(), 2);
}

#[tokio::test]
async fn clone_is_of_the_tenant_of_its_original() {
    let (_fake, _daemon, routes, made) = two_tenants().await;
    for caller in [operator("acme"), Peer::user(0), peer("a", Role::Admin, "other")] {
        let path = format!("/v1/sandboxes/{}/fork", made[1].id);
        let forked = asked(&routes, &caller, "POST", &path, r#"{"count":2}"#).await;
        assert_eq!(forked.status(), StatusCode::CREATED);
        let forked: ForkedSandbox = serde_json::from_slice(&whole(forked).await).unwrap();
        for clone in forked.items {
            assert_eq!(clone.sandbox.tenant.as_deref(), Some("acme"));
        }
    }
}

#[tokio::test]
async fn sandbox_without_an_owner_is_an_administrators_to_end() {
    let (_fake, _daemon, routes) = daemon();
    let path = format!("/v1/sandboxes/{UNOWNED}");
    let of_tenant = asked(&routes, &operator("acme"), "DELETE", &path, "").await;
    assert_eq!(of_tenant.status(), StatusCode::NOT_FOUND);
    let of_node = asked(&routes, &Peer::user(0), "DELETE", &path, "").await;
    assert_eq!(of_node.status(), StatusCode::NO_CONTENT);
}

#[tokio::test]
async fn field_that_takes_an_administrator_says_so() {
    let document = Document::read();
    let mut marked = 0;
    let is_operators = |o: &&Operation| o.least == Role::Operate && o.body.is_some();
    for operation in document.operations().iter().filter(is_operators) {
        let schema = document.schema(operation.body.as_ref().unwrap());
        for (name, property) in schema["properties"].as_object().unwrap() {
            let (fake, _daemon, routes) = daemon();
            let said = property.to_string().contains(MARK);
            marked += usize::from(said);
            let mut body = document.example(schema);
            body[name] = document.example(property);
            let request = operation.request("nobody", body.to_string());
            let (status, code, detail) = outcome(send(&routes, of(&operator("acme"), request)).await).await;
            let is_refused = (status, code.as_str()) == (403, "role-too-low");
            assert_eq!(is_refused, said, "{}.{name}: {status} {detail}", operation.name);
            if said {
                assert!(detail.contains(name.as_str()), "{name}: {detail}");
                assert_eq!(fake.made(), 0);
            }
            let request = operation.request("nobody", body.to_string());
            let of_admin = outcome(send(&routes, of(&peer("a", Role::Admin, "acme"), request)).await).await;
            assert_ne!(of_admin.0, 403, "{name}");
        }
    }
    assert!(marked >= 6, "{marked}");
}

#[tokio::test]
async fn path_of_the_host_is_refused_in_every_field_that_takes_one() {
    let place = tempfile::tempdir().unwrap();
    let link = place.path().join("link");
    std::os::unix::fs::symlink("/etc", &link).unwrap();
    let through = |rest: &str| link.join(rest).display().to_string();
    let paths = PATHS.map(str::to_owned).into_iter();
    let paths: Vec<String> = paths
        .chain([through("passwd"), through("../etc/passwd")])
        .collect();
    let document = Document::read();
    let (mut refused, mut known) = (0, std::collections::BTreeSet::new());
    let is_operators = |o: &&Operation| o.least == Role::Operate && o.body.is_some();
    for operation in document.operations().iter().filter(is_operators) {
        let name = operation.body.as_ref().unwrap();
        let schema = document.schema(name);
        let mut texts = Vec::new();
        document.texts(name, schema, &mut texts);
        for field in texts {
            let names: Vec<&str> = field.split('.').skip(1).collect();
            let texts: Vec<&str> = match field.ends_with(".image") {
                true => IMAGES.to_vec(),
                false => paths.iter().map(String::as_str).collect(),
            };
            for text in texts {
                let (fake, _daemon, routes) = daemon();
                // Nobody waits for a container.
                fake.ready.send_replace(Some(true));
                let body = document.with(schema, &names, text).to_string();
                let subject = make(&routes, &operator("acme"), &named("web")).await.id;
                let made = fake.made();
                let request = operation.request(&subject, body.clone());
                let response = send(&routes, of(&operator("acme"), request)).await;
                let (status, code, _) = outcome(response).await;
                match code.as_str() {
                    "role-too-low" => refused += 1,
                    // It takes no such text from anybody.
                    "invalid-body" | "bad-reference" => {}
                    _ => {
                        let is_known = OF_NO_FILE.contains(&field.as_str()) && !field.ends_with(".image");
                        assert!(
                            is_known,
                            "{field} takes {text}: {status} {code}; is it a file of the host?"
                        );
                        known.insert(field.clone());
                        continue;
                    }
                }
                assert_eq!(fake.made(), made, "{field}: {body}");
            }
        }
    }
    assert!(refused > 20, "{refused}");
    assert!(known.len() > 5, "{known:?}");
}

#[tokio::test]
async fn chosen_port_of_the_host_is_an_administrators() {
    let (_fake, _daemon, routes) = daemon();
    let ports = [(0, 201), (22, 403), (8443, 403), (65535, 403)]
        .map(|(port, status)| (json!({"host": port, "guest": 80}), status));
    let addresses =
        ["127.0.0.1", "0.0.0.0", "10.0.0.1"].map(|a| (json!({"host": 0, "guest": 80, "address": a}), 403));
    for (port, status) in ports.into_iter().chain(addresses) {
        let publish = json!([{"host": 0, "guest": 1}, port]);
        let body = json!({"image": "x", "cpus": 1, "memory_mib": 128, "publish": publish}).to_string();
        let of_tenant = asked(&routes, &operator("acme"), "POST", "/v1/sandboxes", body.clone()).await;
        assert_eq!(of_tenant.status().as_u16(), status, "{port}");
        let of_admin = asked(&routes, &Peer::user(0), "POST", "/v1/sandboxes", body).await;
        assert_eq!(of_admin.status(), StatusCode::CREATED, "{port}");
    }
}

proptest! {
    /// Whatever is said to be an image: it is one of another host's registry, or no reference, or an administrator's.
    #[test]
    fn image_that_is_a_path_is_reserved(kind in "(oci|docker-archive|OCI| oci|)", rest in "[ :/.@a-z]{0,20}") {
        let image = format!("{kind}:{rest}");
        let parsed: Result<thaw_images::reference::ImageRef, _> = image.parse();
        let is_of_registry = matches!(&parsed, Ok(thaw_images::reference::ImageRef::Registry(of)) if !of.is_loopback());
        let request = super::fake::request(&image);
        prop_assert_eq!(request.reserved().is_some(), parsed.is_ok() && !is_of_registry);
    }
}
