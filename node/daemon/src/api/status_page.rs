//! The status page at `/`: three static files that ask the API from the caller's browser.
//!
//! Invariants: the files hold no data of the node, so they are served without authentication; the page loads and calls nothing but this
//! thawd, and the Content-Security-Policy holds the browser to that. The page writes values of tenants and guests as text only.

use axum::Router;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::middleware::from_fn;
use axum::routing::{MethodRouter, get};

use super::{problem, unread_body};

/// No inline script or style, nothing from elsewhere, no frames around the page, and no form that sends itself.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; \
                      form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'";

/// The routes of the page. Merge them into routes that authenticate, outside of the authentication.
pub fn routes() -> Router {
    let (html, css, script) = (
        include_str!("../status_page/status.html"),
        include_str!("../status_page/status.css"),
        include_str!("../status_page/status.js"),
    );
    Router::new()
        .route("/", file("text/html; charset=utf-8", html))
        .route("/status.css", file("text/css; charset=utf-8", css))
        .route("/status.js", file("text/javascript; charset=utf-8", script))
        .method_not_allowed_fallback(problem::wrong_method)
        .layer(from_fn(problem::write_problems))
        .layer(from_fn(unread_body::read_rest))
}

fn file(kind: &'static str, text: &'static str) -> MethodRouter {
    let headers = [
        (CONTENT_TYPE, kind),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        // An upgraded thawd brings a new page.
        (CACHE_CONTROL, "no-cache"),
    ];
    get(move || async move { (headers, text) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::test_client::{JSON, ask, send, whole};

    #[tokio::test]
    async fn page_loads_nothing_from_elsewhere() {
        for path in ["/", "/status.css", "/status.js"] {
            let response = send(&routes(), ask("GET", path, JSON, "")).await;
            assert_eq!(response.headers()["content-security-policy"], POLICY, "{path}");
            assert_eq!(response.headers()["x-content-type-options"], "nosniff");
            let text = String::from_utf8(whole(response).await.to_vec()).unwrap();
            for elsewhere in ["http:", "https:", "url(", "@import", "=\"//"] {
                assert!(!text.contains(elsewhere), "{path}: {elsewhere}");
            }
        }
    }

    #[tokio::test]
    async fn script_writes_values_as_text_only() {
        let response = send(&routes(), ask("GET", "/status.js", JSON, "")).await;
        let text = String::from_utf8(whole(response).await.to_vec()).unwrap();
        for markup in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
        ] {
            assert!(!text.contains(markup), "{markup}");
        }
    }

    #[tokio::test]
    async fn other_methods_get_a_problem() {
        let response = send(&routes(), ask("POST", "/", JSON, "")).await;
        assert_eq!(response.status().as_u16(), 405);
    }
}
