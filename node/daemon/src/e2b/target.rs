//! Which port of which sandbox a request is for: by its host name `PORT-ID.DOMAIN`, or by the headers `E2b-Sandbox-Id` and
//! `E2b-Sandbox-Port`. E2B's SDKs send the headers always, and use the host name unless they are given one address for all sandboxes.
//!
//! Invariant: a request that names a sandbox in two ways is refused unless both mean the same.

use axum::http::header::HOST;
use axum::http::{HeaderMap, Request};

use super::whole_id::{Tag, WholeId};

/// The port of the protocol for processes and files in a sandbox. Nothing in the guest listens there: thawd answers.
pub const ENVD_PORT: u16 = 49983;

const ID: &str = "e2b-sandbox-id";
const PORT: &str = "e2b-sandbox-port";
/// Longest name in DNS.
const MAX_NAME: usize = 253;

/// A port of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The sandbox's id, as thawd's own API has it. It may not exist.
    pub id: String,
    /// The node that made the sandbox, if the request says it.
    pub home: Option<Tag>,
    pub port: u16,
}

impl Target {
    fn new(whole: WholeId, port: u16) -> Target {
        Target {
            id: whole.id,
            home: whole.home,
            port,
        }
    }

    /// The sandbox's id as the request has it.
    pub fn whole(&self) -> WholeId {
        WholeId {
            id: self.id.clone(),
            home: self.home,
        }
    }
}

/// The domain of the sandboxes' host names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain {
    /// As it was configured.
    text: String,
    /// Without a port.
    name: String,
}

impl Domain {
    /// Reads a domain, which may end with a port.
    ///
    /// # Errors
    /// It is no domain name.
    pub fn parse(text: &str) -> Result<Domain, String> {
        let wrong = || {
            format!(
                "domain is {text:?}; it may be a name as sandboxes.example, in lower case, with a port or without"
            )
        };
        let name = match text.split_once(':') {
            Some((name, port)) => port_number(port).map(|_| name).ok_or_else(wrong)?,
            None => text,
        };
        let is_label = |label: &str| {
            let is_plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
            (1..=63).contains(&label.len())
                && label.bytes().all(is_plain)
                && !label.starts_with('-')
                && !label.ends_with('-')
        };
        match name.len() <= MAX_NAME && name.split('.').all(is_label) {
            true => Ok(Domain {
                text: text.to_owned(),
                name: name.to_owned(),
            }),
            false => Err(wrong()),
        }
    }

    /// As callers append it to the port and the id.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The target of a host name; `None` if it is none of a sandbox.
    fn target(&self, host: &str) -> Result<Option<Target>, String> {
        let host = host.to_ascii_lowercase();
        let host = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
            _ => host.as_str(),
        };
        let host = host.strip_suffix('.').unwrap_or(host);
        let label = host
            .strip_suffix(&self.name)
            .and_then(|rest| rest.strip_suffix('.'));
        let Some((port, id)) = label.and_then(|label| label.split_once('-')) else {
            return Ok(None);
        };
        // Another name below the domain, such as one for the API.
        if !port.starts_with(|c: char| c.is_ascii_digit()) || id.contains('.') {
            return Ok(None);
        }
        match port_number(port).zip(WholeId::parse(id)) {
            Some((port, whole)) => Ok(Some(Target::new(whole, port))),
            None => Err(format!("the host {host:?} is not PORT-ID.{}", self.name)),
        }
    }
}

/// A port in decimal, without a sign or zeros before it.
fn port_number(text: &str) -> Option<u16> {
    let is_plain = text.bytes().all(|b| b.is_ascii_digit()) && !text.starts_with('0');
    text.parse().ok().filter(|_| is_plain)
}

/// The only value of a header.
fn single<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, String> {
    let mut all = headers.get_all(name).iter();
    let Some(one) = all.next() else { return Ok(None) };
    match (all.next(), one.to_str()) {
        (None, Ok(text)) => Ok(Some(text)),
        _ => Err(format!("the header {name} is there twice, or is no text")),
    }
}

/// The target that the headers name.
fn named(headers: &HeaderMap) -> Result<Option<Target>, String> {
    let Some(id) = single(headers, ID)? else {
        return Ok(None);
    };
    let whole = WholeId::parse(id).ok_or_else(|| format!("the header {ID} is no id of a sandbox"))?;
    let port = match single(headers, PORT)? {
        Some(port) => port_number(port).ok_or_else(|| format!("the header {PORT} is no port"))?,
        None => ENVD_PORT,
    };
    Ok(Some(Target::new(whole, port)))
}

/// The target of a request; `None` if it is for the control plane.
///
/// # Errors
/// The request names a sandbox in a form that cannot be, or two of them.
pub fn target<B>(request: &Request<B>, domain: Option<&Domain>) -> Result<Option<Target>, String> {
    let named = named(request.headers())?;
    let Some(domain) = domain else { return Ok(named) };
    let host = match request.uri().authority() {
        Some(authority) => Some(authority.as_str()),
        None => single(request.headers(), HOST.as_str())?,
    };
    let addressed = host.map(|host| domain.target(host)).transpose()?.flatten();
    match (addressed, named) {
        (Some(addressed), Some(named)) if addressed != named => {
            Err("the host and the headers name two ports or two sandboxes".into())
        }
        (addressed, named) => Ok(addressed.or(named)),
    }
}

#[cfg(test)]
#[path = "target_test.rs"]
mod tests;
