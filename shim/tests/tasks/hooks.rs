//! Hooks run on the host: when they run, and the effect of their failure.

use std::path::PathBuf;

use super::*;

/// A hook that appends its name and status to `notes`, and succeeds or fails. The shell's child writes it: no other test's child can
/// hold it open for writing.
fn hook(rig: &Rig, name: &str, fails: bool) -> PathBuf {
    let path = rig.path(name);
    let notes = rig.path("notes").display().to_string();
    let script = format!(
        "#!/bin/sh\nstatus=$(/bin/grep -o '\"status\":\"[a-z]*\"')\necho {name} $status >>{notes}\nexit {}\n",
        u8::from(fails)
    );
    let write = "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\"";
    let mut shell = std::process::Command::new("/bin/sh");
    let written = shell.args(["-c", write]).arg(&path).arg(script).status();
    assert!(written.unwrap().success());
    path
}

fn config(hooks: serde_json::Value) -> serde_json::Value {
    json!({
        "ociVersion": "1.0.2",
        "process": {"args": ["cat"], "cwd": "/", "user": {"uid": 0, "gid": 0}},
        "root": {"path": "rootfs"},
        "hooks": hooks,
        "linux": {"namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "network"}]},
    })
}

fn noted(rig: &Rig) -> Vec<String> {
    let notes = std::fs::read_to_string(rig.path("notes")).unwrap_or_default();
    let names = notes
        .lines()
        .map(|line| line.replace("\"status\":", "").replace('"', ""));
    names.collect()
}

#[tokio::test]
async fn hooks_run_in_order_and_failing_poststop_stops_no_other() {
    let rig = Rig::new().await;
    let hooks = json!({
        "prestart": [{"path": hook(&rig, "prestart", false)}],
        "createRuntime": [{"path": hook(&rig, "createRuntime", false)}],
        "poststart": [{"path": hook(&rig, "poststart", false)}],
        "poststop": [{"path": hook(&rig, "failing", true)}, {"path": hook(&rig, "poststop", false)}],
    });
    rig.create(rig.request_of("one", &config(hooks))).await.unwrap();
    assert_eq!(noted(&rig), ["prestart creating", "createRuntime creating"]);
    rig.start("one", "").await.unwrap();
    assert_eq!(noted(&rig)[2..], ["poststart running"]);
    rig.kill("one", "", libc::SIGKILL).await.unwrap();
    rig.wait("one", "").await.unwrap();
    rig.delete("one", "").await.unwrap();
    assert_eq!(noted(&rig)[3..], ["failing stopped", "poststop stopped"]);
}

#[tokio::test]
async fn container_is_killed_if_a_start_hook_fails() {
    let rig = Rig::new().await;
    let hooks = json!({"poststart": [{"path": hook(&rig, "failing", true)}]});
    rig.create(rig.request_of("one", &config(hooks))).await.unwrap();
    let refused = rig.start("one", "").await.unwrap_err();
    assert!(refused.to_string().contains("failing"), "{refused}");
    assert_eq!(rig.wait("one", "").await.unwrap(), 137);
    rig.delete("one", "").await.unwrap();
    let told = rig.events(4).await;
    assert_eq!(told, ["create one", "start one", "exit one 137", "delete one"]);
}

#[tokio::test]
async fn poststop_hooks_run_once() {
    for killed in [false, true] {
        let rig = Rig::new().await;
        let hooks = json!({"poststop": [{"path": hook(&rig, "poststop", false)}]});
        rig.create(rig.request_of("one", &config(hooks))).await.unwrap();
        match killed {
            true => rig.served.lock().unwrap().take().unwrap().abort(),
            false => drop(rig.delete("one", "").await.unwrap()),
        }
        rig.clean("one").await;
        assert_eq!(noted(&rig), ["poststop stopped"], "{killed}");
    }
}
