//! thawd may be killed and started again under a running sandbox, which notices nothing.

#![allow(clippy::unwrap_used)]

use rustix::process::Signal;
use serde_json::{Value, json};
use thaw_e2e::api::ask;
use thaw_e2e::home::Home;
use thaw_e2e::{image, pid_of, run, wait_for_line};

#[test]
fn a_sandbox_outlives_its_thawd_and_is_taken_over_by_the_next() {
    let home = Home::new();
    let mut first = home.thawd(&[]);
    let busybox = image("busybox");
    let script =
        "echo up; while [ ! -e /tmp/done ]; do sleep 0.2; done; cat /etc/passwd >/dev/null && echo finished";
    let mut sandbox = home
        .thaw(&["run", "--name", "survivor", &busybox, "sh", "-c", script])
        .spawn()
        .unwrap();
    let mut output = wait_for_line(&mut sandbox, "up");

    first.kill().unwrap();
    first.wait().unwrap();
    let without = run(&mut home.thaw(&["exec", "survivor", "ls", "/bin/sh"]));
    assert!(without.status.success(), "exec needs no thawd: {without:?}");

    let mut second = home.thawd(&[]);
    let listed = run(&mut home.thaw(&["--json", "ps"])).ok();
    assert!(
        listed.contains("survivor") && listed.contains("running"),
        "{listed}"
    );
    run(&mut home.thaw(&["exec", "survivor", "touch", "/tmp/done"])).ok();
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut output, &mut rest).unwrap();
    assert_eq!(rest, "finished\n");
    assert!(sandbox.wait().unwrap().success());

    let listed = run(&mut home.thaw(&["--json", "ps"])).ok();
    assert!(!listed.contains("survivor"), "{listed}");
    rustix::process::kill_process(pid_of(second.id() as i32), Signal::TERM).unwrap();
    assert!(second.wait().unwrap().success());
    assert_eq!(
        std::fs::read_dir(home.run()).unwrap().count(),
        0,
        "nothing of either thawd remains"
    );
}

#[test]
fn parked_machines_are_claimed_and_unclaimed_end_with_thawd() {
    let home = Home::new();
    let mut first = home.thawd(&[]);
    let busybox = image("busybox");
    let start = || {
        let started = run(&mut home.thaw(&["run", "--rm", "--timings", &busybox, "true"]));
        assert_eq!(started.code(), 0, "{started:?}");
        started.stderr
    };
    // From the second use of a shape on, machines of it are made beside the starts that would need one.
    let was_waiting = |said: &String| said.contains("a thaw-vmm was waiting in its pool");
    let mut said = start();
    assert!(!was_waiting(&said), "{said}");
    // How many starts that takes depends on the machine.
    let since = std::time::Instant::now();
    while !was_waiting(&said) {
        assert!(since.elapsed().as_secs() < 120, "{said}");
        said = start();
    }

    // Killed, it leaves those that wait to its successor, which removes them.
    first.kill().unwrap();
    first.wait().unwrap();
    let mut second = home.thawd(&[]);
    assert!(!was_waiting(&start()));
    rustix::process::kill_process(pid_of(second.id() as i32), Signal::TERM).unwrap();
    assert!(second.wait().unwrap().success());
    assert_eq!(std::fs::read_dir(home.run()).unwrap().count(), 0);
}

