//! The handlers for quotas: what a tenant may have, and what it has.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use thaw_protocol::api::{CREATIONS_PER_MINUTE, Problem, Quota, QuotaList, TenantLimits};
use thaw_sandbox::tenant::Tenant;

use super::check;
use super::daemon::Daemon;
use super::extract::{Body, Named};
use super::problem::{ApiCode, Refusal};
use super::scope::Scope;

/// Returns the limits of the caller's tenant, and what it has. Administrators also get what the node's machines may have and have.
#[utoipa::path(get, path = "/v1/quota", operation_id = "getQuota", tag = "node", responses(
    (status = 200, body = Quota),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn mine(State(daemon): State<Arc<Daemon>>, scope: Scope) -> Result<Json<Quota>, Refusal> {
    let factory = daemon.factory()?;
    let quota = factory.quota(scope.tenant_of_new().cloned()).await?;
    let node = scope.is_node().then(|| factory.capacity());
    Ok(Json(Quota { node, ..quota }))
}

/// Lists the quotas of all tenants that have something or have limits of their own.
#[utoipa::path(get, path = "/v1/tenants", operation_id = "listTenants", tag = "node", responses(
    (status = 200, body = QuotaList),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn list(State(daemon): State<Arc<Daemon>>) -> Result<Json<QuotaList>, Refusal> {
    let items = daemon.factory()?.quotas().await?;
    Ok(Json(QuotaList { items }))
}

/// Sets the limits of a tenant, instead of all configured ones. They outlive thawd. What the tenant has already stays.
#[utoipa::path(put, path = "/v1/tenants/{tenant}/limits", operation_id = "setTenantLimits", tag = "node", request_body = TenantLimits,
    params(("tenant" = String, Path, description = "The tenant's name", max_length = 63, pattern = "^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")), responses(
    (status = 200, body = Quota),
    (status = 400, description = "This is no name of a tenant", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The body does not match the schema", body = Problem, content_type = "application/problem+json"),
))]
pub async fn set(
    State(daemon): State<Arc<Daemon>>,
    Named(tenant): Named,
    Body(limits): Body<TenantLimits>,
) -> Result<Json<Quota>, Refusal> {
    if let Some(creations) = limits.creations_per_minute {
        check::within("creations_per_minute", creations, &CREATIONS_PER_MINUTE)?;
    }
    change(&daemon, &tenant, Some(limits)).await
}

/// Returns a tenant to the configured limits.
#[utoipa::path(delete, path = "/v1/tenants/{tenant}/limits", operation_id = "resetTenantLimits", tag = "node",
    params(("tenant" = String, Path, description = "The tenant's name", max_length = 63, pattern = "^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")), responses(
    (status = 200, body = Quota),
    (status = 400, description = "This is no name of a tenant", body = Problem, content_type = "application/problem+json"),
))]
pub async fn reset(State(daemon): State<Arc<Daemon>>, Named(tenant): Named) -> Result<Json<Quota>, Refusal> {
    change(&daemon, &tenant, None).await
}

async fn change(
    daemon: &Arc<Daemon>,
    tenant: &str,
    limits: Option<TenantLimits>,
) -> Result<Json<Quota>, Refusal> {
    let tenant: Tenant = tenant
        .parse()
        .map_err(|e| Refusal::new(ApiCode::BadParameter, e))?;
    let factory = daemon.factory()?.clone();
    let changed = async move {
        factory.set_limits(tenant.clone(), limits).await?;
        factory.quota(Some(tenant)).await
    };
    Ok(Json(daemon.finish(changed).await?))
}

#[cfg(test)]
#[path = "quotas_test.rs"]
mod tests;
