//! A container's root, storages and limits.

use super::*;

#[test]
fn root_masked_and_read_only_paths_are_applied() {
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
fn storages_are_mounted_before_the_root_and_removed() {
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
        // A failed creation leaves none mounted.
        let mut broken = storages;
        broken[2].source = "/no/such/source".into();
        assert!(g.create_with("c", s, broken).await.is_err());
        g.assert_clean().await;
    });
}

#[test]
fn paused_container_resumes() {
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
            thaw_test_skip::skip("the limits themselves: the memory controller is not on cgroup v2 here");
            let e = made.unwrap_err();
            assert_eq!(code_of(&e), Code::UNIMPLEMENTED);
            assert!(e.to_string().contains("memory.max"), "{e}");
        }
        g.assert_clean().await;
    });
}

#[test]
fn oom_kill_is_reported_by_code_and_event() {
    with_guest(|g| async move {
        if !g.has_controller("memory") || !g.has_controller("pids") {
            thaw_test_skip::skip("the memory and pids controllers are not on cgroup v2 here");
            return;
        }
        // A shell variable of 100 MB.
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
