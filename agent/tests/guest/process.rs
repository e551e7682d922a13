//! A process from its start to its end: its user, rights, signals and exit.

use super::*;
use thaw_protocol::agent::annotations::INIT;

#[test]
fn missing_and_not_executable_commands_are_distinct() {
    with_guest(|g| async move {
        std::fs::write(g.rootfs().join("not-executable"), "x").unwrap();
        // A missing program fails the creation.
        for command in ["no-such-command", "/no/such/path", "./not-here"] {
            let e = g.create("c", spec(&g, &[command])).await.unwrap_err();
            assert_eq!(code_of(&e), Code::NOT_FOUND, "{command}: {e}");
            assert!(e.to_string().contains(command), "{e}");
        }
        for command in ["/not-executable", "./not-executable", "/etc"] {
            g.create("c", spec(&g, &[command])).await.unwrap();
            let e = g.start("c").await.unwrap_err();
            assert_eq!(code_of(&e), Code::PERMISSION_DENIED, "{command}: {e}");
            assert!(e.to_string().contains(command), "{e}");
            assert_eq!(g.wait("c", "c").await, 126);
            g.remove("c").await.unwrap();
        }
        let e = g.call_unknown("nope").await.unwrap_err();
        assert_eq!(code_of(&e), Code::INVALID_ARGUMENT);
        g.assert_clean().await;
    });
}

#[test]
fn exec_runs_in_the_containers_namespaces() {
    with_guest(|g| async move {
        let mut s = spec(&g, &["sleep", "1000"]);
        s.Hostname = "inside".into();
        g.create("c", s).await.unwrap();
        g.start("c").await.unwrap();
        g.exec(
            "c",
            "e1",
            &["sh", "-c", "hostname; cat /proc/1/comm; cat; exit 3"],
            false,
        )
        .await
        .unwrap();
        g.write("c", "e1", b"typed").await.unwrap();
        g.close_stdin("c", "e1").await.unwrap();
        assert_eq!(
            String::from_utf8(g.read_all("c", "e1", false).await).unwrap(),
            "inside\nsleep\ntyped"
        );
        assert_eq!(g.wait("c", "e1").await, 3);
        let e = g.exec("c", "e2", &["no-such-command"], false).await.unwrap_err();
        assert_eq!(code_of(&e), Code::NOT_FOUND);
        let e = g.exec("c", "e1", &["true"], false).await.unwrap_err();
        assert_eq!(code_of(&e), Code::FAILED_PRECONDITION, "the name is taken");
        // Signals are sent to one process by number; the exit code is 128 + n.
        g.exec("c", "e3", &["sleep", "1000"], false).await.unwrap();
        g.signal("c", "e3", 0).await.unwrap();
        g.signal("c", "e3", 15).await.unwrap();
        assert_eq!(g.wait("c", "e3").await, 143);
        assert!(g.signal("c", "e3", 15).await.is_err());
        // To all processes.
        g.signal("c", "", 9).await.unwrap();
        assert_eq!(g.wait("c", "c").await, 137);
        let e = g.exec("c", "e4", &["true"], false).await.unwrap_err();
        assert_eq!(code_of(&e), Code::FAILED_PRECONDITION);
        g.remove("c").await.unwrap();
        g.assert_clean().await;
    });
}

#[test]
fn no_zombie_stays_and_orphans_die_with_their_container() {
    with_guest(|g| async move {
        // Without a PID namespace, the agent inherits orphans.
        let mut s = spec(
            &g,
            &[
                "sh",
                "-c",
                "(sleep 0.1 & sleep 0.2 & exit 0); (sleep 1000 &); sleep 0.5; exit 0",
            ],
        );
        s.Linux.as_mut().unwrap().Namespaces.retain(|n| n.Type != "pid");
        g.create("c", s).await.unwrap();
        g.start("c").await.unwrap();
        assert_eq!(g.wait("c", "c").await, 0);
        // The remaining process is killed with it, and reaped like the others.
        g.wait_for_no_process().await;
        g.remove("c").await.unwrap();
        g.assert_clean().await;
        for i in 0..20 {
            let id = format!("c{i}");
            g.create(&id, spec(&g, &["true"])).await.unwrap();
            g.start(&id).await.unwrap();
            assert_eq!(g.wait(&id, &id).await, 0);
            g.remove(&id).await.unwrap();
        }
        g.assert_clean().await;
    });
}

#[test]
fn init_reaps_orphans_and_forwards_signals_and_status() {
    with_guest(|g| async move {
        let under_init = |args: &[&str]| {
            let mut s = spec(&g, args);
            s.Annotations.insert(INIT.into(), "true".into());
            s
        };
        // A zombie is in /proc, so the script ends only if the orphan is reaped.
        let script = "echo $$; (sh -c 'echo $$ > /tmp/orphan; exec sleep 0.05' &); until [ -s /tmp/orphan ]; do :; done; \
                      while [ -d /proc/$(cat /tmp/orphan) ]; do :; done; echo reaped; exit 3";
        g.create("c", under_init(&["sh", "-c", script])).await.unwrap();
        g.start("c").await.unwrap();
        let out = String::from_utf8(g.read_all("c", "c", false).await).unwrap();
        assert_eq!(out, "2\nreaped\n", "the program is not PID 1");
        assert_eq!(g.wait("c", "c").await, 3);
        g.remove("c").await.unwrap();
        // PID 1 would ignore a signal that it does not handle.
        g.create("c", under_init(&["sleep", "1000"])).await.unwrap();
        g.start("c").await.unwrap();
        g.signal("c", "c", 15).await.unwrap();
        assert_eq!(g.wait("c", "c").await, 143);
        g.remove("c").await.unwrap();
        std::fs::write(g.rootfs().join("not-executable"), "x").unwrap();
        g.create("c", under_init(&["/not-executable"])).await.unwrap();
        let e = g.start("c").await.unwrap_err();
        assert_eq!(code_of(&e), Code::PERMISSION_DENIED, "{e}");
        assert_eq!(g.wait("c", "c").await, 126);
        g.remove("c").await.unwrap();
        g.assert_clean().await;
    });
}

