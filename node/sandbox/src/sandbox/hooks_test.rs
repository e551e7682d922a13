use std::sync::Mutex;

use async_trait::async_trait;
use thaw_protocol::agent::hooks_ttrpc::{Hooks, create_hooks};
use ttrpc::r#async::TtrpcContext;

use super::super::fake_agent::serve;
use super::*;

/// An agent that answers every hook in the same way, or never.
struct FakeAgent {
    answer: Option<RunHookResponse>,
    asked: std::sync::Arc<Mutex<Vec<RunHookRequest>>>,
}

#[async_trait]
impl Hooks for FakeAgent {
    async fn run(&self, _: &TtrpcContext, request: RunHookRequest) -> ttrpc::Result<RunHookResponse> {
        self.asked.lock().unwrap().push(request);
        match &self.answer {
            Some(answer) => Ok(answer.clone()),
            None => std::future::pending().await,
        }
    }
}

fn answer(outcome: Told, failure: &str, output: &[u8]) -> RunHookResponse {
    RunHookResponse {
        outcome: outcome.into(),
        failure: failure.into(),
        output: output.into(),
        ..Default::default()
    }
}

fn running() -> Running {
    serde_json::from_value(serde_json::json!({
        "container_id": "c", "tty": false, "env": ["A=1"], "cwd": "/srv", "user": "33:33",
    }))
    .unwrap()
}

fn hook(json: &str) -> Hook {
    serde_json::from_str(json).unwrap()
}

/// Runs a hook with an agent that answers so. Returns its result and what the agent was asked.
async fn run_with(
    hook: &Hook,
    answer: Option<RunHookResponse>,
    end: impl Future<Output = String>,
) -> (HookResult, Vec<RunHookRequest>) {
    let directory = tempfile::tempdir().unwrap();
    let vsock = directory.path().join("vsock.sock");
    let asked = std::sync::Arc::<Mutex<Vec<RunHookRequest>>>::default();
    let agent = FakeAgent {
        answer,
        asked: asked.clone(),
    };
    let _server = serve(&vsock, create_hooks(std::sync::Arc::new(agent))).await;
    let result = run(&vsock, &running(), hook, end).await;
    let asked = std::mem::take(&mut *asked.lock().unwrap());
    (result, asked)
}

#[tokio::test]
async fn hook_runs_as_the_container_or_as_it_says() {
    let good = || Some(answer(Told::SUCCEEDED, "", b"a lot"));
    for (json, user) in [
        (r#"{"command":["/reseed","-x"],"timeout_ms":7}"#, "33:33"),
        (
            r#"{"command":["/reseed","-x"],"timeout_ms":7,"user":"root"}"#,
            "root",
        ),
    ] {
        let (result, asked) = run_with(&hook(json), good(), std::future::pending()).await;
        assert_eq!((result.failure, result.output.as_str()), (None, ""));
        let [asked] = &asked[..] else {
            panic!("asked {asked:?}");
        };
        assert_eq!((asked.container_id.as_str(), asked.timeout_ms), ("c", 7));
        assert_eq!(asked.process.Args, ["/reseed", "-x"]);
        assert_eq!(
            (asked.process.User.Username.as_str(), asked.process.Cwd.as_str()),
            (user, "/srv")
        );
        assert!(asked.http.is_none() && asked.process.Env.contains(&"A=1".to_owned()));
    }
    let http = hook(r#"{"http":{"port":8080,"path":"/thawed"}}"#);
    let (_, asked) = run_with(&http, good(), std::future::pending()).await;
    assert_eq!(
        (asked[0].http.port, asked[0].http.path.as_str()),
        (8080, "/thawed")
    );
    assert!(asked[0].process.is_none() && asked[0].timeout_ms == Hook::TIMEOUT_MS);
}

#[tokio::test]
async fn failure_has_its_reason_and_bounded_output() {
    let command = hook(r#"{"command":["x"]}"#);
    let told = answer(
        Told::FAILED,
        &"it exited with 3".repeat(100),
        &[b'z'; 3 * MOST_OUTPUT],
    );
    let (result, _) = run_with(&command, Some(told), std::future::pending()).await;
    let why = result.failure.unwrap();
    assert!(why.starts_with("it exited with 3") && why.len() <= MOST_REASON);
    assert_eq!(result.output.len(), MOST_OUTPUT);
    let unknown = Some(RunHookResponse::default());
    let (result, _) = run_with(&command, unknown, std::future::pending()).await;
    assert!(result.failure.unwrap().contains("UNKNOWN"));
    let error = failed("it failed".into(), "one\n\x1b[31mtwo\n");
    assert_eq!((error.kind, error.context.len()), (ErrorKind::HookFailed, 2));
    assert!(!error.context[1].contains('\x1b') && !error.machine_lost);
}

#[tokio::test]
async fn hook_ends_with_the_machine() {
    let command = hook(r#"{"command":["x"],"timeout_ms":600000}"#);
    let end = std::future::ready("the guest powered off".to_owned());
    let (result, _) = run_with(&command, None, end).await;
    assert_eq!(result.failure.as_deref(), Some("the guest powered off"));
}

#[tokio::test(start_paused = true)]
async fn silent_agent_is_given_up_after_the_time_limit() {
    let command = hook(r#"{"command":["x"],"timeout_ms":1000}"#);
    let since = tokio::time::Instant::now();
    let (result, _) = run_with(&command, None, std::future::pending()).await;
    assert_eq!(
        result.failure.as_deref(),
        Some("the guest's agent does not answer")
    );
    assert!(since.elapsed() < Duration::from_secs(60));
}

#[test]
fn required_hook_is_one_after_a_thaw() {
    let mut container = running();
    let refused = |container: Option<&Running>| check_required(container, "snapshot s cannot be thawed");
    container.hooks.before_freeze = Some(hook(r#"{"command":["x"]}"#));
    for none in [None, Some(&container)] {
        let e = refused(none).unwrap_err();
        assert_eq!(e.kind, ErrorKind::HookMissing);
        assert!(e.what.starts_with("snapshot s cannot be thawed: "), "{e}");
    }
    container.hooks.after_thaw = Some(hook(r#"{"http":{"port":1}}"#));
    refused(Some(&container)).unwrap();
}
