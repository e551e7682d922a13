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

/// Lists the images in the store.
#[utoipa::path(get, path = "/v1/images", operation_id = "listImages", tag = "images", responses(
    (status = 200, body = ImageList),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn images(State(daemon): State<Arc<Daemon>>) -> Result<Json<ImageList>, Refusal> {
    let items = daemon.factory()?.images().await?;
    Ok(Json(ImageList { items }))
}

/// Pulls an image into the store: all of it, or as much as a start needs.
#[utoipa::path(post, path = "/v1/images", operation_id = "pullImage", tag = "images", request_body = PullImage, responses(
    (status = 201, body = Image),
    (status = 400, description = "The image reference is invalid", body = Problem, content_type = "application/problem+json"),
    (status = 404, description = "There is no such image", body = Problem, content_type = "application/problem+json"),
    (status = 422, description = "The image cannot be read, or the body does not match the schema", body = Problem, content_type = "application/problem+json"),
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

/// Describes an image and its layers.
#[utoipa::path(get, path = "/v1/images/{image}", operation_id = "getImage", tag = "images",
    params(("image" = String, Path, description = "A reference with each `/` written as `%2F`, a digest, or the beginning of a digest", max_length = 1024, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 200, body = ImageDetail),
    (status = 400, description = "The reference or digest is invalid, or matches several images", body = Problem, content_type = "application/problem+json"),
    (status = 404, description = "The image is not in the store", body = Problem, content_type = "application/problem+json"),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn image(
    State(daemon): State<Arc<Daemon>>,
    Referred(wanted): Referred,
) -> Result<Json<ImageDetail>, Refusal> {
    Ok(Json(daemon.factory()?.image(wanted).await?))
}

/// Removes an image that no sandbox uses.
#[utoipa::path(delete, path = "/v1/images/{image}", operation_id = "deleteImage", tag = "images",
    params(("image" = String, Path, description = "A reference with each `/` written as `%2F`, a digest, or the beginning of a digest", max_length = 1024, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 204, description = "The image is removed"),
    (status = 400, description = "The reference or digest is invalid, or matches several images", body = Problem, content_type = "application/problem+json"),
    (status = 404, description = "The image is not in the store", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "A sandbox uses the image", body = Problem, content_type = "application/problem+json"),
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

/// Lists the templates of the node.
#[utoipa::path(get, path = "/v1/templates", operation_id = "listTemplates", tag = "images", responses(
    (status = 200, body = TemplateList),
    (status = 429, description = "Too many requests", body = Problem, content_type = "application/problem+json"),
))]
pub async fn templates(State(daemon): State<Arc<Daemon>>) -> Result<Json<TemplateList>, Refusal> {
    let items = daemon.factory()?.templates().await?;
    Ok(Json(TemplateList { items }))
}

/// Removes a template. Sandboxes thawed from it keep running. It is kept while a stored delta or a sandbox with released memory lies on it.
#[utoipa::path(delete, path = "/v1/templates/{key}", operation_id = "deleteTemplate", tag = "images",
    params(("key" = String, Path, description = "The template's key, or the beginning of its key", max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")), responses(
    (status = 204, description = "The template is removed"),
    (status = 404, description = "No template matches the key, or several do", body = Problem, content_type = "application/problem+json"),
    (status = 409, description = "A stored snapshot or a paused sandbox lies on it, or is being made over it", body = Problem, content_type = "application/problem+json"),
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