/// What `thaw ps -a` has of a sandbox, once it is listed as failed.
fn failed(home: &Home, name: &str) -> Value {
    let since = std::time::Instant::now();
    loop {
        let listed = run(&mut home.thaw(&["--json", "ps", "-a"])).ok();
        let listed: Vec<Value> = serde_json::from_str(&listed).unwrap();
        let found = listed
            .into_iter()
            .find(|s| s["name"] == name && s["state"] == "failed");
        if let Some(found) = found {
            return found;
        }
        assert!(since.elapsed().as_secs() < 60, "{name} is not listed as failed");
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}

/// Kills the VMM of a sandbox by name.
fn kill_vmm(home: &Home, name: &str) {
    let listed = run(&mut home.thaw(&["--json", "ps"])).ok();
    let listed: Vec<Value> = serde_json::from_str(&listed).unwrap();
    let found = listed.iter().find(|s| s["name"] == name).unwrap();
    let vmm = found["vmm_pid"].as_i64().unwrap() as i32;
    rustix::process::kill_process(pid_of(vmm), Signal::KILL).unwrap();
}

#[test]
fn a_sandbox_that_fails_is_told_and_listed_until_removed() {
    let home = Home::new();
    let mut thawd = home.thawd(&[]);
    let busybox = image("busybox");
    let start = |name: &str| {
        run(&mut home.thaw(&["run", "-d", "--name", name, &busybox, "sleep", "1000"])).ok();
    };
    start("kept");
    kill_vmm(&home, "kept");
    let kept = failed(&home, "kept");
    assert_eq!(kept["failure"]["reason"], "signal", "{kept}");
    // A thawed guest has written nothing to its console; its VMM has logged its start.
    assert!(!kept["failure"]["log"].as_array().unwrap().is_empty(), "{kept}");

    // Who ran it is told, and what is left stays listed.
    let script = "echo up; exec sleep 1000";
    let mut attended = home
        .thaw(&["run", "--name", "attended", &busybox, "sh", "-c", script])
        .spawn()
        .unwrap();
    let output = wait_for_line(&mut attended, "up");
    kill_vmm(&home, "attended");
    assert!(!attended.wait().unwrap().success());
    drop(output);
    failed(&home, "attended");

    // While there is no thawd: its keeper goes too, and the next thawd tells.
    start("alone");
    thawd.kill().unwrap();
    thawd.wait().unwrap();
    kill_vmm(&home, "alone");
    let mut next = home.thawd(&[]);
    let alone = failed(&home, "alone");
    assert_eq!(alone["failure"]["reason"], "unknown", "{alone}");

    let table = run(&mut home.thaw(&["ps", "-a"])).ok();
    assert!(
        table.contains("ago: signal") && table.contains("ago: unknown"),
        "{table}"
    );
    assert_eq!(run(&mut home.thaw(&["ps", "-q"])).ok(), "");
    let ids = run(&mut home.thaw(&["ps", "-a", "-q"])).ok();
    let ids: Vec<&str> = ids.lines().collect();
    assert_eq!(ids.len(), 3, "{ids:?}");
    run(&mut home.thaw(&[&["rm"], &ids[..]].concat())).ok();
    assert_eq!(run(&mut home.thaw(&["ps", "-a", "-q"])).ok(), "");
    rustix::process::kill_process(pid_of(next.id() as i32), Signal::TERM).unwrap();
    assert!(next.wait().unwrap().success());
    assert_eq!(std::fs::read_dir(home.run()).unwrap().count(), 0);
}

#[test]
fn a_container_thawd_starts_is_answered_for_when_it_is_ready() {
    let home = Home::new();
    let mut thawd = home.thawd(&[]);
    let create = |name: &str, script: &str, probe: Value| {
        let asked = json!({"image": image("busybox"), "cpus": 1, "memory_mib": 128, "name": name,
            "container": {"command": ["sh", "-c", script], "readiness": probe}});
        ask(&home, "POST", "/v1/sandboxes", &asked.to_string())
    };
    // What it writes before is more than a pipe holds.
    let serve = "mkdir /tmp/w; seq 1 40000; echo ok >/tmp/w/up; exec httpd -f -p 8080 -h /tmp/w";
    let (head, made) = create("web", serve, json!({"http": {"port": 8080, "path": "/up"}}));
    assert!(head.starts_with("http/1.1 201"), "{head} {made}");
    assert!(head.contains("ready;dur="), "{head}");
    assert_eq!(made["sandbox"]["readiness"], "ready", "{made}");

    let probe = json!({"tcp": {"port": 8080}, "timeout_s": 300});
    let (head, problem) = create("ends", "echo broken; exit 3", probe);
    assert!(head.starts_with("http/1.1 422"), "{head} {problem}");
    assert_eq!(
        (&problem["code"], &problem["context"]),
        (&json!("not-ready"), &json!(["broken"]))
    );
    let (_, listed) = ask(&home, "GET", "/v1/sandboxes", "");
    let names: Vec<_> = listed["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| &s["name"])
        .collect();
    assert_eq!(names, ["web"]);

    // The next thawd knows that it is ready.
    thawd.kill().unwrap();
    thawd.wait().unwrap();
    let mut second = home.thawd(&[]);
    let (_, shown) = ask(&home, "GET", "/v1/sandboxes/web", "");
    assert_eq!(shown["readiness"], "ready", "{shown}");
    ask(&home, "DELETE", "/v1/sandboxes/web", "");
    rustix::process::kill_process(pid_of(second.id() as i32), Signal::TERM).unwrap();
    assert!(second.wait().unwrap().success());
    assert_eq!(std::fs::read_dir(home.run()).unwrap().count(), 0);
}

#[test]
fn settings_of_a_request_reach_its_container() {
    let home = Home::new();
    let mut thawd = home.thawd(&[]);
    let script = "df -k /cache /dev/shm | awk 'NR>1 {print $2}'; ulimit -n; cat /proc/sys/net/core/somaxconn; \
                  grep -c 192.0.2.7 /etc/hosts; cat /etc/resolv.conf; test -c /dev/fuse; mkdir /d 2>/dev/null || echo refused; \
                  grep NoNewPrivs /proc/self/status | cut -f 2; grep -c ^[0-9] /proc/1/stat; touch /tmp/done; sleep 100000";
    let profile = r#"{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO"}]}"#;
    let settings = json!({"tmpfs": ["/cache:size=1m"], "shm_bytes": 3 << 20, "ulimits": ["nofile=77"],
        "sysctls": {"net.core.somaxconn": "123"}, "devices": ["/dev/fuse"], "no_new_privileges": true, "init": true,
        "extra_hosts": ["db:192.0.2.7"], "dns": ["192.0.2.53"], "dns_search": ["a.example"], "cap_add": ["NET_ADMIN"],
        "seccomp_profile": profile});
    let asked = |settings: &Value| {
        let container = json!({"command": ["sh", "-c", script], "settings": settings});
        json!({"image": image("busybox"), "cpus": 1, "memory_mib": 128, "name": "set", "container": container})
    };
    let (head, made) = ask(&home, "POST", "/v1/sandboxes", &asked(&settings).to_string());
    assert!(head.starts_with("http/1.1 201"), "{head} {made}");
    let done = "while [ ! -e /tmp/done ]; do sleep 0.1; done; grep CapBnd /proc/self/status | cut -f 2";
    let bounding = run(&mut home.thaw(&["exec", "set", "sh", "-c", done])).ok();
    // Docker's default capabilities and CAP_NET_ADMIN, number 12.
    assert_eq!(bounding, "00000000a80435fb\n");
    let expected = "1024\n3072\n77\n123\n1\nnameserver 192.0.2.53\nsearch a.example\nrefused\n1\n1\n";
    // thawd may get the last of it after the exec's.
    let since = std::time::Instant::now();
    loop {
        let written = run(&mut home.thaw(&["logs", "set"])).ok();
        if written == expected {
            break;
        }
        assert!(
            expected.starts_with(&written) && since.elapsed().as_secs() < 60,
            "{written}"
        );
    }
    let (head, problem) = ask(
        &home,
        "POST",
        "/v1/sandboxes",
        &asked(&json!({"ulimits": ["files=1"]})).to_string(),
    );
    assert!(head.starts_with("http/1.1 422"), "{head} {problem}");
    let detail = problem["detail"].as_str().unwrap();
    assert!(
        detail.contains("container.settings.ulimits: \"files\""),
        "{detail}"
    );
    ask(&home, "DELETE", "/v1/sandboxes/set", "");
    rustix::process::kill_process(pid_of(thawd.id() as i32), Signal::TERM).unwrap();
    assert!(thawd.wait().unwrap().success());
}

/// What a file of a sandbox's cgroup says.
fn cgroup(home: &Home, id: &str, file: &str) -> String {
    let record = std::fs::read(home.run().join("sandboxes").join(id).join("record.json")).unwrap();
    let record: Value = serde_json::from_slice(&record).unwrap();
    let name = record["cgroup"].as_str().unwrap();
    let path = std::path::Path::new("/sys/fs/cgroup/thaw").join(name).join(file);
    let text = std::fs::read_to_string(&path);
    text.unwrap_or_else(|e| panic!("{}: {e}", path.display()))
        .trim()
        .to_owned()
}

#[test]
fn a_guest_out_of_memory_ends_its_container_and_not_its_vmm() {
    let home = Home::new();
    let mut thawd = home.thawd(&[]);
    let asked = json!({"image": image("busybox"), "cpus": 1, "memory_mib": 256, "name": "hog", "cpu_limit_millis": 1500,
        "container": {"command": ["tail", "/dev/zero"], "on_exit": "keep"}});
    let (head, made) = ask(&home, "POST", "/v1/sandboxes", &asked.to_string());
    assert!(head.starts_with("http/1.1 201"), "{head} {made}");
    let id = made["sandbox"]["id"].as_str().unwrap();
    let vmm = made["sandbox"]["vmm_pid"].as_i64().unwrap();
    let mib = 1u64 << 20;
    let limit: u64 = cgroup(&home, id, "memory.max").parse().unwrap();
    assert!(limit >= (256 + 8 + 128) * mib, "{limit}");
    assert_eq!(cgroup(&home, id, "memory.oom.group"), "1");
    assert_eq!(cgroup(&home, id, "pids.max"), "256");
    assert_eq!(cgroup(&home, id, "cpu.max"), "150000 100000");
    let began = std::time::Instant::now();
    let ended = loop {
        let (_, shown) = ask(&home, "GET", "/v1/sandboxes/hog", "");
        if shown["state"] != "running" {
            break shown;
        }
        // The guest touches all its memory first, which takes an emulated processor a minute or two.
        assert!(began.elapsed().as_secs() < 300, "{shown}");
        std::thread::sleep(std::time::Duration::from_millis(200));
    };
    assert_eq!(
        (&ended["state"], &ended["exit_code"]),
        (&json!("exited"), &json!(137)),
        "{ended}"
    );
    assert_eq!(ended["vmm_pid"].as_i64(), Some(vmm));
    let shown = [
        "events",
        "--since",
        "10m",
        "--until",
        "0s",
        "--format",
        "{{.Action}}",
    ];
    let shown = run(&mut home.thaw(&shown)).ok();
    assert!(shown.ends_with("start\noom\ndie\n"), "{shown}");
    let events = cgroup(&home, id, "memory.events");
    for event in ["oom 0", "oom_kill 0"] {
        assert!(events.lines().any(|line| line == event), "{events}");
    }
    // Its peak: the guest gives memory back once the container has ended.
    let taken: u64 = cgroup(&home, id, "memory.peak").parse().unwrap();
    assert!(taken > 128 * mib, "the guest did not touch its memory: {taken}");
    ask(&home, "DELETE", "/v1/sandboxes/hog", "");
    rustix::process::kill_process(pid_of(thawd.id() as i32), Signal::TERM).unwrap();
    assert!(thawd.wait().unwrap().success());
}

#[test]
fn disk_budget_refuses_excess_and_counts_adopted_sandboxes() {
    let home = Home::new();
    let config = home.scratch("config").join("thawd.toml");
    std::fs::write(&config, "[disk]\nlimit = \"1g\"\n").unwrap();
    let create = |name: &str, disk_mib: u32| {
        let asked = json!({"image": image("busybox"), "cpus": 1, "memory_mib": 128, "disk_mib": disk_mib, "name": name,
            "container": {"command": ["sleep", "1000000"]}});
        ask(&home, "POST", "/v1/sandboxes", &asked.to_string())
    };
    let mut first = home.thawd_with(&[], &[("THAW_CONFIG", config.as_os_str())]);
    let (head, made) = create("one", 768);
    assert!(head.starts_with("http/1.1 201"), "{head} {made}");
    let (head, problem) = create("two", 512);
    assert!(head.starts_with("http/1.1 507"), "{head} {problem}");
    assert_eq!(problem["code"], "disk-budget");
    first.kill().unwrap();
    first.wait().unwrap();
    let mut second = home.thawd_with(&[], &[("THAW_CONFIG", config.as_os_str())]);
    let (head, problem) = create("two", 512);
    assert!(head.starts_with("http/1.1 507"), "{head} {problem}");
    // The snapshot has room, and then counts.
    let place = home.scratch("snapshots").join("s");
    let frozen = json!({"directory": place});
    let (head, said) = ask(&home, "POST", "/v1/sandboxes/one/freeze", &frozen.to_string());
    assert!(
        head.starts_with("http/1.1 200") || head.starts_with("http/1.1 201"),
        "{head} {said}"
    );
    ask(&home, "DELETE", "/v1/sandboxes/one", "");
    let (head, problem) = create("two", 1020);
    assert!(head.starts_with("http/1.1 507"), "{head} {problem}");
    std::fs::remove_dir_all(&place).unwrap();
    let (head, made) = create("two", 1020);
    assert!(head.starts_with("http/1.1 201"), "{head} {made}");
    ask(&home, "DELETE", "/v1/sandboxes/two", "");
    rustix::process::kill_process(pid_of(second.id() as i32), Signal::TERM).unwrap();
    assert!(second.wait().unwrap().success());
}

/// A warmed application, thawed often enough that machines are parked with it: each clone goes on from the freeze with a disk, a name and
/// randomness of its own, and reaches its gateway.
#[test]
fn clones_of_a_snapshot_thaw_in_machines_parked_with_it() {
    let home = Home::new();
    let config = home.scratch("config").join("thawd.toml");
    std::fs::write(&config, "[pools.parked]\neach = { low = 1, high = 2 }\n").unwrap();
    let mut thawd = home.thawd_with(&[], &[("THAW_CONFIG", config.as_os_str())]);
    let made = json!({"image": image("busybox"), "cpus": 1, "memory_mib": 128, "name": "warm",
        "container": {"command": ["sh", "-c", "echo warmed >/state; exec sleep 1000000"]}});
    let (head, made) = ask(&home, "POST", "/v1/sandboxes", &made.to_string());
    assert!(head.starts_with("http/1.1 201"), "{head} {made}");
    let within = |name: &str, script: &str| run(&mut home.thaw(&["exec", name, "sh", "-c", script])).ok();
    while run(&mut home.thaw(&["exec", "warm", "cat", "/state"])).stdout != "warmed\n" {}
    let place = home.scratch("snapshots").join("s");
    let frozen = json!({"directory": place});
    let (head, said) = ask(&home, "POST", "/v1/sandboxes/warm/freeze", &frozen.to_string());
    assert!(head.starts_with("http/1.1 20"), "{head} {said}");
    let mut parked = Vec::new();
    let mut seen = std::collections::BTreeSet::new();
    let own = "head -c 16 /dev/urandom | od -An -tx1; hostname";
    let gateway = "ping -c 1 -W 10 $(ip route | sed -n 's/^default via \\([^ ]*\\).*/\\1/p') >/dev/null && echo reached";
    for number in 0..60 {
        let name = format!("clone-{number}");
        let asked = json!({"directory": place, "name": name});
        let (head, made) = ask(&home, "POST", "/v1/thaws", &asked.to_string());
        assert!(head.starts_with("http/1.1 201"), "{head} {made}");
        let reasons = made["account"]["reasons"].as_array().unwrap();
        if !reasons.iter().any(|reason| reason["code"] == "no-parked-vm") {
            parked.push(name.clone());
        }
        assert_eq!(
            within(&name, "cat /state"),
            "warmed\n",
            "its disk is the frozen one"
        );
        within(&name, &format!("echo {name} >/state"));
        assert_eq!(within(&name, "cat /state"), format!("{name}\n"));
        for own in within(&name, own).lines() {
            assert!(seen.insert(own.to_owned()), "{own} is another clone's too");
        }
        assert_eq!(within(&name, gateway), "reached\n");
        if parked.len() == 3 {
            break;
        }
    }
    assert_eq!(parked.len(), 3, "no machines were parked with the snapshot");
    assert_eq!(within("warm", "cat /state"), "warmed\n");
    let (_, listed) = ask(&home, "GET", "/v1/sandboxes", "");
    for sandbox in listed["items"].as_array().unwrap() {
        ask(
            &home,
            "DELETE",
            &format!("/v1/sandboxes/{}", sandbox["id"].as_str().unwrap()),
            "",
        );
    }
    rustix::process::kill_process(pid_of(thawd.id() as i32), Signal::TERM).unwrap();
    assert!(thawd.wait().unwrap().success());
}
