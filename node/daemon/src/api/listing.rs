//! The handler that lists sandboxes and follows their changes, and what all watches have in common.
//!
//! Invariant: it uses the cache only.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::Json;
use axum::body::Body as Stream;
use axum::extract::State;
use axum::http::{Uri, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use thaw_protocol::api::{Problem, Sandbox, SandboxList, WatchEvent};
use utoipa::IntoParams;

use super::daemon::Daemon;
use super::extract::Parameters;
use super::logs::parse_moment;
use super::problem::{ApiCode, Refusal};
use super::sandboxes::LINES;
use super::scope::Scope;
use super::watch::ring::encode;
use super::watch::watched::Watched;
use super::watch::{Page, Query, Selector, Source, Watcher, page::Token};

/// How many sandboxes may be asked for at once; without a limit, all are.
const LIMIT: std::ops::RangeInclusive<u32> = 1..=10_000;

/// Fails if a list of this many is not served.
pub fn check_limit(limit: Option<u32>) -> Result<(), Refusal> {
    match limit.is_some_and(|limit| !LIMIT.contains(&limit)) {
        true => {
            let what = format!("limit is {} to {}", LIMIT.start(), LIMIT.end());
            Err(Refusal::new(ApiCode::BadParameter, what))
        }
        false => Ok(()),
    }
}

/// The parameters of a list of sandboxes or of stored snapshots.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[into_params(parameter_in = Query)]
pub struct ListParameters {
    /// Select by label: `a=b`, `a!=b`, `a in (b,c)`, `a notin (b,c)`, `a`, `!a`. Commas separate conditions, all of which must match.
    label_selector: Option<String>,
    /// Select by field: `name`, `image`, `tenant` or, of sandboxes, `state`, with `=` or `!=`. Commas separate conditions, all of which must match.
    field_selector: Option<String>,
    /// Most items in the answer.
    #[param(minimum = 1, maximum = 10000)]
    pub limit: Option<u32>,
    /// The `continue` of the previous page.
    #[serde(rename = "continue")]
    pub continue_token: Option<String>,
    /// `1` or `true`: send changes as they happen, one per line, instead of a list.
    watch: Option<String>,
    /// With `watch`: send the changes after this version. Only new changes if absent.
    resource_version: Option<u64>,
    /// With `watch`: send the kept changes from this time on: RFC 3339, or seconds since the Unix epoch with up to nine decimals.
    #[param(
        pattern = r"^[0-9]{1,10}(\.[0-9]{1,9})?$|^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?Z$"
    )]
    since: Option<String>,
}

/// Lists the sandboxes, or with `watch` sends their changes.
#[utoipa::path(get, path = "/v1/sandboxes", operation_id = "listSandboxes", tag = "sandboxes", params(ListParameters), responses(
    (status = 200, description = "The sandboxes, or with `watch` one WatchEvent per line", content(
        (SandboxList = "application/json"), (WatchEvent = "application/x-ndjson"))),
    (status = 400, description = "A parameter is invalid", body = Problem, content_type = "application/problem+json"),
    (status = 410, description = "The version is too old", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn list(
    State(daemon): State<Arc<Daemon>>,
    uri: Uri,
    scope: Scope,
    Parameters(asked): Parameters<ListParameters>,
) -> Result<Response, Refusal> {
    let bad = |what: &str| Refusal::new(ApiCode::BadParameter, what);
    let selector = asked.selector(scope)?;
    if asked.is_watch()? {
        return asked.follow(daemon.cache.clone(), selector, &uri);
    }
    check_limit(asked.limit)?;
    let from = match asked.continue_token.as_deref() {
        Some(text) => Some(Token::decode(text).ok_or_else(|| bad("this is no continue token"))?),
        None => None,
    };
    let page = daemon.cache.list(&Query {
        selector,
        limit: asked.limit.map(|limit| limit as usize),
        from,
    })?;
    Ok(Json(shown(page)).into_response())
}

fn shown(page: Page) -> SandboxList {
    SandboxList {
        resource_version: page.version,
        items: page.items.iter().map(|item| Sandbox::clone(item)).collect(),
        continue_token: page.next.map(|token| token.encode()),
    }
}

impl ListParameters {
    /// The selector, within a scope.
    pub fn selector(&self, scope: Scope) -> Result<Selector, Refusal> {
        let labels = self.label_selector.as_deref().unwrap_or_default();
        let fields = self.field_selector.as_deref().unwrap_or_default();
        Selector::parse(scope, labels, fields).map_err(|e| Refusal::new(ApiCode::BadParameter, e))
    }

    /// Whether changes are asked for, and not a list.
    pub fn is_watch(&self) -> Result<bool, Refusal> {
        let bad = |what: &str| Err(Refusal::new(ApiCode::BadParameter, what));
        let is_watch = match self.watch.as_deref() {
            Some("1" | "true") => true,
            None | Some("0" | "false") => false,
            Some(_) => return bad("watch is 1 or 0"),
        };
        if is_watch && (self.limit.is_some() || self.continue_token.is_some()) {
            return bad("limit and continue do not go with watch=1");
        }
        if !is_watch && (self.resource_version.is_some() || self.since.is_some()) {
            return bad("resourceVersion and since go with watch=1");
        }
        Ok(is_watch)
    }

    /// The version after which a watch begins, if its caller chose one.
    fn beginning(&self, source: &impl Source) -> Result<Option<u64>, Refusal> {
        let bad = |what: &str| Refusal::new(ApiCode::BadParameter, what);
        match (self.resource_version, self.since.as_deref()) {
            (Some(_), Some(_)) => Err(bad("a watch begins at a resourceVersion or a time, not both")),
            (version, None) => Ok(version),
            (None, Some(text)) => {
                let what = "since is a time of RFC 3339, or seconds since the Unix epoch";
                let since = parse_moment(text).ok_or_else(|| bad(what))?;
                let since = SystemTime::UNIX_EPOCH + Duration::from_nanos(since);
                let age = SystemTime::now().duration_since(since).unwrap_or_default();
                Ok(Some(source.version_before(age)))
            }
        }
    }

    /// The changes that match, while the caller is connected.
    pub fn follow<C: Source>(
        &self,
        source: Arc<C>,
        selector: Selector,
        uri: &Uri,
    ) -> Result<Response, Refusal> {
        let after = self.beginning(source.as_ref())?;
        let mut watcher = Watcher::start(source, after, selector)?;
        if self.since.is_some() {
            watcher.mark_present();
        }
        let instance = uri.path().to_owned();
        let lines = futures_util::stream::unfold(Some(watcher), move |watcher| {
            let instance = instance.clone();
            async move {
                let mut watcher = watcher?;
                match watcher.next().await {
                    Ok(lines) => Some((Ok::<_, std::convert::Infallible>(lines?), Some(watcher))),
                    Err(gone) => {
                        let last = <C::Object as Watched>::error(Refusal::from(gone).in_stream(instance));
                        Some((Ok(encode(&last)), None))
                    }
                }
            }
        });
        Ok(([(header::CONTENT_TYPE, LINES)], Stream::from_stream(lines)).into_response())
    }
}
