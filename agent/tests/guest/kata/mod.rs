//! The calls that Kata's runtime makes in a pod's life, in their order and as they are on the wire. Field
//! numbers are those that Kata Containers 3.15.0 publishes.

mod wire;

use std::time::{SystemTime, UNIX_EPOCH};

use self::wire::{Connection, Message, message};
use super::support::Guest;
use super::with_guest;

const SHM: &str = "/run/kata-containers/sandbox/shm";
const RESOLV_CONF: &str = "/run/kata-containers/shared/containers/c-resolv.conf";
const ROOT: &str = "/run/kata-containers/c/rootfs";
/// The runtime's name of the interface whose address it knows: the guest has both ends.
const LINK: &str = "net0";
const UNIMPLEMENTED: u64 = 12;
const OUT_OF_RANGE: u64 = 11;

fn mount(destination: &str, source: &str, kind: &str, options: &[&str]) -> Message {
    message()
        .text(1, destination)
        .text(2, source)
        .text(3, kind)
        .texts(4, options)
}

fn storage(driver: &str, source: &str, fstype: &str, options: &[&str], mount_point: &str) -> Message {
    message()
        .text(1, driver)
        .text(3, source)
        .text(4, fstype)
        .texts(5, options)
        .text(6, mount_point)
}

fn process(terminal: bool, args: &[&str]) -> Message {
    let capabilities = ["CAP_CHOWN", "CAP_KILL", "CAP_SETUID"];
    message()
        .number(1, terminal.into())
        .message(3, message().number(1, 0).number(2, 0))
        .texts(4, args)
        .texts(5, &["PATH=/bin", "TERM=xterm"])
        .text(6, "/")
        .message(
            7,
            message()
                .texts(1, &capabilities)
                .texts(2, &capabilities)
                .texts(4, &capabilities),
        )
        .message(
            8,
            message().text(1, "RLIMIT_NOFILE").number(2, 1024).number(3, 512),
        )
        .number(9, 1)
}

fn specification(cgroup: &str, args: &[&str]) -> Message {
    let own = ["ipc", "uts", "mount", "pid"];
    let linux = message()
        .message(4, message().message(1, message().number(1, 0).text(5, "rwm")))
        .text(5, cgroup);
    let linux = own
        .iter()
        .fold(linux, |linux, kind| linux.message(6, message().text(1, kind)));
    let linux = linux.texts(10, &["/proc/kcore"]);
    let mounts = [
        mount("/proc", "proc", "proc", &["nosuid", "noexec", "nodev"]),
        mount("/dev", "tmpfs", "tmpfs", &["nosuid", "mode=755", "size=65536k"]),
        mount("/dev/pts", "devpts", "devpts", &["newinstance", "ptmxmode=0666"]),
        mount("/dev/shm", SHM, "bind", &["rbind"]),
        mount("/etc/resolv.conf", RESOLV_CONF, "bind", &["rbind", "ro"]),
    ];
    let spec = message()
        .text(1, "1.1.0")
        .message(2, process(false, args))
        .message(3, message().text(1, ROOT));
    mounts
        .into_iter()
        .fold(spec, |spec, mount| spec.message(5, mount))
        .message(
            7,
            message()
                .text(1, "io.katacontainers.pkg.oci.container_type")
                .text(2, "pod_container"),
        )
        .message(8, linux)
}

/// A process of the container.
fn of(exec: &str) -> Message {
    message().text(1, "c").text(2, exec)
}

/// Reads its output until it contains `text`.
fn read_until(agent: &mut Connection, exec: &str, text: &str) {
    let mut said = String::new();
    while !said.contains(text) {
        let came = agent.call("ReadStdout", of(exec).number(3, 4096));
        said.push_str(&came.unwrap_or_else(|e| panic!("{e:?} after {said:?}")).text(1));
    }
}

/// The guest before its first container.
fn sandbox(agent: &mut Connection) {
    let check = agent.begin("grpc.Health", "Check", message());
    assert_eq!(agent.finish(check).unwrap().number(1), 1, "serving");
    let version = agent.begin("grpc.Health", "Version", message());
    assert_eq!(agent.finish(version).unwrap().text(1), "3.15.0");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let time = message()
        .number(1, now.as_secs())
        .number(2, now.subsec_micros().into());
    agent.call("SetGuestDateTime", time).unwrap();

    let interface = message()
        .text(1, LINK)
        .text(2, LINK)
        .message(3, message().number(1, 0).text(2, "10.7.0.9").text(3, "24"))
        .number(4, 1400)
        .text(5, "02:00:00:00:00:07")
        .text(6, "02/00")
        .text(7, "veth");
    let told = agent
        .call("UpdateInterface", message().message(1, interface))
        .unwrap();
    assert_eq!(told.text(2), LINK);
    let route = message().text(2, "10.7.0.1").text(3, LINK);
    let routes = message().message(1, message().message(1, route));
    assert!(agent.call("UpdateRoutes", routes).unwrap().has(1));
    let neighbour = message()
        .message(1, message().text(2, "10.7.0.1"))
        .text(2, LINK)
        .text(3, "02:00:00:00:00:01")
        .number(4, 128);
    let neighbours = message().message(1, message().message(1, neighbour));
    agent.call("AddARPNeighbors", neighbours).unwrap();

    let shm = storage("ephemeral", "shm", "tmpfs", &["mode=1777", "size=1m"], SHM);
    let sandbox = message()
        .text(1, "kata-pod")
        .text(2, "10.7.0.1")
        .message(3, shm)
        .text(5, "sandbox");
    agent.call("CreateSandbox", sandbox).unwrap();
    let asked = message().number(1, 1).number(2, 1);
    let details = agent.call("GetGuestDetails", asked).unwrap();
    assert_eq!(details.message(2).text(1), "3.15.0");
    assert_eq!(details.message(2).number(2), 1, "it is process 1");
}

