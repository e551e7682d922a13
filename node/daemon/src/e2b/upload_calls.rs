//! The handlers for the uploads of builds: the URL, which a caller with an API key gets, and the upload to it, which has no key.
//!
//! Invariant: a URL is signed for one archive of one tenant, and for [`VALID_S`] seconds.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::header::HOST;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, StatusCode, Uri};
use serde_json::{Value, json};
use thaw_sandbox::tenant::Tenant;

use super::builds::step::is_hash;
use super::extract::{OfTemplate, Query};
use super::failure::Failure;
use super::moment::now_s;
use super::service::Service;
use super::tags::own;
use crate::api::extract::{Named, content_length};
use crate::api::problem::{ApiCode, Refusal};
use crate::api::scope::Scope;

/// How long a URL is valid, seconds: as long as the SDKs wait for an upload.
const VALID_S: u64 = 3600;
/// The path of an upload, before the hash.
pub const PATH: &str = "/template-uploads";
/// What a proxy in front of thawd says of the way to itself.
const FORWARDED_PROTO: &str = "x-forwarded-proto";

/// What a URL is signed for.
fn signed(tenant: &str, hash: &str, expires: u64) -> String {
    format!("{tenant}/{hash}/{expires}")
}

/// `GET /templates/{id}/files/{hash}`: whether an archive is there, and where to upload it.
pub async fn link(
    State(service): State<Arc<Service>>,
    scope: Scope,
    OfTemplate(template, hash): OfTemplate,
    uri: Uri,
    headers: HeaderMap,
) -> Result<(StatusCode, Json<Value>), Failure> {
    if !is_hash(&hash) {
        return Err(Failure::Bad(
            "the hash of files is 64 hexadecimal digits in lower case".into(),
        ));
    }
    let template = own(&service, &scope, &template)?;
    let tenant = template.tenant.as_ref();
    let is_there = service.builds.uploads.find(tenant, &hash).await.is_some();
    let tenant = tenant.map_or("", Tenant::as_str);
    let expires = now_s() + VALID_S;
    let signature = service.tokens.upload_signature(&signed(tenant, &hash, expires));
    let base = service.url(&uri, &headers)?;
    let url = format!("{base}{PATH}/{hash}?tenant={tenant}&expires={expires}&signature={signature}");
    Ok((
        StatusCode::CREATED,
        Json(json!({"present": is_there, "url": url})),
    ))
}

impl Service {
    /// The URL of this API, as the caller of a request wrote it.
    fn url(&self, uri: &Uri, headers: &HeaderMap) -> Result<String, Failure> {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let host = uri
            .authority()
            .map(Authority::as_str)
            .or_else(|| text(HOST.as_str()));
        let host = host.filter(|host| host.parse::<Authority>().is_ok());
        let host = host.ok_or_else(|| Failure::Bad("the request has no Host".into()))?;
        let scheme = match text(FORWARDED_PROTO) {
            Some(scheme @ ("http" | "https")) => scheme,
            _ if self.is_encrypted => "https",
            _ => "http",
        };
        Ok(format!("{scheme}://{host}"))
    }
}

/// `PUT /template-uploads/{hash}`, with a signed query.
pub async fn receive(
    State(service): State<Arc<Service>>,
    Named(hash): Named,
    query: Query,
    request: Request,
) -> Result<StatusCode, Failure> {
    let refused = || {
        Failure::Refused(Refusal::new(
            ApiCode::NotAllowed,
            "the URL is not one that this node signed, or is old",
        ))
    };
    let tenant = query.text("tenant").unwrap_or_default();
    let expires = query.number("expires")?.unwrap_or_default();
    let signature = query.text("signature").unwrap_or_default();
    let is_signed = service
        .tokens
        .check_upload(&signed(tenant, &hash, expires), signature);
    if !is_signed || expires < now_s() {
        return Err(refused());
    }
    let tenant: Option<Tenant> = match tenant {
        "" => None,
        name => Some(name.parse().map_err(|_| refused())?),
    };
    let length = content_length(&request);
    let length = length.ok_or_else(|| Failure::Bad("Content-Length is missing".into()))?;
    let body = request.into_body().into_data_stream();
    let uploads = &service.builds.uploads;
    uploads.receive(tenant.as_ref(), &hash, length, body).await?;
    Ok(StatusCode::OK)
}

#[cfg(test)]
#[path = "upload_calls_test.rs"]
mod tests;
