//! Requests pods from a thawd under test, as containerd's shim does.

#![allow(clippy::unwrap_used)]
#![allow(dead_code, reason = "each test binary uses its part")]

use std::fs;

use serde_json::Value;
use thaw_pools::process::ProcessRecord;
use thaw_protocol::shim::pods::{CreatePodRequest, PodRequest};
use thaw_protocol::shim::pods_ttrpc::PodsClient;
use thaw_tiny_node::Place;
use thaw_tiny_node::daemon::log;
use ttrpc::context::Context;

pub async fn connect(place: &Place) -> PodsClient {
    let address = format!("unix://{}", place.path("run/pods.sock").display());
    PodsClient::new(ttrpc::r#async::Client::connect(&address).await.unwrap())
}

/// Creates a pod that ends with this process, and returns its id.
pub async fn create(place: &Place) -> String {
    let pod = CreatePodRequest {
        client_pid: std::process::id() as i32,
        cpus: 1,
        memory_mib: place.request()["memory_mib"].as_u64().unwrap() as u32,
        ..Default::default()
    };
    let made = connect(place).await.create(Context::default(), &pod).await;
    made.unwrap_or_else(|e| panic!("{e}: {}", log(place))).sandbox_id
}

pub async fn end(place: &Place, id: &str) {
    let pod = PodRequest {
        sandbox_id: id.into(),
        ..Default::default()
    };
    connect(place).await.end(Context::default(), &pod).await.unwrap();
}

/// The record of a sandbox.
pub fn record(place: &Place, id: &str) -> Value {
    let path = place.path("run/sandboxes").join(id).join("record.json");
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// The process that a field of a record names.
pub fn process(record: &Value, field: &str) -> ProcessRecord {
    serde_json::from_value(record[field].clone()).unwrap()
}
