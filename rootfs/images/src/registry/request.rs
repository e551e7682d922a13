//! One request to a registry, which can be built again for every attempt.

use bytes::Bytes;
use reqwest::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_LENGTH, HeaderName, HeaderValue, RANGE};
use reqwest::{Body, Method, Url};

use super::wire::Failure;

/// The body of a request.
pub enum Payload<'a> {
    Nothing,
    Bytes(Bytes),
    /// This many bytes, generated anew each time they are sent.
    Stream(u64, &'a (dyn Fn() -> Body + Send + Sync)),
}

/// A request to a registry.
pub struct Request<'a> {
    pub method: Method,
    pub url: &'a str,
    pub accept: Option<&'a str>,
    /// Bytes wanted: from the first to before the second, or to the end.
    pub range: Option<(u64, Option<u64>)>,
    pub headers: &'a [(HeaderName, HeaderValue)],
    pub payload: Payload<'a>,
    /// Its name in messages.
    pub what: &'a str,
    /// Foreign URLs get no credentials (CVE-2020-15157).
    pub foreign: bool,
}

impl<'a> Request<'a> {
    pub fn get(url: &'a str, what: &'a str) -> Self {
        Self {
            method: Method::GET,
            url,
            accept: None,
            range: None,
            headers: &[],
            payload: Payload::Nothing,
            what,
            foreign: false,
        }
    }

    pub(super) fn build(&self) -> Result<reqwest::Request, Failure> {
        let lasting =
            |problem: &dyn std::fmt::Display| Failure::lasting(format!("{:?}: {problem}", self.url));
        let url = Url::parse(self.url).map_err(|error| lasting(&error))?;
        let mut request = reqwest::Request::new(self.method.clone(), url);
        let headers = request.headers_mut();
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        if let Some(accept) = self.accept {
            headers.insert(
                ACCEPT,
                HeaderValue::from_str(accept).map_err(|error| lasting(&error))?,
            );
        }
        let range = self.range.map(|(from, until)| match until {
            Some(until) => format!("bytes={from}-{}", until.saturating_sub(1)),
            None => format!("bytes={from}-"),
        });
        if let Some(range) = range {
            headers.insert(
                RANGE,
                HeaderValue::try_from(range).map_err(|error| lasting(&error))?,
            );
        }
        for (name, value) in self.headers {
            headers.insert(name, value.clone());
        }
        match &self.payload {
            Payload::Nothing if matches!(self.method, Method::GET | Method::HEAD) => {}
            Payload::Nothing => drop(headers.insert(CONTENT_LENGTH, HeaderValue::from(0))),
            Payload::Bytes(bytes) => *request.body_mut() = Some(bytes.clone().into()),
            Payload::Stream(size, body) => {
                headers.insert(CONTENT_LENGTH, HeaderValue::from(*size));
                *request.body_mut() = Some(body());
            }
        }
        Ok(request)
    }
}
