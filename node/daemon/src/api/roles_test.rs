//! Tests the roles of callers on every operation of the OpenAPI document, so that a new operation is tested without further code.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{Response, StatusCode};
use proptest::prelude::*;
use serde_json::json;
use thaw_protocol::api::{CreatedSandbox, Problem, Sandbox};

use super::daemon::Daemon;
use super::fake::Fake;
use super::grant::{Grant, Role};
use super::peer::Peer;
use super::request_gate::{Bounds, Gate};
use super::reserved::Reserved;
use super::router::router;
use super::test_client::{JSON, ask, send, whole};
use super::test_document::{Document, Operation};

#[path = "tenants_test.rs"]
mod tenants;

/// Text in the descriptions of fields that only an administrator may use.
const MARK: &str = "Requires the role admin.";
/// Different spellings of a path to a file of the host.
const PATHS: [&str; 6] = [
    "/etc/passwd",
    "/tmp/../etc/passwd",
    "../etc/passwd",
    "/proc/self/root/etc/passwd",
    "file:///etc/passwd",
    "~/x",
];
/// Image references that name a file of the host.
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
/// Text fields that name nothing of the host: they concern the guest, or the sandbox's own description.
const OF_NO_FILE: [&str; 53] = [
    "ChangeSnapshot.name",
    "CreateSandbox.command",
    "CreateSandbox.container.command",
    "CreateSandbox.container.entrypoint",
    "CreateSandbox.container.env",
    "CreateSandbox.container.health_check.command",
    "CreateSandbox.container.hooks.after_thaw.command",
    "CreateSandbox.container.hooks.after_thaw.http.host",
    "CreateSandbox.container.hooks.after_thaw.http.path",
    "CreateSandbox.container.hooks.after_thaw.user",
    "CreateSandbox.container.hooks.before_freeze.command",
    "CreateSandbox.container.hooks.before_freeze.http.host",
    "CreateSandbox.container.hooks.before_freeze.http.path",
    "CreateSandbox.container.hooks.before_freeze.user",
    "CreateSandbox.container.readiness.http.host",
    "CreateSandbox.container.readiness.http.path",
    "CreateSandbox.container.settings.anonymous_volumes",
    "CreateSandbox.container.settings.dns_options",
    "CreateSandbox.container.settings.dns_search",
    "CreateSandbox.container.settings.domainname",
    "CreateSandbox.container.settings.extra_hosts",
    "CreateSandbox.container.settings.group_add",
    "CreateSandbox.container.settings.tmpfs",
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
    "FreezeSandbox.name",
    "MakeDirectory.path",
    "MoveFile.from",
    "MoveFile.to",
    "ProcessInput.data",
    "ProcessInput.process",
    "ProcessSignal.process",
    "ThawSandbox.hostname",
    "ThawSandbox.name",
    "ThawSandbox.network_policy.egress.allow",
    "ThawSandbox.network_policy.egress.deny",
    "ThawSandbox.snapshot",
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

/// The status of a response, and the code of its problem if it has one.
async fn outcome(response: Response<Body>) -> (u16, String, String) {
    let status = response.status();
    // Of an endless stream, only the head is read.
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
            "/v1/tenants",
            "/v1/node/drain",
            "/metrics",
        ];
        if shared.iter().any(|path| operation.path.starts_with(path)) {
            assert_eq!(operation.least, Role::Admin, "{}", operation.name);
        }
        if operation.method != "GET" {
            assert!(operation.least > Role::Read, "{}", operation.name);
        }
    }
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
            let is_reference = field.ends_with(".image") || field.ends_with(".reference");
            let texts: Vec<&str> = match is_reference {
                true => IMAGES.to_vec(),
                false => paths.iter().map(String::as_str).collect(),
            };
            for text in texts {
                let (fake, _daemon, routes) = daemon();
                // Containers are ready, so that no creation waits.
                fake.ready.send_replace(Some(true));
                let body = document.with(schema, &names, text).to_string();
                let subject = make(&routes, &operator("acme"), &named("web")).await.id;
                let made = fake.made();
                let request = operation.request(&subject, body.clone());
                let response = send(&routes, of(&operator("acme"), request)).await;
                let (status, code, _) = outcome(response).await;
                match code.as_str() {
                    "role-too-low" => refused += 1,
                    // The operation accepts such a text from no caller.
                    "invalid-body" | "bad-reference" => {}
                    _ => {
                        let is_known = OF_NO_FILE.contains(&field.as_str()) && !is_reference;
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
    /// Any text as an image is a registry on another host, an invalid reference, or reserved for administrators.
    #[test]
    fn image_that_is_a_path_is_reserved(kind in "(oci|docker-archive|OCI| oci|)", rest in "[ :/.@a-z]{0,20}") {
        let image = format!("{kind}:{rest}");
        let parsed: Result<thaw_images::reference::ImageRef, _> = image.parse();
        let is_of_registry = matches!(&parsed, Ok(thaw_images::reference::ImageRef::Registry(of)) if !of.is_loopback());
        let request = super::fake::request(&image);
        prop_assert_eq!(request.reserved().is_some(), parsed.is_ok() && !is_of_registry);
    }
}
