//! The handlers for images and templates.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use thaw_protocol::api::{Image, ImageDetail, ImageList, Problem, PullImage, TemplateList};

use super::check;
use super::daemon::Daemon;
use super::extract::{Body, Named, Referred};
use super::problem::Refusal;

/// The images in the store.
#[utoipa::path(get, path = "/v1/images", operation_id = "listImages", tag = "images", responses(
    (status = 200, body = ImageList),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn images(State(daemon): State<Arc<Daemon>>) -> Result<Json<ImageList>, Refusal> {
    let items = daemon.factory()?.images().await?;
    Ok(Json(ImageList { items }))
}

/// Fetches an image into the store, or as much of it as a start needs.
#[utoipa::path(post, path = "/v1/images", operation_id = "pullImage", tag = "images", request_body = PullImage, responses(
    (status = 201, body = Image),
    (status = 400, description = "This names no image", body = Problem, content_type = "application/problem+json"),
    (status = 404, description = "There is no such image", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The image cannot be read, or not what is asked for here", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
    (status = 502, description = "The registry failed", body = Problem, content_type = "application/problem+json"),
))]
pub async fn pull(
    State(daemon): State<Arc<Daemon>>,
    Body(request): Body<PullImage>,
) -> Result<(StatusCode, Json<Image>), Refusal> {
    check::pull(&request)?;
    let image = daemon.factory()?.pull(request).await?;
    Ok((StatusCode::CREATED, Json(image)))
}

/// An image, layer by layer.
#[utoipa::path(get, path = "/v1/images/{image}", operation_id = "getImage", tag = "images",
    params(("image" = String, Path, description = "Reference, `/` as `%2F`; digest; or the beginning of a digest", max_length = 1024, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 200, body = ImageDetail),
    (status = 400, description = "This names no image, or more than one", body = Problem, content_type = "application/problem+json"),
    (status = 404, description = "It is not in the store", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn image(
    State(daemon): State<Arc<Daemon>>,
    Referred(wanted): Referred,
) -> Result<Json<ImageDetail>, Refusal> {
    Ok(Json(daemon.factory()?.image(wanted).await?))
}

/// Removes an image no sandbox uses.
#[utoipa::path(delete, path = "/v1/images/{image}", operation_id = "deleteImage", tag = "images",
    params(("image" = String, Path, description = "Reference, `/` as `%2F`; digest; or the beginning of a digest", max_length = 1024, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 204, description = "It is gone"),
    (status = 400, description = "This names no image, or more than one", body = Problem, content_type = "application/problem+json"),
    (status = 404, description = "It is not in the store", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "A sandbox uses it", body = Problem, content_type = "application/problem+json"),
))]
pub async fn remove_image(
    State(daemon): State<Arc<Daemon>>,
    Referred(wanted): Referred,
) -> Result<StatusCode, Refusal> {
    let factory = daemon.factory()?.clone();
    daemon
        .finish(async move { factory.remove_image(wanted).await })
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The templates of the node.
#[utoipa::path(get, path = "/v1/templates", operation_id = "listTemplates", tag = "images", responses(
    (status = 200, body = TemplateList),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn templates(State(daemon): State<Arc<Daemon>>) -> Result<Json<TemplateList>, Refusal> {
    let items = daemon.factory()?.templates().await?;
    Ok(Json(TemplateList { items }))
}

/// Removes a template. Sandboxes thawed from it go on; snapshots that are deltas over it are lost.
#[utoipa::path(delete, path = "/v1/templates/{key}", operation_id = "deleteTemplate", tag = "images",
    params(("key" = String, Path, description = "Its key, or the beginning of it", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 204, description = "It is gone"),
    (status = 404, description = "There is none, or more than one", body = Problem, content_type = "application/problem+json"),
))]
pub async fn remove_template(
    State(daemon): State<Arc<Daemon>>,
    Named(wanted): Named,
) -> Result<StatusCode, Refusal> {
    let factory = daemon.factory()?.clone();
    daemon
        .finish(async move { factory.remove_template(wanted).await })
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
#[path = "images_test.rs"]
mod tests;
