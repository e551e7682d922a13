//! Serves E2B's API over TCP: `[e2b] listen`.
//!
//! Invariants: a request for the control plane without an API key of this node gets an error and nothing else, and no handler sees the
//! key, which only another node gets that the request is passed on to; there are at most [`MOST`] connections.

use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::put;
use futures_util::future::BoxFuture;
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use thaw_sandbox::blocking::blocking;
use thaw_sandbox::config::api::ApiConfig;
use thaw_sandbox::config::e2b::E2bConfig;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::paths::Paths;

use super::api_key::API_KEY;
use super::builds::engine::{self, Builds};
use super::cluster::calls::{Calls, pass_on};
use super::cluster::copying::keep_copied;
use super::cluster::mark;
use super::envd;
use super::failure::write_error;
use super::members::Members;
use super::route::Routing;
use super::router::router;
use super::service::Service;
use super::target::Domain;
use super::template::Templates;
use super::token::AccessTokens;
use super::upload_calls;
use crate::api::connection::Versions;
use crate::api::credentials::{Credentials, Presented};
use crate::api::listener::{Listener, Most};
use crate::api::request_gate::Gate;
use crate::api::server::{OtherApi, Serving};
use crate::api::tcp::{identify, is_encrypted, serve_tcp};
use crate::api::unread_body;

/// Most connections at once: a client keeps one for each command that it runs in a sandbox.
const MOST: Most = Most {
    in_all: 4096,
    of_one: 2048,
};
/// What it speaks: the SDKs send the requests to all sandboxes over one connection of HTTP/2, gRPC needs that, and WebSockets need HTTP/1.1.
const VERSIONS: Versions = Versions::Http1And2;
/// What errors call the part of the configuration.
const SECTION: &str = "[e2b]";

/// A listening TCP socket, and what the configuration says of the API behind it.
pub struct E2b {
    listener: Listener,
    credentials: Arc<Credentials>,
    tokens: AccessTokens,
    templates: Templates,
    builds: Arc<Builds>,
    domain: Option<Domain>,
    is_encrypted: bool,
    members: Option<Arc<Members>>,
}

impl E2b {
    /// Listens at the configured address; `None` if there is none. The API keys are the tokens of `[api]`, and so is the certificate:
    /// `credentials` are those of the API over TCP, if that is served. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `config-invalid`: the configuration is incomplete, or a file that it names cannot be used. The secret of the access tokens cannot be
    /// read or written; thawd cannot listen at the address.
    pub async fn open(
        config: &E2bConfig,
        api: &ApiConfig,
        credentials: Option<Arc<Credentials>>,
        paths: &Paths,
    ) -> Result<Option<E2b>, Error> {
        let Some(address) = config.listen else {
            return match *config == E2bConfig::default() {
                true => Ok(None),
                false => Err(invalid("there is no listen, the address to serve at")),
            };
        };
        is_encrypted(SECTION, api, address)?;
        if api.tokens.is_none() {
            return Err(invalid(
                "with listen goes tokens of [api]: the API keys of callers",
            ));
        }
        let domain = config.domain.as_deref().map(Domain::parse).transpose();
        let domain = domain.map_err(|why| invalid(&why))?;
        let templates = Templates::read(config)?;
        let is_encrypted = api.certificate.is_some();
        let (api, data, cluster) = (api.clone(), paths.data.clone(), config.cluster.clone());
        let opened = blocking(move || {
            let credentials = match credentials {
                Some(credentials) => credentials,
                None => Arc::new(Credentials::read(&api)?),
            };
            let (members, tokens) = match &cluster {
                Some(cluster) => {
                    Members::open(cluster).map(|(members, tokens)| (Some(Arc::new(members)), tokens))?
                }
                None => (None, AccessTokens::open(&data)?),
            };
            Ok((credentials, members, tokens, Builds::open(&data)?))
        });
        let (credentials, members, tokens, builds) = opened.await?;
        let listener = Listener::open(address).await;
        let listener =
            listener.map_err(|e| Error::system(format!("{SECTION}: cannot listen at {address}"), &e))?;
        Ok(Some(E2b {
            listener,
            credentials,
            tokens,
            templates,
            builds: Arc::new(builds),
            domain,
            is_encrypted,
            members,
        }))
    }

