//! The routes, the least role of each, and the layers that every request passes.
//!
//! Invariant: every route has a least role. Only [`Table`] adds routes, each with one.

use std::sync::Arc;

use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use axum::{Extension, Router};
use thaw_protocol::api::{Bookmark, ExecEvent, ExecInput, MAX_BODY, Problem, SnapshotEvent, WatchEvent};
use utoipa::OpenApi;
use utoipa::openapi::content::Content;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::schema::Ref;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Components, RefOr, Required};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};
use utoipa_axum::routes;

use super::daemon::Daemon;
use super::extract::peer;
use super::grant::Role;
use super::problem::{ApiCode, Refusal};
use super::request_gate::{Gate, admit};
use super::{
    directory, directory_watch, drain, exec, health, images, life, listing, logs, metrics, problem,
    processes, quotas, sandboxes, signal, snapshots, transfer, unread_body, usage,
};

/// A page that shows the OpenAPI document. It loads nothing else.
const PAGE: &str = include_str!("document.html");

#[derive(OpenApi)]
#[openapi(
    info(title = "thawd", description = "Sandboxes: containers, each in a microVM of its own."),
    components(schemas(WatchEvent, SnapshotEvent, Bookmark, ExecEvent, ExecInput, Problem)),
    tags(
        (name = "sandboxes", description = "Containers, each in a microVM of its own"),
        (name = "processes", description = "Processes in a sandbox's container"),
        (name = "files", description = "The files of a sandbox's container"),
        (name = "snapshots", description = "Frozen sandboxes that the node stores"),
        (name = "images", description = "Images and templates, from which sandboxes are created"),
        (name = "node", description = "The node and its thawd"),
    ),
)]
struct Document;

/// The routes with their descriptions, each with the least role that may use it.
///
/// Only administrators use what all tenants share (images, templates, pools, drain), because it reveals or changes something of every
/// tenant. A field that names a directory of the host is reserved for them too ([`super::reserved`]). Reading a container's file requires
/// the same role as running a process in it.
fn table() -> Table {
    use Role::{Admin, Operate, Read};
    Table(OpenApiRouter::with_openapi(Document::openapi()))
        .add(Read, routes!(health::health))
        .add(Admin, routes!(drain::show, drain::begin, drain::end))
        .add(Admin, routes!(metrics::metrics))
        .add(Read, routes!(usage::all))
        .add(Read, routes!(quotas::mine))
        .add(Admin, routes!(quotas::list))
        .add(Admin, routes!(quotas::set, quotas::reset))
        .add(Read, routes!(usage::one))
        .add(Read, routes!(listing::list))
        .add(Operate, routes!(sandboxes::create))
        .add(Read, routes!(sandboxes::get))
        .add(Operate, routes!(sandboxes::change, sandboxes::delete))
        .add(Operate, routes!(sandboxes::pause))
        .add(Operate, routes!(sandboxes::resume))
        .add(Operate, routes!(sandboxes::freeze))
        .add(Operate, routes!(sandboxes::set_network_policy))
        .add(Operate, routes!(sandboxes::thaw))
        .add(Read, routes!(snapshots::list))
        .add(Operate, routes!(snapshots::pull))
        .add(Operate, routes!(snapshots::push))
        .add(Read, routes!(snapshots::get))
        .add(Operate, routes!(snapshots::change, snapshots::remove))
        .add(Operate, routes!(snapshots::verify))
        .add(Operate, routes!(exec::run, exec::open_session))
        .add(Operate, routes!(processes::list))
        .add(Operate, routes!(processes::output))
        .add(Operate, routes!(processes::input))
        .add(Operate, routes!(processes::signal))
        .add(Operate, routes!(signal::signal))
        .add(Operate, routes!(life::stop))
        .add(Operate, routes!(life::restart))
        .add(Read, routes!(life::exit))
        .add(Read, routes!(logs::logs))
        .add(Operate, routes!(logs::monitor))
        .add(
            Operate,
            routes!(transfer::read, transfer::write, directory::remove),
        )
        .add(Operate, routes!(directory::stat))
        .add(Operate, routes!(directory::list))
        .add(Operate, routes!(directory::make))
        .add(Operate, routes!(directory::rename))
        .add(Operate, routes!(directory_watch::watch))
        .add(Operate, routes!(sandboxes::fork))
        .add(Admin, routes!(images::images, images::pull))
        .add(Admin, routes!(images::image, images::remove_image))
        .add(Admin, routes!(images::templates))
        .add(Admin, routes!(images::remove_template))
}

/// Routes, each with the least role that may use it.
struct Table(OpenApiRouter<Arc<Daemon>>);

impl Table {
    /// Adds the handlers of one path, and the least role to their descriptions.
    fn add(self, least: Role, (schemas, mut paths, handlers): UtoipaMethodRouter<Arc<Daemon>>) -> Table {
        for operation in paths.paths.values_mut().flat_map(operations) {
            operation.security = Some(security(least));
        }
        Table(self.0.routes((schemas, paths, guarded(least, handlers))))
    }

    /// Adds a path that is not in the document.
    fn add_page(self, least: Role, path: &str, handlers: MethodRouter<Arc<Daemon>>) -> Table {
        Table(self.0.route(path, guarded(least, handlers)))
    }
}