fn container(agent: &mut Connection, g: &Guest) {
    let text = b"nameserver 10.7.0.1\n";
    let file = message()
        .text(1, RESOLV_CONF)
        .number(2, text.len() as u64)
        .number(3, 0o100_644)
        .number(4, 0o755)
        .bytes(8, text);
    agent.call("CopyFile", file).unwrap();
    let root = storage("bind", g.rootfs().to_str().unwrap(), "bind", &[], ROOT);
    let script = "cat /etc/resolv.conf; hostname; cat; exit 3";
    let create = of("c")
        .message(3, message().text(1, "0").text(2, "0"))
        .message(5, root)
        .message(6, specification(&g.cgroup_path("c"), &["sh", "-c", script]));
    agent.call("CreateContainer", create).unwrap();
}

/// A process in a terminal, killed.
fn exec(agent: &mut Connection) {
    agent
        .call("ExecProcess", of("e").message(4, process(true, &["sh"])))
        .unwrap();
    agent
        .call("TtyWinResize", of("e").number(3, 33).number(4, 77))
        .unwrap();
    agent
        .call("WriteStdin", of("e").bytes(3, b"stty size\n"))
        .unwrap();
    read_until(agent, "e", "33 77");
    let ended = agent.begin("grpc.AgentService", "WaitProcess", of("e"));
    agent.call("SignalProcess", of("e").number(3, 9)).unwrap();
    assert_eq!(agent.finish(ended).unwrap().number(1), 137);
}

#[test]
fn kata_s_runtime_finds_its_agent() {
    with_guest(|g| async move {
        let mut agent = Connection::to(&g.dir().join("1024"));
        sandbox(&mut agent);
        container(&mut agent, &g);
        // These exist as long as the pod.
        let out_of_memory = agent.begin("grpc.AgentService", "GetOOMEvent", message());
        let ended = agent.begin("grpc.AgentService", "WaitProcess", of("c"));
        agent.call("StartContainer", message().text(1, "c")).unwrap();
        let cpus = message().number(1, 1).number(2, 1).number(3, 1);
        agent.call("OnlineCPUMem", cpus).unwrap();
        read_until(&mut agent, "c", "nameserver 10.7.0.1\nkata-pod\n");
        let written = agent.call("WriteStdin", of("c").bytes(3, b"typed\n")).unwrap();
        assert_eq!(written.number(1), 6);
        read_until(&mut agent, "c", "typed\n");
        exec(&mut agent);

        assert!(
            agent
                .call("StatsContainer", message().text(1, "c"))
                .unwrap()
                .has(1)
        );
        for method in ["PauseContainer", "ResumeContainer"] {
            agent.call(method, message().text(1, "c")).unwrap();
        }
        let devices = message().message(1, message().number(1, 1).text(2, "c").text(5, "rwm"));
        agent
            .call("UpdateContainer", message().text(1, "c").message(2, devices))
            .unwrap();
        let larger = storage("ephemeral", "shm", "tmpfs", &["size=2m"], SHM);
        agent
            .call("UpdateEphemeralMounts", message().message(1, larger))
            .unwrap();
        let volume = agent.call("GetVolumeStats", message().text(1, SHM)).unwrap();
        assert!(volume.message(1).has(2), "{volume:?}");
        agent
            .call("ReseedRandomDev", message().bytes(2, &[7; 32]))
            .unwrap();
        assert!(agent.call("ListInterfaces", message()).unwrap().has(1));
        assert!(agent.call("ListRoutes", message()).unwrap().has(1));
        let metrics = agent.call("GetMetrics", message()).unwrap().text(1);
        assert!(metrics.contains("thaw_guest_load1"), "{metrics}");

        agent.call("CloseStdin", of("c")).unwrap();
        assert_eq!(agent.finish(ended).unwrap().number(1), 3);
        let (code, said) = agent.call("ReadStdout", of("c").number(3, 16)).unwrap_err();
        assert_eq!((code, said.as_str()), (OUT_OF_RANGE, "eof"));
        agent
            .call("RemoveContainer", message().text(1, "c").number(2, 10))
            .unwrap();
        agent.call("DestroySandbox", message()).unwrap();
        g.assert_clean().await;
        drop(agent);
        let _ = out_of_memory;
    });
}

#[test]
fn unsupported_calls_return_a_reason() {
    with_guest(|g| async move {
        let mut agent = Connection::to(&g.dir().join("1024"));
        for (method, request) in [
            ("RemoveStaleVirtiofsShareMounts", message()),
            ("GetIPTables", message().number(1, 1)),
            ("SetIPTables", message().number(1, 1).bytes(2, b"*filter")),
            ("MemAgentMemcgSet", message().number(1, 1).number(3, 50)),
            ("MemAgentCompactSet", message().number(1, 0).number(5, 60)),
            ("MemHotplugByProbe", message().bytes(1, &[1, 2])),
            ("AddSwap", message().bytes(1, &[3])),
            ("ResizeVolume", message().text(1, "/v").number(2, 1 << 30)),
            ("SetPolicy", message().text(1, "package agent_policy")),
        ] {
            let (code, said) = agent.call(method, request).unwrap_err();
            assert!(
                code == UNIMPLEMENTED && said.len() > 10,
                "{method}: {code} {said:?}"
            );
        }
    });
}
