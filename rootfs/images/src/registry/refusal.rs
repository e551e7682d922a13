//! Answers that are not a success: the error for each, whether to retry, and the registry's own message.

use std::time::{Duration, SystemTime};

use reqwest::header::{HeaderMap, RETRY_AFTER};
use reqwest::{Response, StatusCode};
use serde::Deserialize;

use crate::error::Error;

const MAX_ERROR_BODY: usize = 8 << 10;

/// The error for an unsuccessful answer, after this number of attempts.
pub async fn refusal(registry: &str, what: &str, response: Response, attempts: u32) -> Error {
    let registry = registry.to_owned();
    match response.status() {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Error::RegistryDenied {
            registry,
            status: response.status().as_u16(),
            what: what.into(),
            reason: registry_message(response).await,
        },
        StatusCode::NOT_FOUND | StatusCode::GONE => Error::RegistryNotFound {
            registry,
            what: what.into(),
        },
        StatusCode::TOO_MANY_REQUESTS => Error::RegistryRateLimited {
            registry,
            what: what.into(),
            retry_after: retry_after(response.headers()).map(|wanted| wanted.as_secs()),
        },
        _ => failed(&registry, what, response, attempts).await,
    }
}

/// The error for an answer with which the registry reports its own failure.
pub async fn failed(registry: &str, what: &str, response: Response, attempts: u32) -> Error {
    let status = response.status().as_u16();
    Error::RegistryFailed {
        registry: registry.into(),
        status,
        what: what.into(),
        reason: registry_message(response).await,
        attempts,
    }
}

/// Whether a status may be another one soon.
pub fn passing(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT
    ) || status.is_server_error()
}

/// `Retry-After`: seconds or a date.
pub fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = value.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(value).ok()?;
    Some(date.duration_since(SystemTime::now()).unwrap_or_default())
}

/// The first bytes of a body; an error ends it.
pub async fn limited(mut response: Response, limit: usize) -> Vec<u8> {
    let mut body = Vec::new();
    while let Ok(Some(bytes)) = response.chunk().await {
        body.extend_from_slice(&bytes[..bytes.len().min(limit - body.len())]);
        if body.len() >= limit {
            break;
        }
    }
    body
}

/// The registry's own words, on one line.
pub async fn registry_message(response: Response) -> String {
    #[derive(Deserialize)]
    struct Envelope {
        errors: Vec<One>,
    }
    #[derive(Deserialize)]
    struct One {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
    }
    let reason = response
        .status()
        .canonical_reason()
        .unwrap_or("no reason given")
        .to_lowercase();
    let body = limited(response, MAX_ERROR_BODY).await;
    let text = match serde_json::from_slice::<Envelope>(&body) {
        Ok(Envelope { errors }) => {
            let said = errors.iter().map(|it| {
                if it.message.is_empty() {
                    &it.code
                } else {
                    &it.message
                }
            });
            said.cloned().collect::<Vec<_>>().join("; ")
        }
        // An HTML page contains no more than its status.
        Err(_) if body.starts_with(b"<") => String::new(),
        Err(_) => String::from_utf8_lossy(&body).into_owned(),
    };
    let line: String = text
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
        .chars()
        .take(200)
        .collect();
    let line: String = line.chars().filter(|it| !it.is_control()).collect();
    if line.is_empty() { reason } else { line }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let parse = |value: &str| retry_after(&HeaderMap::from_iter([(RETRY_AFTER, value.parse().unwrap())]));
        assert_eq!(parse("120"), Some(Duration::from_secs(120)));
        assert_eq!(parse("Fri, 31 Dec 1999 23:59:59 GMT"), Some(Duration::ZERO));
        let date = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(60));
        assert!((50..=60).contains(&parse(&date).unwrap().as_secs()));
        assert_eq!(parse("soon"), None);
    }
}
