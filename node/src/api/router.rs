//! The routes, and what each request passes on its way to one.

use std::sync::Arc;

use axum::extract::DefaultBodyLimit;
use axum::http::StatusCode;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::Html;
use axum::routing::get;
use axum::{Extension, Router};
use thaw_protocol::api::{Bookmark, ExecEvent, ExecInput, MAX_BODY, Problem, WatchEvent};
use utoipa::OpenApi;
use utoipa::openapi::RefOr;
use utoipa::openapi::content::Content;
use utoipa::openapi::schema::Ref;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::daemon::Daemon;
use super::limits::{Gate, limit};
use super::{drain, exec, health, logs, metrics, problem, rest, sandboxes, stock, transfer, usage};

/// A page that shows the document. It loads nothing but that.
const PAGE: &str = include_str!("page.html");

#[derive(OpenApi)]
#[openapi(
    info(title = "thawd", description = "Sandboxes: containers, each in a microVM of its own."),
    components(schemas(WatchEvent, Bookmark, ExecEvent, ExecInput, Problem)),
    tags(
        (name = "sandboxes", description = "Containers, each in a microVM of its own"),
        (name = "processes", description = "What runs in a sandbox's container"),
        (name = "files", description = "The files of a sandbox's container"),
        (name = "images", description = "What sandboxes are made of"),
        (name = "node", description = "This thawd"),
    ),
)]
struct Document;

/// The routes with their descriptions.
fn described() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(health::health))
        .routes(routes!(drain::show, drain::begin, drain::end))
        .routes(routes!(metrics::metrics))
        .routes(routes!(usage::all))
        .routes(routes!(usage::one))
        .routes(routes!(sandboxes::list, sandboxes::create))
        .routes(routes!(sandboxes::get, sandboxes::change, sandboxes::delete))
        .routes(routes!(sandboxes::pause))
        .routes(routes!(sandboxes::resume))
        .routes(routes!(sandboxes::freeze))
        .routes(routes!(sandboxes::set_network_policy))
        .routes(routes!(sandboxes::thaw))
        .routes(routes!(exec::run, exec::attend))
        .routes(routes!(logs::logs))
        .routes(routes!(transfer::read, transfer::write))
        .routes(routes!(sandboxes::fork))
        .routes(routes!(stock::images, stock::pull))
        .routes(routes!(stock::image, stock::remove_image))
        .routes(routes!(stock::templates))
        .routes(routes!(stock::remove_template))
}

/// Says of every operation that it may be answered by a problem, whatever it says of single statuses: what is refused on
/// the way to a route is not the route's to tell.
fn with_problems(document: &mut utoipa::openapi::OpenApi) {
    let problem = utoipa::openapi::response::ResponseBuilder::new()
        .description("What is wrong, by its status and code")
        .content(
            "application/problem+json",
            Content::new(Some(Ref::from_schema_name("Problem"))),
        )
        .build();
    for item in document.paths.paths.values_mut() {
        let operations = [
            &mut item.get,
            &mut item.put,
            &mut item.post,
            &mut item.delete,
            &mut item.patch,
        ];
        for operation in operations.into_iter().flatten() {
            let responses = &mut operation.responses.responses;
            for (status, response) in responses.iter_mut() {
                // The specification asks for one.
                if let RefOr::T(response) = response
                    && response.description.is_empty()
                {
                    response.description = reason(status).into();
                }
            }
            responses.insert("default".into(), problem.clone().into());
        }
    }
}

/// What a status means, in HTTP's words.
fn reason(status: &str) -> &'static str {
    let status = status.parse::<StatusCode>().ok();
    status.and_then(|s| s.canonical_reason()).unwrap_or("Done")
}

/// The OpenAPI document: docs/openapi.json.
pub fn document() -> String {
    let (_, mut document) = described().split_for_parts();
    with_problems(&mut document);
    let mut text = document.to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

/// All routes, behind a gate.
pub fn router(daemon: Arc<Daemon>, gate: Arc<Gate>) -> Router {
    let (routes, _) = described().split_for_parts();
    let document = document();
    let json = [("content-type", "application/json")];
    routes
        .route("/openapi.json", get(move || async move { (json, document) }))
        .route("/", get(|| async { Html(PAGE) }))
        .fallback(problem::no_such_route)
        .method_not_allowed_fallback(problem::wrong_method)
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(Extension(gate.clone()))
        .layer(from_fn_with_state(gate, limit))
        .layer(from_fn(problem::say))
        .layer(from_fn_with_state(daemon.clone(), metrics::measure))
        .layer(from_fn(rest::take))
        .with_state(daemon)
}

#[cfg(test)]
#[path = "router_test.rs"]
mod tests;