    /// Where it listens.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.address()
    }

    /// The credentials, to be reloaded.
    pub fn credentials(&self) -> Arc<Credentials> {
        self.credentials.clone()
    }

    /// The nodes that answer as one, to be reloaded.
    pub fn members(&self) -> Option<Arc<Members>> {
        self.members.clone()
    }
}

impl OtherApi for E2b {
    fn serve(self: Box<Self>, serving: Serving) -> BoxFuture<'static, ()> {
        let E2b {
            listener,
            credentials,
            members,
            tokens,
            templates,
            builds,
            domain,
            is_encrypted,
        } = *self;
        let daemon = serving.daemon.clone();
        if let Some(members) = members.clone() {
            tokio::spawn(members.keep_current(daemon.closing()));
        }
        tokio::spawn(
            builds
                .clone()
                .keep_clean(daemon.clone(), engine::sandboxes(&daemon)),
        );
        let service = Arc::new(Service {
            daemon: daemon.clone(),
            tokens,
            templates,
            builds,
            domain,
            is_encrypted,
            members,
        });
        if service
            .members
            .as_ref()
            .is_some_and(|members| members.has_copies())
        {
            tokio::spawn(keep_copied(service.clone()));
        }
        let envd = Some(envd::router(daemon.clone()));
        let routes = routes(service, serving.gate, credentials.clone(), envd);
        let stop = serving.stopped.clone();
        let serve = move |stream, address| {
            let tls = (credentials.tls(VERSIONS), VERSIONS);
            serve_tcp(stream, address, tls, routes.clone(), serving.stopped.clone())
        };
        Box::pin(async move {
            listener
                .serve(&daemon, MOST, stop, serving.shutdown_timeout, serve)
                .await;
        })
    }
}

/// Routes all requests: to another node, to a sandbox, or through the authentication to the control plane. `envd` serves the protocol for
/// processes and files in sandboxes.
pub fn routes(
    service: Arc<Service>,
    gate: Arc<Gate>,
    credentials: Arc<Credentials>,
    envd: Option<Router>,
) -> Router {
    let calls = Calls::new(service.clone(), credentials.clone());
    let members = service.members.clone();
    let routing = Routing::new(service.clone(), envd);
    let authenticated = router(service.clone(), gate)
        .layer(from_fn_with_state(credentials, authenticate))
        .layer(from_fn(unread_body::read_rest));
    // Its URLs are signed in place of an API key.
    let path = format!("{}/{{hash}}", upload_calls::PATH);
    let uploads = put(upload_calls::receive).layer(from_fn(unread_body::read_rest));
    let control_plane = Router::new()
        .route(&path, uploads)
        .with_state(service)
        .fallback_service(authenticated)
        .layer(from_fn_with_state(calls, pass_on));
    let front = Arc::new(Front {
        members,
        routing,
        control_plane,
    });
    Router::new().fallback(move |request: Request| async move { front.answer(request).await })
}

/// What each request passes first. These steps are not layers of a router, because axum copies all layers for each request, and most requests
/// are for ports of sandboxes.
struct Front {
    members: Option<Arc<Members>>,
    routing: Routing,
    control_plane: Router,
}

impl Front {
    async fn answer(&self, mut request: Request) -> Response {
        if let Err(failure) = mark::take(self.members.as_deref(), &mut request) {
            return write_error(failure.into_response());
        }
        write_error(match self.routing.answer(request).await {
            ControlFlow::Break(answer) => answer,
            ControlFlow::Continue(request) => {
                let answered = TowerToHyperService::new(self.control_plane.clone())
                    .call(request)
                    .await;
                answered.unwrap_or_else(|never| match never {})
            }
        })
    }
}

fn invalid(why: &str) -> Error {
    Error::new(ErrorKind::ConfigInvalid, format!("{SECTION}: {why}"))
}

/// Authenticates the caller by its API key, with the credentials in force now.
async fn authenticate(
    State(credentials): State<Arc<Credentials>>,
    mut request: Request,
    next: Next,
) -> Response {
    let presented = Presented::take_from(&API_KEY, request.headers_mut());
    match identify(credentials, presented, &mut request) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    }
}

#[cfg(test)]
#[path = "listener_test.rs"]
mod tests;