#[test]
fn container_manages_its_cgroups_and_execs_follow_it() {
    with_guest(|g| async move {
        let script = "grep ^0: /proc/self/cgroup; wc -l < /sys/fs/cgroup/cgroup.procs; mkdir /sys/fs/cgroup/inner; \
                      echo $$ > /sys/fs/cgroup/inner/cgroup.procs; grep ^0: /proc/self/cgroup; exec sleep 1000";
        let mut s = spec(&g, &["sh", "-c", script]);
        let cgroups = support::mount(
            "/sys/fs/cgroup",
            "cgroup",
            "cgroup",
            &["nosuid", "noexec", "nodev"],
        );
        s.Mounts.push(cgroups);
        g.create("c", s).await.unwrap();
        g.start("c").await.unwrap();
        g.read_until("c", "c", "0::/init.scope\n0\n0::/inner\n").await;
        g.exec("c", "beside", &["grep", "^0:", "/proc/self/cgroup"], false)
            .await
            .unwrap();
        assert_eq!(g.read_all("c", "beside", false).await, b"0::/inner\n");
        assert_eq!(g.wait("c", "beside").await, 0);
        g.signal("c", "c", 9).await.unwrap();
        assert_eq!(g.wait("c", "c").await, 137);
        g.remove("c").await.unwrap();
        g.assert_clean().await;
    });
}

#[test]
fn process_has_the_specified_user_and_rights() {
    with_guest(|g| async move {
        let script = "id -u; id -g; id -G; umask; pwd; echo $HOME $A; ulimit -n; \
                      grep -E 'Cap(Eff|Bnd|Amb)|NoNewPrivs|Seccomp:' /proc/self/status; cat /proc/sys/kernel/hostname; \
                      echo x > /dev/stdout";
        let mut s = spec(&g, &["sh", "-c", script]);
        s.Hostname = "who".into();
        let p = s.Process.as_mut().unwrap();
        p.User = MessageField::some(oci::User {
            Username: "www".into(),
            ..Default::default()
        });
        p.Cwd = "/made/for/me".into();
        p.Env.push("A=b c".into());
        p.NoNewPrivileges = true;
        p.Capabilities = MessageField::some(capabilities(&["CAP_CHOWN", "CAP_NET_BIND_SERVICE"]));
        p.Rlimits.push(oci::POSIXRlimit {
            Type: "RLIMIT_NOFILE".into(),
            Soft: 100,
            Hard: 200,
            ..Default::default()
        });
        let mut seccomp = oci::LinuxSeccomp::new();
        seccomp.DefaultAction = "SCMP_ACT_ALLOW".into();
        s.Linux.as_mut().unwrap().Seccomp = MessageField::some(seccomp);
        g.create("c", s).await.unwrap();
        g.start("c").await.unwrap();
        let out = String::from_utf8(g.read_all("c", "c", false).await).unwrap();
        let lines: Vec<&str> = out.lines().collect();
        assert_eq!(
            lines[..7],
            ["33", "34", "34 50", "0022", "/made/for/me", "/var/www b c", "100"],
            "{out}"
        );
        assert!(out.contains("CapBnd:\t0000000000000401"), "{out}");
        assert!(out.contains("CapEff:\t0000000000000000"), "not root: {out}");
        assert!(
            out.contains("NoNewPrivs:\t1") && out.contains("Seccomp:\t2"),
            "{out}"
        );
        assert!(out.ends_with("who\nx\n"), "{out}");
        g.remove("c").await.unwrap();
    });
}

#[test]
fn seccomp_answers_with_the_errno_it_was_told() {
    with_guest(|g| async move {
        for no_new_privileges in [false, true] {
            let mut s = spec(&g, &["sh", "-c", "mkdir /tmp/d; hostname x; echo $?"]);
            s.Process.as_mut().unwrap().NoNewPrivileges = no_new_privileges;
            let mut seccomp = oci::LinuxSeccomp::new();
            seccomp.DefaultAction = "SCMP_ACT_ALLOW".into();
            seccomp.Syscalls.push(oci::LinuxSyscall {
                Names: vec!["mkdir".into(), "mkdirat".into()],
                Action: "SCMP_ACT_ERRNO".into(),
                ErrnoRet: Some(oci::linux_syscall::ErrnoRet::Errnoret(libc::ENOSPC as u32)),
                ..Default::default()
            });
            s.Linux.as_mut().unwrap().Seccomp = MessageField::some(seccomp);
            g.create("c", s).await.unwrap();
            g.start("c").await.unwrap();
            let err = String::from_utf8(g.read_all("c", "c", true).await).unwrap();
            assert!(err.contains("No space left on device"), "{err}");
            g.remove("c").await.unwrap();
        }
    });
}
