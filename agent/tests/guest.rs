//! The agent as PID 1 of fresh namespaces on this machine, spoken to as a host speaks to it: handshake, then the API,
//! over unix sockets in vsock's place. Needs root, `unshare` (util-linux), `ip` (iproute2) and `busybox` (busybox-static).

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

mod kata;
mod readiness;
mod support;

use std::time::Duration;

use support::{Guest, bind, capabilities, code_of, identity, spec, wait_gone};
use thaw_protocol::agent::MessageField;
use thaw_protocol::agent::agent::*;
use thaw_protocol::agent::oci;
use thaw_protocol::handshake::Greeting;
use ttrpc::Code;

/// Runs a test with a guest, or says why not.
fn with_guest<F: Future<Output = ()>>(test: impl FnOnce(Guest) -> F) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let Some(guest) = Guest::boot().await else { return };
        tokio::time::timeout(Duration::from_secs(120), test(guest))
            .await
            .expect("the test hangs");
    });
}

#[test]
fn a_container_runs_and_its_output_and_exit_code_arrive() {
    with_guest(|g| async move {
        g.create("c", spec(&g, &["sh", "-c", "echo out; echo err >&2; exit 7"]))
            .await
            .unwrap();
        g.start("c").await.unwrap();
        assert_eq!(g.read_all("c", "c", false).await, b"out\n");
        assert_eq!(g.read_all("c", "c", true).await, b"err\n");
        assert_eq!(g.wait("c", "c").await, 7);
        assert_eq!(
            g.wait("c", "").await,
            7,
            "the code is told as often as it is asked for"
        );
        g.remove("c").await.unwrap();
        let e = g.start("c").await.unwrap_err();
        assert_eq!(code_of(&e), Code::INVALID_ARGUMENT);
        g.assert_clean().await;
    });
}

#[test]
fn stdin_reaches_the_process_and_its_end_too_however_much_it_is() {
    with_guest(|g| async move {
        g.create("c", spec(&g, &["wc", "-c"])).await.unwrap();
        g.start("c").await.unwrap();
        let chunk = vec![b'x'; 100_000];
        for _ in 0..30 {
            assert_eq!(g.write("c", "c", &chunk).await.unwrap(), 100_000);
        }
        g.close_stdin("c", "c").await.unwrap();
        assert_eq!(g.read_all("c", "c", false).await, b"3000000\n");
        assert_eq!(g.wait("c", "c").await, 0);
        assert!(g.write("c", "c", b"late").await.is_err());
        g.remove("c").await.unwrap();
    });
}

#[test]
fn a_container_that_waits_for_its_start_holds_nobody_elses_pipes() {
    with_guest(|g| async move {
        g.create("reader", spec(&g, &["cat"])).await.unwrap();
        g.start("reader").await.unwrap();
        g.create("waiting", spec(&g, &["true"])).await.unwrap();
        g.write("reader", "reader", b"x").await.unwrap();
        g.close_stdin("reader", "reader").await.unwrap();
        let end = tokio::time::timeout(Duration::from_secs(10), g.wait("reader", "reader")).await;
        assert_eq!(end.expect("stdin never ended"), 0);
        for id in ["reader", "waiting"] {
            g.remove(id).await.unwrap();
        }
        g.assert_clean().await;
    });
}

#[test]
fn output_nobody_reads_holds_the_process_and_is_all_there_later() {
    with_guest(|g| async move {
        g.create(
            "c",
            spec(&g, &["sh", "-c", "head -c 2000000 /dev/zero; echo -n done >&2"]),
        )
        .await
        .unwrap();
        g.start("c").await.unwrap();
        // It cannot be done: the pipe is full.
        let early = tokio::time::timeout(Duration::from_millis(300), g.wait("c", "c")).await;
        assert!(early.is_err());
        assert_eq!(g.read_all("c", "c", false).await.len(), 2_000_000);
        assert_eq!(g.wait("c", "c").await, 0);
        assert_eq!(g.read_all("c", "c", true).await, b"done");
        g.remove("c").await.unwrap();
    });
}

