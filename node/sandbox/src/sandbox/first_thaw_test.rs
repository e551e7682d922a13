use std::sync::Mutex;

use async_trait::async_trait;
use thaw_protocol::agent::readiness::wait_ready_response::Outcome;
use thaw_protocol::agent::readiness::{
    ExpectReadyRequest, ExpectReadyResponse, WaitReadyRequest, WaitReadyResponse,
};
use thaw_protocol::agent::readiness_ttrpc::{Readiness, create_readiness};
use tokio::time::Instant;
use ttrpc::r#async::TtrpcContext;

use super::super::fake_agent::serve;
use super::*;

/// What an agent does about a container that runs.
#[derive(Clone, Copy)]
enum Told {
    Ready,
    /// It is of an earlier release.
    Refused,
    Nothing,
}

struct FakeAgent {
    told: Told,
    asked: Arc<Mutex<Vec<String>>>,
}

#[async_trait]
impl Readiness for FakeAgent {
    async fn expect(&self, _: &TtrpcContext, r: ExpectReadyRequest) -> ttrpc::Result<ExpectReadyResponse> {
        let asked = format!("expect {} {}", r.container_id, r.port);
        self.asked.lock().unwrap().push(asked);
        match self.told {
            Told::Refused => {
                let status = ttrpc::get_status(ttrpc::Code::FAILED_PRECONDITION, "it was started already");
                Err(ttrpc::Error::RpcStatus(status))
            }
            Told::Ready | Told::Nothing => Ok(ExpectReadyResponse::default()),
        }
    }

    async fn wait(&self, _: &TtrpcContext, r: WaitReadyRequest) -> ttrpc::Result<WaitReadyResponse> {
        let asked = format!("wait {} {}", r.container_id, r.timeout_ms);
        self.asked.lock().unwrap().push(asked);
        match self.told {
            Told::Ready => Ok(WaitReadyResponse {
                outcome: Outcome::READY.into(),
                ..Default::default()
            }),
            Told::Refused | Told::Nothing => std::future::pending().await,
        }
    }
}

fn with_readiness(readiness: serde_json::Value) -> Running {
    serde_json::from_value(serde_json::json!({
        "container_id": "c", "tty": false, "env": [], "cwd": "/", "user": "", "readiness": readiness,
    }))
    .unwrap()
}

/// Waits with such an agent. Returns how long, and what the agent was asked.
async fn waited(told: Told, end: impl Future<Output = String>) -> (Duration, Vec<String>) {
    let directory = tempfile::tempdir().unwrap();
    let vsock = directory.path().join("vsock.sock");
    let asked = Arc::<Mutex<Vec<String>>>::default();
    let agent = FakeAgent {
        told,
        asked: asked.clone(),
    };
    let _server = serve(&vsock, create_readiness(Arc::new(agent))).await;
    let probed = probe_of(&with_readiness(serde_json::json!({"tcp": {"port": 8080}})));
    let since = Instant::now();
    until_ready(vsock, Some(probed.unwrap()), end).await;
    let asked = std::mem::take(&mut *asked.lock().unwrap());
    (since.elapsed(), asked)
}

const LIMIT: Duration = Duration::from_secs(LONGEST_START_S as u64);

#[tokio::test]
async fn start_lasts_until_the_container_is_ready() {
    let asked = ["expect c 8080", "wait c 30000"];
    let (took, heard) = waited(Told::Ready, std::future::pending()).await;
    assert!(took < LIMIT && heard == asked, "{took:?} {heard:?}");
    let (took, heard) = waited(Told::Refused, std::future::pending()).await;
    assert!(took < LIMIT && heard == asked[..1], "{took:?} {heard:?}");
    let (took, _) = waited(Told::Nothing, std::future::ready("it ended".into())).await;
    assert!(took < LIMIT, "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn start_of_a_silent_container_ends_at_its_limit() {
    let (took, _) = waited(Told::Nothing, std::future::pending()).await;
    assert!((LIMIT..2 * LIMIT).contains(&took), "{took:?}");
}

#[test]
fn probe_of_a_snapshot_is_valid_and_bounded() {
    let of = |readiness| probe_of(&with_readiness(readiness));
    let probed = of(serde_json::json!({"http": {"port": 80, "path": "/ready"}, "timeout_s": 3600})).unwrap();
    assert_eq!(
        (probed.container.as_str(), probed.probe.timeout_s),
        ("c", LONGEST_START_S)
    );
    assert_eq!(probed.probe.http.unwrap().path, "/ready");
    assert_eq!(of(serde_json::Value::Null), None);
    assert_eq!(of(serde_json::json!({"tcp": {"port": 0}})), None);
    assert_eq!(
        of(serde_json::json!({"http": {"port": 80, "path": "/a\r\nX: y"}})),
        None
    );
}
