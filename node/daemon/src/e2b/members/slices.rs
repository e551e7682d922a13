//! The members that Kubernetes names: the ready endpoints of a Service, each by the node that it is on.
//!
//! One list each time, and no watch: a list is complete by itself, so nothing has to be kept between two.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use axum::body::Body;
use axum::extract::Request;
use axum::http::header::{ACCEPT, AUTHORIZATION, HOST};
use serde::Deserialize;
use thaw_sandbox::config::e2b::EndpointSlicesConfig;

use super::asking::ask;
use super::endpoint::{Endpoint, Trust};

/// What Kubernetes gives each pod.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The variables with the address of Kubernetes' API.
const API_HOST: &str = "KUBERNETES_SERVICE_HOST";
const API_PORT: &str = "KUBERNETES_SERVICE_PORT";
/// Largest list, bytes.
const MAX_LIST: usize = 4 << 20;
/// Most slices of a list. Each has at most 1000 endpoints.
const MOST_SLICES: usize = 100;

/// See the module.
#[derive(Debug)]
pub struct Slices {
    api: Endpoint,
    path: String,
    config: EndpointSlicesConfig,
    trust: Trust,
}

impl Slices {
    /// The endpoints of a Service, read with the pod's service account. `trust` is for the endpoints. Blocks.
    ///
    /// # Errors
    /// thawd runs in no pod, or a name is no name in Kubernetes.
    pub fn of_pod(config: &EndpointSlicesConfig, trust: &Trust) -> Result<Slices, String> {
        let account = Path::new(ACCOUNT);
        let variable = |name: &str| {
            let value = std::env::var(name).ok();
            value.ok_or_else(|| format!("endpoint_slices needs a pod: {name} is not set"))
        };
        let (host, port) = (variable(API_HOST)?, variable(API_PORT)?);
        let host = match host.contains(':') {
            true => format!("[{host}]"),
            false => host,
        };
        let of_api = Trust::read(&account.join("ca.crt"))?;
        let api = Endpoint::parse(&format!("https://{host}:{port}"), Some(&of_api))?;
        let namespace = match &config.namespace {
            Some(namespace) => namespace.clone(),
            None => {
                let file = account.join("namespace");
                let read = std::fs::read_to_string(&file);
                read.map_err(|e| format!("cannot read {}: {e}", file.display()))?
            }
        };
        for name in [namespace.as_str(), &config.service] {
            let is_plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
            if name.is_empty() || name.len() > 63 || !name.bytes().all(is_plain) {
                return Err(format!(
                    "endpoint_slices: {name:?} is no name of a Service or a namespace"
                ));
            }
        }
        Endpoint::at(([127, 0, 0, 1], 1).into(), &config.server_name, trust)?;
        Ok(Slices {
            api,
            path: format!(
                "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices\
                 ?labelSelector=kubernetes.io%2Fservice-name%3D{}&limit={MOST_SLICES}",
                config.service
            ),
            config: config.clone(),
            trust: trust.clone(),
        })
    }

    /// The endpoints that are ready now, by the name of their node.
    ///
    /// # Errors
    /// Kubernetes does not answer, or with something else.
    pub async fn list(&self) -> Result<BTreeMap<String, Endpoint>, String> {
        // Read each time: Kubernetes replaces it within the hour.
        let token = tokio::fs::read_to_string(Path::new(ACCOUNT).join("token")).await;
        let token = token.map_err(|e| format!("cannot read the service account's token: {e}"))?;
        let request = Request::get(&self.path)
            .header(HOST, self.api.authority())
            .header(ACCEPT, "application/json")
            .header(AUTHORIZATION, format!("Bearer {}", token.trim()))
            .body(Body::empty());
        let request = request.map_err(|e| e.to_string())?;
        let answer = ask(&self.api, request, MAX_LIST).await?;
        if !answer.status.is_success() {
            return Err(format!("it answered {}", answer.status));
        }
        let ready = ready(&answer.body, &self.config.port)?.into_iter();
        let named = ready.map(|(name, address)| {
            let endpoint = Endpoint::at(address, &self.config.server_name, &self.trust)?;
            Ok::<_, String>((name, endpoint))
        });
        named.collect()
    }
}

#[derive(Debug, Deserialize)]
struct SliceList {
    items: Vec<Slice>,
}

#[derive(Debug, Deserialize)]
struct Slice {
    #[serde(default)]
    endpoints: Option<Vec<SliceEndpoint>>,
    #[serde(default)]
    ports: Option<Vec<SlicePort>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SliceEndpoint {
    #[serde(default)]
    addresses: Vec<String>,
    #[serde(default)]
    node_name: Option<String>,
    #[serde(default)]
    conditions: Conditions,
}

#[derive(Debug, Default, Deserialize)]
struct Conditions {
    /// Absent: it is ready.
    #[serde(default)]
    ready: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct SlicePort {
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    port: Option<u16>,
}

/// The address of each ready endpoint of a list, by its node. Of two on one node the first counts.
fn ready(list: &[u8], port: &str) -> Result<BTreeMap<String, SocketAddr>, String> {
    let list: SliceList =
        serde_json::from_slice(list).map_err(|e| format!("this is no list of EndpointSlices: {e}"))?;
    let mut found = BTreeMap::new();
    for slice in list.items {
        let ports = slice.ports.unwrap_or_default();
        let named = ports.iter().find(|one| one.name.as_deref() == Some(port));
        let Some(port) = named.and_then(|one| one.port) else {
            continue;
        };
        for endpoint in slice.endpoints.unwrap_or_default() {
            let address = endpoint.addresses.first();
            let address = address.and_then(|address| address.parse::<IpAddr>().ok());
            let is_ready = endpoint.conditions.ready.unwrap_or(true);
            if let (true, Some(name), Some(address)) = (is_ready, endpoint.node_name, address) {
                found.entry(name).or_insert_with(|| (address, port).into());
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ready_endpoints_are_members_by_their_node() {
        let endpoint = |node: &str, address: &str, ready: Option<bool>| json!({"addresses": [address], "nodeName": node, "conditions": {"ready": ready}});
        let ports = json!([{"name": "metrics", "port": 9464}, {"name": "e2b", "port": 3000}]);
        let list = json!({"kind": "EndpointSliceList", "items": [
            {"ports": ports, "addressType": "IPv4", "endpoints": [
                endpoint("a", "10.0.0.1", Some(true)),
                endpoint("b", "10.0.0.2", Some(false)),
                endpoint("c", "10.0.0.3", None),
                {"addresses": ["10.0.0.4"]},
                {"addresses": ["web.example"], "nodeName": "d"},
                {"addresses": [], "nodeName": "e"},
            ]},
            {"ports": ports, "endpoints": [endpoint("a", "10.0.0.9", Some(true)), endpoint("f", "2001:db8::1", None)]},
            {"ports": [{"name": "else", "port": 1}], "endpoints": [endpoint("g", "10.0.0.5", None)]},
            {"ports": null, "endpoints": null},
        ]});
        let found = ready(list.to_string().as_bytes(), "e2b").unwrap();
        let found: Vec<_> = found
            .iter()
            .map(|(name, address)| format!("{name} {address}"))
            .collect();
        assert_eq!(
            found,
            ["a 10.0.0.1:3000", "c 10.0.0.3:3000", "f [2001:db8::1]:3000"]
        );
    }

    #[test]
    fn other_answers_are_errors() {
        for wrong in ["", "[]", "{}", r#"{"items": 1}"#, r#"{"items": [{"ports": 1}]}"#] {
            assert!(ready(wrong.as_bytes(), "e2b").is_err(), "{wrong}");
        }
    }
}
