//! OCI hooks that run on the host: prestart and createRuntime before a container is created, poststart after
//! its start, poststop after its end. A failing hook ends the container, except poststop. Hooks for the
//! container's namespaces are refused, because these are in the guest.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use crate::error::{Error, Result, WithContext};
use crate::spec::config::{Hook, Hooks};
use crate::warning;

/// The container state that a hook reads from its standard input (OCI runtime specification, runtime.md,
/// "State").
#[derive(Clone, Copy, Debug)]
pub struct State<'a> {
    pub oci_version: &'a str,
    pub id: &'a str,
    pub status: &'a str,
    pub pid: i32,
    pub bundle: &'a Path,
    pub annotations: &'a BTreeMap<String, String>,
}

/// Refuses hooks that cannot run.
pub fn check(hooks: &Hooks) -> Result<()> {
    for (name, in_guest) in [
        ("createContainer", &hooks.create_container),
        ("startContainer", &hooks.start_container),
    ] {
        if let Some(hook) = in_guest.first() {
            return Err(Error::Unsupported(format!(
                "the {name} hook {} runs in the container's namespaces, which are in a microVM: use createRuntime, or do its work in the image",
                hook.path
            )));
        }
    }
    Ok(())
}

/// Runs hooks one after the other.
///
/// # Errors
/// The first hook that failed, with its stderr. Later hooks do not run.
pub async fn run(hooks: &[Hook], state: State<'_>) -> Result<()> {
    for hook in hooks {
        run_one(hook, state).await?;
    }
    Ok(())
}

/// Runs every hook, and logs failures.
pub async fn run_each(hooks: &[Hook], state: State<'_>) {
    for hook in hooks {
        if let Err(e) = run_one(hook, state).await {
            warning!("container {}: {e}", state.id);
        }
    }
}

async fn run_one(hook: &Hook, state: State<'_>) -> Result<()> {
    let input = serde_json::json!({
        "ociVersion": state.oci_version,
        "id": state.id,
        "status": state.status,
        "pid": state.pid,
        "bundle": state.bundle,
        "annotations": state.annotations,
    });
    let mut command = Command::new(&hook.path);
    if let Some((name, arguments)) = hook.args.split_first() {
        command.arg0(name).args(arguments);
    }
    command
        .env_clear()
        .envs(hook.env.iter().filter_map(|pair| pair.split_once('=')))
        .current_dir(state.bundle)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut child = command
        .spawn()
        .with_context(|| format!("run the hook {}", hook.path))?;
    let attended = async {
        if let Some(mut stdin) = child.stdin.take() {
            // A hook need not read its input.
            let _ = stdin.write_all(input.to_string().as_bytes()).await;
        }
        child.wait_with_output().await
    };
    let limit = hook
        .timeout
        .and_then(|s| u64::try_from(s).ok())
        .filter(|s| *s > 0);
    let output = match limit {
        None => attended.await,
        Some(seconds) => match tokio::time::timeout(Duration::from_secs(seconds), attended).await {
            Ok(output) => output,
            Err(_) => {
                return Err(Error::State(format!(
                    "the hook {} did not end within {seconds} s",
                    hook.path
                )));
            }
        },
    };
    let output = output.with_context(|| format!("wait for the hook {}", hook.path))?;
    match output.status.success() {
        true => Ok(()),
        false => {
            let stderr = String::from_utf8_lossy(&output.stderr);
            Err(Error::State(format!(
                "the hook {} failed ({}): {}",
                hook.path,
                output.status,
                stderr.trim_end()
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hook(script: &str, timeout: Option<i64>) -> Hook {
        Hook {
            path: "/bin/sh".into(),
            args: vec!["sh".into(), "-c".into(), script.into()],
            env: vec!["A=b".into()],
            timeout,
        }
    }

    #[tokio::test]
    async fn hook_gets_container_state_and_reports_failure() {
        let bundle = tempfile::tempdir().unwrap();
        let annotations = BTreeMap::from([("key".to_owned(), "value".to_owned())]);
        let state = State {
            oci_version: "1.2.1",
            id: "me",
            status: "creating",
            pid: 7,
            bundle: bundle.path(),
            annotations: &annotations,
        };
        run(&[hook("/bin/cat > told; echo $A >> told", None)], state)
            .await
            .unwrap();
        let told = std::fs::read_to_string(bundle.path().join("told")).unwrap();
        let (json, env) = told.rsplit_once('}').unwrap();
        let json: serde_json::Value = serde_json::from_str(&format!("{json}}}")).unwrap();
        let of_spec = (json["ociVersion"].as_str(), json["annotations"]["key"].as_str());
        assert_eq!(of_spec, (Some("1.2.1"), Some("value")));
        assert_eq!(
            (json["id"].as_str(), json["pid"].as_i64(), env.trim()),
            (Some("me"), Some(7), "b")
        );
        let failing = [hook("echo why >&2; exit 3", None), hook("/bin/touch after", None)];
        let error = run(&failing, state).await.unwrap_err().to_string();
        assert!(
            error.contains("why") && !bundle.path().join("after").exists(),
            "{error}"
        );
        run_each(&failing, state).await;
        assert!(bundle.path().join("after").exists());
        let slow = run(&[hook("exec /bin/sleep 60", Some(1))], state)
            .await
            .unwrap_err();
        assert!(slow.to_string().contains("1 s"));
    }

    #[test]
    fn hooks_in_guest_are_refused_by_name() {
        let hooks = Hooks {
            start_container: vec![hook("", None)],
            ..Default::default()
        };
        assert!(check(&hooks).unwrap_err().to_string().contains("startContainer"));
        check(&Hooks::default()).unwrap();
    }
}