#[test]
fn what_cannot_be_executed_is_told_apart() {
    with_guest(|g| async move {
        std::fs::write(g.rootfs().join("not-executable"), "x").unwrap();
        // What is nowhere makes no container.
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
fn an_exec_runs_beside_the_first_process_and_in_its_namespaces() {
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
        // Signals: to one process, by number, and 128 + n.
        g.exec("c", "e3", &["sleep", "1000"], false).await.unwrap();
        g.signal("c", "e3", 0).await.unwrap();
        g.signal("c", "e3", 15).await.unwrap();
        assert_eq!(g.wait("c", "e3").await, 143);
        assert!(g.signal("c", "e3", 15).await.is_err());
        // To all of them.
        g.signal("c", "", 9).await.unwrap();
        assert_eq!(g.wait("c", "c").await, 137);
        let e = g.exec("c", "e4", &["true"], false).await.unwrap_err();
        assert_eq!(code_of(&e), Code::FAILED_PRECONDITION);
        g.remove("c").await.unwrap();
        g.assert_clean().await;
    });
}

#[test]
fn a_terminal_is_controlling_has_a_size_and_takes_control_c() {
    with_guest(|g| async move {
        let mut s = spec(
            &g,
            &[
                "sh",
                "-c",
                "stty size; trap 'stty size; exit 5' WINCH; echo ready; read line; echo got $line; sleep 1000",
            ],
        );
        let p = s.Process.as_mut().unwrap();
        p.Terminal = true;
        p.ConsoleSize = MessageField::some(oci::Box {
            Height: 40,
            Width: 100,
            ..Default::default()
        });
        g.create("c", s).await.unwrap();
        g.start("c").await.unwrap();
        g.read_until("c", "c", "40 100\r\nready\r\n").await;
        g.write("c", "c", b"hello\n").await.unwrap();
        g.read_until("c", "c", "got hello\r\n").await;
        // Interrupted, sleep ends and the shell with it: only a controlling terminal does that.
        g.write("c", "c", &[3]).await.unwrap();
        assert_eq!(g.wait("c", "c").await, 130);
        g.read_all("c", "c", false).await;
        g.remove("c").await.unwrap();

        let mut s = spec(
            &g,
            &[
                "sh",
                "-c",
                "trap 'stty size; exit 5' WINCH; echo ready; while :; do sleep 0.05; done",
            ],
        );
        s.Process.as_mut().unwrap().Terminal = true;
        g.create("d", s).await.unwrap();
        g.start("d").await.unwrap();
        g.read_until("d", "d", "ready\r\n").await;
        g.resize("d", "d", 24, 80).await.unwrap();
        g.read_until("d", "d", "24 80\r\n").await;
        assert_eq!(g.wait("d", "d").await, 5);
        g.exec_refused_without_terminal("d").await;
        g.remove("d").await.unwrap();
        g.assert_clean().await;
    });
}

#[test]
fn no_zombie_stays_and_orphans_die_with_their_container() {
    with_guest(|g| async move {
        // Without a PID namespace orphans come to the agent itself.
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
        assert_eq!(g.zombies(), 0);
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
fn the_process_is_who_and_what_the_specification_says() {
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

#[test]
fn the_root_is_the_images_and_what_is_masked_or_read_only_is_so() {
    with_guest(|g| async move {
        std::fs::write(g.dir().join("injected"), "injected\n").unwrap();
        let script = "cat /etc/injected; echo no > /file; echo no > /proc/sys/kernel/hostname; cat /masked | wc -c; \
                      ls /masked-dir | wc -l; touch /dev/shm/ok && echo shm; test -c /dev/null && echo null; \
                      cat /sys/fs/cgroup/cgroup.procs | wc -l; mount | grep -c ' / '; ls /work 2>&1";
        let mut s = spec(&g, &["sh", "-c", script]);
        std::fs::write(g.rootfs().join("masked"), "secret").unwrap();
        std::fs::create_dir_all(g.rootfs().join("masked-dir/x")).unwrap();
        s.Root.as_mut().unwrap().Readonly = true;
        s.Mounts.push(bind(
            g.dir().join("injected").to_str().unwrap(),
            "/etc/injected",
            &["rbind", "ro"],
        ));
        s.Mounts.push(support::mount(
            "/sys/fs/cgroup",
            "cgroup",
            "cgroup",
            &["ro", "nosuid", "noexec", "nodev"],
        ));
        let linux = s.Linux.as_mut().unwrap();
        linux.MaskedPaths = vec!["/masked".into(), "/masked-dir".into(), "/not/there".into()];
        linux.ReadonlyPaths = vec!["/proc/sys".into(), "/not/there".into()];
        g.create("c", s).await.unwrap();
        g.start("c").await.unwrap();
        let out = String::from_utf8(g.read_all("c", "c", false).await).unwrap();
        let err = String::from_utf8(g.read_all("c", "c", true).await).unwrap();
        assert!(out.starts_with("injected\n0\n0\nshm\nnull\n"), "{out}{err}");
        assert_eq!(err.matches("Read-only file system").count(), 2, "{err}");
        assert!(
            out.contains("No such file or directory"),
            "the host's directories are gone: {out}"
        );
        g.remove("c").await.unwrap();
        g.assert_clean().await;
    });
}

#[test]
fn storages_come_before_the_root_and_go_with_it() {
    with_guest(|g| async move {
        let base = format!("{}/overlay", g.dir().display());
        let root = format!("{base}/rootfs");
        let mut s = spec(
            &g,
            &[
                "sh",
                "-c",
                "echo new > /etc/made; cat /etc/made; cat /volume/hello",
            ],
        );
        s.Root.as_mut().unwrap().Path = root.clone();
        s.Mounts
            .push(bind(&format!("{base}/volume"), "/volume", &["rbind"]));
        std::fs::create_dir_all(g.dir().join("source")).unwrap();
        std::fs::write(g.dir().join("source/hello"), "hello\n").unwrap();
        let storages = vec![
            Storage {
                driver: "ephemeral".into(),
                mount_point: format!("{base}/disk"),
                options: vec!["size=1m".into()],
                ..Default::default()
            },
            Storage {
                driver: "overlayfs".into(),
                driver_options: ["upper", "work"]
                    .map(|d| format!("io.katacontainers.volume.overlayfs.create_directory={base}/disk/c/{d}"))
                    .to_vec(),
                options: vec![
                    format!("lowerdir={}", g.rootfs().display()),
                    format!("upperdir={base}/disk/c/upper"),
                    format!("workdir={base}/disk/c/work"),
                ],
                mount_point: root.clone(),
                ..Default::default()
            },
            Storage {
                driver: "bind".into(),
                source: g.dir().join("source").to_str().unwrap().into(),
                mount_point: format!("{base}/volume"),
                ..Default::default()
            },
        ];
        g.create_with("c", s.clone(), storages.clone()).await.unwrap();
        g.start("c").await.unwrap();
        assert_eq!(g.read_all("c", "c", false).await, b"new\nhello\n");
        assert!(
            !g.rootfs().join("etc/made").exists(),
            "the lower layer is untouched"
        );
        g.remove("c").await.unwrap();
        g.assert_clean().await;
        // One that fails leaves none mounted.
        let mut broken = storages;
        broken[2].source = "/no/such/source".into();
        assert!(g.create_with("c", s, broken).await.is_err());
        g.assert_clean().await;
    });
}

#[test]
fn a_container_is_paused_and_goes_on() {
    with_guest(|g| async move {
        g.create("c", spec(&g, TICKS)).await.unwrap();
        g.start("c").await.unwrap();
        g.read_until("c", "c", "tick\n").await;
        g.pause("c").await.unwrap();
        falls_silent(&g, "c", "c").await;
        g.resume("c").await.unwrap();
        g.read_until("c", "c", "tick\n").await;
        let stats = g.stats("c").await;
        assert!(stats.cgroup_stats.cpu_stats.cpu_usage.total_usage > 0);
        g.remove("c").await.unwrap();
        g.assert_clean().await;
    });
}

#[test]
fn limits_hold_or_are_refused_by_name() {
    with_guest(|g| async move {
        let mut s = spec(&g, &["true"]);
        let mut resources = oci::LinuxResources::new();
        resources.Memory = MessageField::some(oci::LinuxMemory {
            Limit: 32 << 20,
            ..Default::default()
        });
        s.Linux.as_mut().unwrap().Resources = MessageField::some(resources);
        let made = g.create("c", s).await;
        if g.has_controller("memory") {
            made.unwrap();
            assert!(g.stats("c").await.cgroup_stats.memory_stats.usage.limit == 32 << 20);
            g.remove("c").await.unwrap();
        } else {
            eprintln!("limits themselves: skipped, the memory controller is not on cgroup v2 here");
            let e = made.unwrap_err();
            assert_eq!(code_of(&e), Code::UNIMPLEMENTED);
            assert!(e.to_string().contains("memory.max"), "{e}");
        }
        g.assert_clean().await;
    });
}

#[test]
fn a_process_killed_for_memory_is_told_by_its_code_and_an_event() {
    with_guest(|g| async move {
        if !g.has_controller("memory") || !g.has_controller("pids") {
            eprintln!("skipped: the memory and pids controllers are not on cgroup v2 here");
            return;
        }
        // A shell variable of a hundred million letters.
        let hog = "x=$(head -c 100000000 /dev/zero | tr '\\0' x); echo survived";
        let mut s = spec(&g, &["sh", "-c", hog]);
        let mut resources = oci::LinuxResources::new();
        let limit = oci::LinuxMemory {
            Limit: 24 << 20,
            Swap: 24 << 20,
            ..Default::default()
        };
        resources.Memory = MessageField::some(limit);
        s.Linux.as_mut().unwrap().Resources = MessageField::some(resources);
        g.create("hog", s).await.unwrap();
        g.start("hog").await.unwrap();
        assert_eq!(g.wait("hog", "hog").await, 137);
        let request = GetOOMEventRequest::new();
        let event = g.client.get_oom_event(support::context(), &request);
        let event = tokio::time::timeout(Duration::from_secs(1), event)
            .await
            .expect("the event came before the code");
        assert_eq!(event.unwrap().container_id, "hog");
        assert_eq!(
            g.stats("hog").await.cgroup_stats.memory_stats.stats["oom_kill"],
            1
        );
        g.remove("hog").await.unwrap();

        let mut s = spec(
            &g,
            &["sh", "-c", "for i in 1 2 3 4 5 6; do sleep 1000 & done; echo all"],
        );
        let mut resources = oci::LinuxResources::new();
        resources.Pids = MessageField::some(oci::LinuxPids {
            Limit: 4,
            ..Default::default()
        });
        s.Linux.as_mut().unwrap().Resources = MessageField::some(resources);
        g.create("many", s).await.unwrap();
        g.start("many").await.unwrap();
        let err = String::from_utf8(g.read_all("many", "many", true).await).unwrap();
        assert!(err.contains("fork"), "{err}");
        g.remove("many").await.unwrap();
        g.assert_clean().await;
    });
}

#[test]
fn the_handshake_made_this_guest_itself() {
    with_guest(|g| async move {
        let interfaces = g.interfaces().await;
        let eth = interfaces
            .iter()
            .find(|i| i.hwAddr == "02:00:00:00:00:07")
            .expect("the MAC of the handshake");
        assert_eq!((eth.name.as_str(), eth.mtu), ("pod7", 1400));
        let addresses: Vec<String> = eth
            .IPAddresses
            .iter()
            .map(|a| format!("{}/{}", a.address, a.mask))
            .filter(|a| !a.starts_with("fe80"))
            .collect();
        assert_eq!(addresses, ["10.7.0.2/24", "fd07::2/64"]);
        let routes = g.routes().await;
        let defaults: Vec<&str> = routes
            .iter()
            .filter(|r| r.dest.is_empty())
            .map(|r| r.gateway.as_str())
            .collect();
        assert_eq!(defaults, ["10.7.0.1", "fd07::1"]);
        let mut s = spec(
            &g,
            &[
                "sh",
                "-c",
                "hostname; cat /etc/resolv.conf; grep guest-7 /etc/hosts; cat /run/id; \
                 grep -o '02:00:00:00:09:07.*' /proc/net/arp",
            ],
        );
        s.Mounts
            .push(bind("/run/thaw/etc/resolv.conf", "/etc/resolv.conf", &["rbind"]));
        s.Mounts
            .push(bind("/run/thaw/etc/hosts", "/etc/hosts", &["rbind"]));
        s.Mounts
            .push(bind("/run/machine-id", "/run/id", &["rbind", "ro"]));
        s.Linux.as_mut().unwrap().Namespaces.retain(|n| n.Type != "uts");
        g.create("c", s).await.unwrap();
        g.start("c").await.unwrap();
        let out = String::from_utf8(g.read_all("c", "c", false).await).unwrap();
        let expected = "guest-7\nnameserver 10.7.0.1\n10.7.0.2\tguest-7\nfd07::2\tguest-7\n07070707070707070707070707070707\n\
            02:00:00:00:09:07     *        pod7\n";
        assert_eq!(out, expected);
        g.remove("c").await.unwrap();
    });
}

#[test]
fn the_host_reaches_what_listens_on_localhost_and_is_let_go_where_nothing_does() {
    with_guest(|g| async move {
        let serve = "echo ready; exec busybox nc -l -p 8080 -e echo hello";
        g.create("c", spec(&g, &["sh", "-c", serve])).await.unwrap();
        g.start("c").await.unwrap();
        assert_eq!(g.read("c", "c", 6).await.unwrap(), b"ready\n");
        // It says so just before it listens.
        let said = loop {
            match g.forwarded(8080) {
                said if said.is_empty() => tokio::time::sleep(Duration::from_millis(10)).await,
                said => break said,
            }
        };
        assert_eq!(said, b"hello\n");
        assert_eq!(g.forwarded(9), b"");
        g.remove("c").await.unwrap();
    });
}

const TICKS: &[&str] = &["sh", "-c", "while :; do echo tick; sleep 0.02; done"];

/// What was in the pipe, then silence.
async fn falls_silent(g: &Guest, id: &str, exec: &str) {
    while tokio::time::timeout(Duration::from_millis(300), g.read(id, exec, 65536))
        .await
        .is_ok()
    {}
}

#[test]
fn everything_stands_still_for_a_freeze_and_what_its_user_paused_stays_paused_after_it() {
    with_guest(|mut g| async move {
        for id in ["runs", "paused"] {
            g.create(id, spec(&g, TICKS)).await.unwrap();
            g.start(id).await.unwrap();
        }
        g.create("ended", spec(&g, &["true"])).await.unwrap();
        g.start("ended").await.unwrap();
        assert_eq!(g.wait("ended", "ended").await, 0);
        g.create("waiting", spec(&g, &["echo", "started"])).await.unwrap();
        g.exec("runs", "beside", TICKS, false).await.unwrap();
        g.pause("paused").await.unwrap();

        for stop in 0..2 {
            g.greet(&Greeting::Quiesce);
            g.greet(&Greeting::Quiesce);
            assert!(["runs", "paused", "waiting"].iter().all(|id| g.is_frozen(id)));
            for exec in ["runs", "beside"] {
                falls_silent(&g, "runs", exec).await;
            }
            // Who asks for something new meanwhile waits: it happens afterwards, and once.
            let (again, exec) = (g.connect_again().await, format!("late-{stop}"));
            let request = support::exec_request("runs", &exec, &["echo", "late"]);
            let late = tokio::spawn(async move { again.exec_process(support::context(), &request).await });
            let resumed = tokio::time::timeout(Duration::from_millis(200), g.resume("paused")).await;
            assert!(resumed.is_err(), "nothing is set in motion");
            assert!(!late.is_finished());
            if stop == 0 {
                g.greet(&Greeting::Continue);
            } else {
                assert_eq!(g.becomes(identity(8)).failure, None);
            }
            late.await.unwrap().unwrap();
            assert_eq!(g.read_all("runs", &exec, false).await, b"late\n");
            for exec in ["runs", "beside"] {
                g.read_until("runs", exec, "tick\n").await;
            }
            assert!(!g.is_frozen("runs"));
            // The call that was given up after 200 ms may have been carried out since, as any call may.
            g.reconnect().await;
            g.pause("paused").await.unwrap();
        }
        g.greet(&Greeting::Quiesce);
        g.greet(&Greeting::Continue);
        g.greet(&Greeting::Continue);
        assert!(g.is_frozen("paused") && !g.is_frozen("runs"));
        g.resume("paused").await.unwrap();
        g.read_until("paused", "paused", "tick\n").await;
        g.start("waiting").await.unwrap();
        assert_eq!(g.read_all("waiting", "waiting", false).await, b"started\n");
        for id in ["runs", "paused", "ended", "waiting"] {
            g.remove(id).await.unwrap();
        }
        g.assert_clean().await;
    });
}

#[test]
fn a_second_identity_replaces_the_first_while_containers_run() {
    with_guest(|g| async move {
        let script = "cat; hostname; cat /etc/hostname /run/id";
        let mut s = spec(&g, &["sh", "-c", script]);
        for (source, destination) in [
            ("/run/thaw/etc/hostname", "/etc/hostname"),
            ("/run/machine-id", "/run/id"),
        ] {
            s.Mounts.push(bind(source, destination, &["rbind"]));
        }
        s.Linux.as_mut().unwrap().Namespaces.retain(|n| n.Type != "uts");
        g.create("c", s).await.unwrap();
        g.start("c").await.unwrap();
        for n in [8, 9] {
            let ack = g.becomes(identity(n));
            assert_eq!(ack.failure, None);
            assert!(ack.received <= ack.applied && !ack.test_hooks);
        }
        let eth = g
            .interfaces()
            .await
            .into_iter()
            .find(|i| i.hwAddr.starts_with("02:00"));
        let eth = eth.expect("the interface of the handshake");
        let mut addresses: Vec<String> = eth
            .IPAddresses
            .iter()
            .map(|a| format!("{}/{}", a.address, a.mask))
            .filter(|a| !a.starts_with("fe80"))
            .collect();
        addresses.sort();
        assert_eq!(
            (eth.hwAddr.as_str(), addresses.join(" ")),
            ("02:00:00:00:00:09", "10.9.0.2/24 fd09::2/64".into())
        );
        let routes = g.routes().await;
        let gateways: Vec<&str> = routes
            .iter()
            .map(|r| r.gateway.as_str())
            .filter(|g| !g.is_empty())
            .collect();
        assert_eq!(gateways, ["10.9.0.1", "fd09::1"], "nothing is left of the others");
        g.close_stdin("c", "c").await.unwrap();
        let out = String::from_utf8(g.read_all("c", "c", false).await).unwrap();
        assert_eq!(out, format!("guest-9\nguest-9\n{}\n", "09".repeat(16)));

        // One that cannot be applied is refused by name, and the API goes on.
        let mut bad = identity(10);
        bad.hostname = "not a name".into();
        let failure = g.becomes(bad).failure.unwrap();
        assert!(failure.contains("not a name"), "{failure}");
        let mut bad = identity(10);
        bad.cpus = 255;
        let failure = g.becomes(bad).failure.unwrap();
        assert!(
            failure.contains("of 255 CPUs") && failure.contains("cpu254"),
            "{failure}"
        );
        let mut alone = identity(10);
        alone.network = None;
        assert_eq!(g.becomes(alone).failure, None);
        assert!(g.routes().await.iter().all(|r| r.gateway.is_empty()));
        g.remove("c").await.unwrap();
        g.assert_clean().await;
    });
}

#[test]
fn containers_called_as_the_guest_was_are_renamed_with_it_and_others_are_not() {
    with_guest(|g| async move {
        assert_eq!(g.becomes(identity(8)).failure, None);
        for (id, hostname) in [("same", "guest-8"), ("other", "its-own")] {
            let mut s = spec(&g, &["sh", "-c", "cat; hostname"]);
            s.Hostname = hostname.into();
            g.create(id, s).await.unwrap();
            g.start(id).await.unwrap();
        }
        assert_eq!(g.becomes(identity(9)).failure, None);
        for (id, hostname) in [("same", "guest-9\n"), ("other", "its-own\n")] {
            g.close_stdin(id, id).await.unwrap();
            let out = String::from_utf8(g.read_all(id, id, false).await).unwrap();
            assert_eq!(out, hostname, "{id}");
        }
    });
}

#[test]
fn output_survives_the_connection_it_was_sent_on() {
    with_guest(|mut g| async move {
        g.create("c", spec(&g, &["sh", "-c", "echo 1234; cat; echo end"]))
            .await
            .unwrap();
        g.start("c").await.unwrap();
        g.read_until("c", "c", "1234\n").await;
        // Perhaps it never arrived: it is told again.
        g.reconnect().await;
        assert_eq!(g.read("c", "c", 2).await.unwrap(), b"12");
        g.reconnect().await;
        assert_eq!(g.read("c", "c", 100).await.unwrap(), b"1234\n");
        // A read that waits on a connection that is lost takes nothing with it.
        let waiting = tokio::time::timeout(Duration::from_millis(100), g.read("c", "c", 100)).await;
        assert!(waiting.is_err());
        g.reconnect().await;
        let (read, written) = tokio::join!(g.read("c", "c", 100), async {
            let writer = g.connect_again().await;
            let request = support::write_request("c", b"typed\n");
            writer.write_stdin(support::context(), &request).await
        });
        assert_eq!((read.unwrap(), written.unwrap().len), (b"typed\n".to_vec(), 6));
        g.close_stdin("c", "c").await.unwrap();
        assert_eq!(g.wait("c", "c").await, 0);
        assert_eq!(g.read("c", "c", 100).await.unwrap(), b"end\n");
        g.reconnect().await;
        assert_eq!(g.read_all("c", "c", false).await, b"end\n");
        g.reconnect().await;
        assert_eq!(
            g.read_all("c", "c", false).await,
            b"",
            "it was asked for more: it had arrived"
        );
        g.remove("c").await.unwrap();
    });
}

#[test]
fn hooks_and_unsupported_calls_are_refused_as_such() {
    with_guest(|g| async move {
        let mut s = spec(&g, &["true"]);
        let mut hooks = oci::Hooks::new();
        hooks.Prestart.push(oci::Hook {
            Path: "/bin/hook".into(),
            ..Default::default()
        });
        s.Hooks = MessageField::some(hooks);
        let e = g.create("c", s).await.unwrap_err();
        assert!(
            code_of(&e) == Code::UNIMPLEMENTED && e.to_string().contains("hook"),
            "{e}"
        );
        let e = g
            .client
            .set_policy(support::context(), &SetPolicyRequest::new())
            .await
            .unwrap_err();
        assert_eq!(code_of(&e), Code::UNIMPLEMENTED);
        g.assert_clean().await;
    });
}

#[test]
fn destroying_the_sandbox_leaves_nothing() {
    with_guest(|g| async move {
        for id in ["a", "b"] {
            g.create(id, spec(&g, &["sh", "-c", "sleep 1000 & sleep 1000"]))
                .await
                .unwrap();
            g.start(id).await.unwrap();
        }
        g.create("never-started", spec(&g, &["true"])).await.unwrap();
        g.client
            .destroy_sandbox(support::context(), &DestroySandboxRequest::new())
            .await
            .unwrap();
        g.assert_clean().await;
        wait_gone(&g).await;
    });
}
