//! Namespaces and mounts that containers of one guest share.

use thaw_protocol::agent::agent::*;
use thaw_protocol::agent::layout;
use thaw_protocol::agent::oci;
use ttrpc::Code;

use crate::support::{self, bind, code_of, spec};
use crate::with_guest;

/// The names of all visible processes.
const PROCESSES: &str = "cat /proc/[0-9]*/comm 2>/dev/null";

pub(super) async fn said(g: &support::Guest, id: &str, exec: &str, script: &str) -> String {
    g.exec(id, exec, &["sh", "-c", script], false).await.unwrap();
    let said = String::from_utf8(g.read_all(id, exec, false).await).unwrap();
    g.wait(id, exec).await;
    said
}

#[test]
fn shared_pid_namespace_shows_containers_but_not_the_agent() {
    with_guest(|g| async move {
        let orphans = "(true & exit 0); (sleep 1000 & exit 0); exec sleep 2000";
        g.create_sharing("a", spec(&g, &["sh", "-c", orphans]))
            .await
            .unwrap();
        g.create_sharing("b", spec(&g, &["cat"])).await.unwrap();
        g.create("apart", spec(&g, &["sleep", "3000"])).await.unwrap();
        for id in ["a", "b", "apart"] {
            g.start(id).await.unwrap();
        }
        // An orphan that is not reaped would stay visible.
        let settle = format!(
            "until [ $({PROCESSES} | grep -c sleep) = 2 ] && ! {PROCESSES} | grep true; do :; done; {PROCESSES}"
        );
        let seen = said(&g, "b", "seen", &settle).await;
        assert!(seen.starts_with("pause\n") && seen.contains("\ncat\n"), "{seen}");
        assert!(!seen.contains("thaw"), "{seen}");
        // The files of the namespace's first process are not accessible by its PID, and it does not end.
        let first = "ls /proc/1/root/ 2>/dev/null; cat /proc/1/environ 2>/dev/null; kill -9 1; kill -15 1; cat /proc/1/comm";
        assert_eq!(said(&g, "b", "first", first).await, "pause\n");
        let own = said(&g, "apart", "own", PROCESSES).await;
        assert!(own.starts_with("sleep\n") && !own.contains("pause"), "{own}");

        // A container's processes end with it, although its first was not that of the namespace.
        g.signal("a", "a", 9).await.unwrap();
        assert_eq!(g.wait("a", "a").await, 137);
        let left = format!("while {PROCESSES} | grep -q sleep; do :; done; echo none");
        assert_eq!(said(&g, "b", "left", &left).await, "none\n");
        g.remove("a").await.unwrap();
        g.create_sharing("a", spec(&g, &["true"])).await.unwrap();
        g.start("a").await.unwrap();
        assert_eq!(g.wait("a", "a").await, 0);
        g.destroy().await;
        g.assert_clean().await;
        // Afterwards there is a new namespace.
        g.create_sharing("a", spec(&g, &["sh", "-c", "cat /proc/1/comm"]))
            .await
            .unwrap();
        g.start("a").await.unwrap();
        assert_eq!(g.read_all("a", "a", false).await, b"pause\n");
        g.destroy().await;
        g.assert_clean().await;
    });
}

#[test]
fn container_joins_pid_namespace_of_another_by_name() {
    with_guest(|g| async move {
        g.create("target", spec(&g, &["sleep", "1000"])).await.unwrap();
        g.start("target").await.unwrap();
        let joining = |id: &str| {
            let mut s = spec(&g, &["sh", "-c", "cat /proc/1/comm"]);
            let namespaces = &mut s.Linux.as_mut().unwrap().Namespaces;
            namespaces.iter_mut().find(|n| n.Type == "pid").unwrap().Path = layout::pid_namespace_path(id);
            s
        };
        g.create("debugger", joining("target")).await.unwrap();
        g.start("debugger").await.unwrap();
        assert_eq!(g.read_all("debugger", "debugger", false).await, b"sleep\n");
        let e = g.create("lost", joining("nobody")).await.unwrap_err();
        assert_eq!(code_of(&e), Code::INVALID_ARGUMENT);
        g.signal("target", "", 9).await.unwrap();
        g.wait("target", "target").await;
        let e = g.create("late", joining("target")).await.unwrap_err();
        assert_eq!(code_of(&e), Code::FAILED_PRECONDITION);
        for id in ["target", "debugger"] {
            g.remove(id).await.unwrap();
        }
        g.assert_clean().await;
    });
}