/// Handlers that admit only callers with at least this role.
pub(crate) fn guarded<S: Clone + Send + Sync + 'static>(
    least: Role,
    handlers: MethodRouter<S>,
) -> MethodRouter<S> {
    handlers.route_layer(from_fn_with_state(least, authorize))
}

/// Admits callers with at least this role.
async fn authorize(State(least): State<Role>, request: Request, next: Next) -> Response {
    let role = match peer(request.extensions()) {
        Ok(peer) => peer.role(),
        Err(refusal) => return refusal.into_response(),
    };
    if role.suffices(least) {
        return next.run(request).await;
    }
    let (method, path) = (request.method(), request.uri().path());
    let what = format!("{method} {path} is for the role {least}, and this caller's is {role}");
    Refusal::new(ApiCode::RoleTooLow, what).into_response()
}

/// The names of the security schemes.
const SCHEMES: [&str; 2] = ["token", "certificate"];

/// Either security scheme, with a role that suffices.
fn security(least: Role) -> Vec<SecurityRequirement> {
    SCHEMES
        .map(|scheme| SecurityRequirement::new(scheme, [least.name()]))
        .into()
}

/// The security schemes.
fn with_schemes(document: &mut utoipa::openapi::OpenApi) {
    let [token, certificate] = SCHEMES;
    let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some(
        "Over TCP: a token. The node's file of tokens gives its role and tenant. Each operation names the least role that may use \
         it: read, operate or admin.",
    ));
    let mutual = SecurityScheme::MutualTls {
        description: Some(
            "Over TCP: a client certificate of the node's authority. The node's file of roles gives its role and tenant. The unix socket \
             requires neither: the kernel identifies the user that connects, whose role is admin."
                .into(),
        ),
        deprecated: None,
        extensions: None,
    };
    let components = document.components.get_or_insert_with(Components::new);
    components.add_security_scheme(token, SecurityScheme::Http(bearer.build()));
    components.add_security_scheme(certificate, mutual);
}

/// The operations of a path.
fn operations(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    let all = [
        &mut item.get,
        &mut item.put,
        &mut item.post,
        &mut item.delete,
        &mut item.patch,
    ];
    all.into_iter().flatten()
}

/// Adds the problem document as the default answer of every operation, because layers before the handler can refuse a request too.
fn with_problems(document: &mut utoipa::openapi::OpenApi) {
    let problem = utoipa::openapi::response::ResponseBuilder::new()
        .description("The request failed; `code` and `detail` say why")
        .content(
            "application/problem+json",
            Content::new(Some(Ref::from_schema_name("Problem"))),
        )
        .build();
    for operation in document.paths.paths.values_mut().flat_map(operations) {
        let responses = &mut operation.responses.responses;
        for (status, response) in responses.iter_mut() {
            // The specification requires one.
            if let RefOr::T(response) = response
                && response.description.is_empty()
            {
                response.description = reason(status).into();
            }
        }
        responses.insert("default".into(), problem.clone().into());
    }
}

/// The operations that take [`BodyIfAny`](super::extract::BodyIfAny).
const OPTIONAL_BODIES: [&str; 1] = ["pauseSandbox"];

/// Says which bodies may be absent: the document that is derived from the handlers requires all.
fn with_optional_bodies(document: &mut utoipa::openapi::OpenApi) {
    for operation in document.paths.paths.values_mut().flat_map(operations) {
        let id = operation.operation_id.as_deref().unwrap_or_default();
        let is_optional = OPTIONAL_BODIES.contains(&id);
        if let (true, Some(RefOr::T(body))) = (is_optional, &mut operation.request_body) {
            body.required = Some(Required::False);
        }
    }
}

/// HTTP's phrase for a status.
fn reason(status: &str) -> &'static str {
    let status = status.parse::<StatusCode>().ok();
    status.and_then(|s| s.canonical_reason()).unwrap_or("Done")
}

/// The OpenAPI document: docs/openapi.json.
pub fn document() -> String {
    let (_, mut document) = table().0.split_for_parts();
    with_problems(&mut document);
    with_optional_bodies(&mut document);
    with_schemes(&mut document);
    let mut text = document.to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

/// All routes, behind a gate.
pub fn router(daemon: Arc<Daemon>, gate: Arc<Gate>) -> Router {
    let document = document();
    let json = [("content-type", "application/json")];
    let (routes, _) = table()
        .add_page(
            Role::Read,
            "/openapi.json",
            get(move || async move { (json, document) }),
        )
        .add_page(Role::Read, "/openapi.html", get(|| async { Html(PAGE) }))
        .0
        .split_for_parts();
    routes
        .fallback(problem::no_such_route)
        .method_not_allowed_fallback(problem::wrong_method)
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(Extension(gate.clone()))
        .layer(from_fn_with_state(gate, admit))
        .layer(from_fn(problem::write_problems))
        .layer(from_fn_with_state(daemon.clone(), metrics::measure))
        .layer(from_fn(unread_body::read_rest))
        .with_state(daemon)
}

#[cfg(test)]
#[path = "router_test.rs"]
mod tests;
