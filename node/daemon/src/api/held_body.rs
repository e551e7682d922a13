//! A body that holds something as long as it is read.

use axum::body::Body;
use http_body_util::BodyExt;

/// The body, which holds this until it has been read or its reader has left.
pub fn holding(body: Body, held: impl Send + 'static) -> Body {
    Body::new(body.map_err(move |e| {
        let _held = &held;
        e
    }))
}