#[test]
fn shared_memory_and_objects_are_there_as_long_as_the_sandbox() {
    with_guest(|g| async move {
        let shm = format!("{}/shm", g.dir().display());
        let storage = Storage {
            driver: "ephemeral".into(),
            options: vec!["mode=1777".into(), "size=1m".into()],
            mount_point: shm.clone(),
            ..Default::default()
        };
        let request = CreateSandboxRequest {
            storages: vec![storage.clone()],
            ..Default::default()
        };
        g.client
            .create_sandbox(support::context(), &request)
            .await
            .unwrap();
        let sharing = |script: &str| {
            let mut s: oci::Spec = spec(&g, &["sh", "-c", script]);
            s.Mounts.retain(|m| m.destination != "/dev/shm");
            s.Mounts.push(bind(&shm, "/dev/shm", &["rbind"]));
            let linux = s.Linux.as_mut().unwrap();
            linux.Namespaces.retain(|n| n.Type != "ipc" && n.Type != "uts");
            s
        };
        let run = async |id: &str, s: oci::Spec| {
            g.create_with(id, s, vec![storage.clone()]).await.unwrap();
            g.start(id).await.unwrap();
            let said = String::from_utf8(g.read_all(id, id, false).await).unwrap();
            g.remove(id).await.unwrap();
            said
        };
        let write = "echo kept > /dev/shm/file; echo > /dev/mqueue/queue; head -c 2000000 /dev/zero > /dev/shm/large; \
                     wc -c < /dev/shm/large; echo > /dev/shm/large";
        // Writing more than its size fails.
        let written: u64 = run("first", sharing(write)).await.trim().parse().unwrap();
        assert!((900_000..=1 << 20).contains(&written), "{written}");
        let seen = run("second", sharing("cat /dev/shm/file; ls /dev/mqueue; hostname")).await;
        assert_eq!(seen, "kept\nqueue\nguest-7\n");
        // System V objects and sysctls of the pod's namespaces are the guest's; other containers have their
        // own.
        let forced = "cat /proc/sys/kernel/shm_rmid_forced /proc/sys/net/ipv4/ip_local_port_range";
        let mut with_sysctls = sharing(forced);
        with_sysctls.Linux.as_mut().unwrap().Sysctl = [
            ("kernel.shm_rmid_forced".to_owned(), "1".to_owned()),
            ("net.ipv4.ip_local_port_range".to_owned(), "1024\t2048".to_owned()),
        ]
        .into();
        assert_eq!(run("set", with_sysctls).await, "1\n1024\t2048\n");
        assert_eq!(run("after", sharing(forced)).await, "1\n1024\t2048\n");
        let mut apart = spec(&g, &["cat", "/proc/sys/kernel/shm_rmid_forced"]);
        apart.Linux.as_mut().unwrap().Sysctl.clear();
        assert_eq!(run("apart", apart).await, "0\n");
        let mut unknown = sharing("true");
        unknown.Linux.as_mut().unwrap().Sysctl = [("kernel.no_such_thing".to_owned(), "1".to_owned())].into();
        let e = g.create("unknown", unknown).await.unwrap_err();
        assert!(e.to_string().contains("kernel.no_such_thing"), "{e}");
        g.destroy().await;
        g.assert_clean().await;
    });
}
