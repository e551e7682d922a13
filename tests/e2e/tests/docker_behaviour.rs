//! What a `docker run` user expects of exit codes, streams, terminals, signals and flags.

#![allow(clippy::unwrap_used)]

use std::process::Stdio;

use rustix::process::Signal;
use thaw_e2e::terminal::Terminal;
use thaw_e2e::{image, pid_of, run, run_with_input, thaw, wait_for_line};

/// Says how many zombies there are: each second, until there are none, or for the tenth time. The first second is for the orphans' ends.
const ZOMBIES: &str = "for second in 1 2 3 4 5 6 7 8 9 10; do sleep 1; \
                       n=$(grep -l '^State:.Z' /proc/[0-9]*/status | wc -l); [ $n != 0 ] || break; done; echo $n";

fn shell(flags: &[&str], script: &str) -> thaw_e2e::Outcome {
    let busybox = image("busybox");
    let args = [&["run", "--rm"], flags, &[&busybox, "sh", "-c", script]].concat();
    run(&mut thaw(&args))
}

#[test]
fn exit_codes_pass_through() {
    for code in [0, 1, 42, 255] {
        assert_eq!(shell(&[], &format!("exit {code}")).code(), code);
    }
    // PID 1 of a PID namespace cannot kill itself; its child's death by signal is told as shells tell it.
    assert_eq!(shell(&[], "sh -c 'kill -9 $$'; exit $?").code(), 137);
}

#[test]
fn a_command_not_found_is_127_and_one_not_executable_is_126() {
    let busybox = image("busybox");
    let missing = run(&mut thaw(&["run", "--rm", &busybox, "no-such-command"]));
    assert_eq!(missing.code(), 127, "{missing:?}");
    assert!(missing.stderr.contains("no-such-command"), "{missing:?}");
    let plain = run(&mut thaw(&["run", "--rm", &busybox, "/etc/passwd"]));
    assert_eq!(plain.code(), 126, "{plain:?}");
    assert_eq!(plain.stderr.lines().count(), 1, "one clear line: {plain:?}");
}

#[test]
fn streams_are_kept_apart_and_binary_clean() {
    let out = shell(&[], "echo out; echo err >&2; printf 'a\\000b\\377'");
    assert_eq!(
        (out.stdout.as_bytes()[..7].to_vec(), out.stderr.as_str()),
        (b"out\na\0b".to_vec(), "err\n")
    );
}

#[test]
fn standard_input_reaches_the_command_and_ends() {
    let input: String = (0..20_000).map(|n| format!("{n}\n")).collect();
    let busybox = image("busybox");
    let out = run_with_input(&mut thaw(&["run", "--rm", "-i", &busybox, "md5sum"]), &input).ok();
    let here = run_with_input(
        std::process::Command::new("md5sum")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped()),
        &input,
    );
    assert_eq!(out, here.ok());
}

#[test]
fn a_large_output_arrives_whole() {
    let out = shell(&[], "seq 1 200000").ok();
    assert_eq!(out.lines().count(), 200_000);
    assert!(out.ends_with("\n200000\n"));
}

#[test]
fn docker_env_workdir_user_hostname_entrypoint_apply() {
    let flags = [
        "-e",
        "COLOUR=blue",
        "-w",
        "/tmp/new/folder",
        "-u",
        "1234:5678",
        "--hostname",
        "thawed",
    ];
    let out = shell(
        &flags,
        "echo $COLOUR; pwd; id -u; id -g; hostname; cat /proc/sys/kernel/hostname",
    )
    .ok();
    assert_eq!(out, "blue\n/tmp/new/folder\n1234\n5678\nthawed\nthawed\n");
    let busybox = image("busybox");
    let out = run(&mut thaw(&[
        "run",
        "--rm",
        "--entrypoint",
        "/bin/echo",
        &busybox,
        "one",
        "two",
    ]))
    .ok();
    assert_eq!(out, "one two\n");
}

#[test]
fn init_is_pid_1_and_reaps_orphans() {
    let script = format!("echo $$; (sleep 0.1 &); {ZOMBIES}; exit 7");
    let under_init = shell(&["--init"], &script);
    assert_eq!((under_init.code(), under_init.stdout.as_str()), (7, "2\n0\n"));
}

#[test]
fn added_hosts_and_name_servers_are_in_etc() {
    let flags = [
        "--add-host",
        "db:192.0.2.7",
        "--dns",
        "192.0.2.53",
        "--dns-search",
        "a.example",
        "--dns-option",
        "ndots:2",
        "--domainname",
        "corp.example",
    ];
    let script = "grep 192.0.2.7 /etc/hosts; cat /etc/resolv.conf; grep -c localhost /etc/hosts; \
                  cat /proc/sys/kernel/domainname";
    let out = shell(&flags, script).ok();
    assert_eq!(
        out,
        "192.0.2.7\tdb\nnameserver 192.0.2.53\nsearch a.example\noptions ndots:2\n2\ncorp.example\n"
    );
}

#[test]
fn a_user_by_name_is_looked_up_in_the_image() {
    assert_eq!(shell(&["-u", "nobody"], "id -un").ok(), "nobody\n");
    let groups = ["-u", "1234:5678", "--group-add", "users", "--group-add", "77"];
    assert_eq!(shell(&groups, "id -G").ok(), "5678 77 100\n");
    let unknown = shell(&["-u", "no-such-user"], "id");
    assert!(
        !unknown.status.success() && unknown.stderr.contains("no-such-user"),
        "{unknown:?}"
    );
}

#[test]
fn the_root_is_writable_unless_read_only() {
    assert_eq!(
        shell(
            &[],
            "echo x > /etc/new && mv /etc/new /etc/newer && cat /etc/newer"
        )
        .ok(),
        "x\n"
    );
    let refused = shell(&["--read-only"], "echo x > /etc/new");
    assert!(refused.stderr.contains("Read-only file system"), "{refused:?}");
}

#[test]
fn processors_and_memory_are_as_told() {
    let out = shell(
        &["--cpus", "3", "--memory", "300m"],
        "nproc; awk '/MemTotal/{print $2}' /proc/meminfo",
    )
    .ok();
    let mut lines = out.lines();
    assert_eq!(lines.next(), Some("3"));
    let kib: u64 = lines.next().unwrap().parse().unwrap();
    assert!((200_000..=300 * 1024).contains(&kib), "{kib} KiB");
}

#[test]
fn a_container_killed_for_memory_is_137_and_said_so() {
    let out = shell(&["--memory", "128m"], "exec tail /dev/zero");
    assert_eq!(out.code(), 137, "{out:?}");
    assert!(out.stderr.to_lowercase().contains("out of memory"), "{out:?}");
}

#[test]
fn signals_are_forwarded() {
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        let busybox = image("busybox");
        let script = "trap 'echo got it; exit 7' USR1; echo ready; while :; do sleep 0.1; done";
        let mut child = thaw(&["run", "--rm", &busybox, "sh", "-c", script])
            .spawn()
            .unwrap();
        let _rest = wait_for_line(&mut child, "ready");
        rustix::process::kill_process(pid_of(child.id() as i32), signal).unwrap();
        // The shell is not PID 1 of the guest but is of its PID namespace, where an unhandled signal is ignored, as
        // it is under docker; the handled one is not.
        rustix::process::kill_process(pid_of(child.id() as i32), Signal::USR1).unwrap();
        let ended = child.wait().unwrap().code();
        assert!(ended == Some(7) || ended == Some(code), "{signal:?}: {ended:?}");
    }
}

#[test]
fn a_terminal_is_one_with_its_size_and_resizes_and_ctrl_c() {
    let mut terminal =
        Terminal::start(thaw(&["run", "--rm", "-it", &image("busybox"), "sh"]).stdin(Stdio::null()));
    terminal.say("stty size; tty\n");
    terminal.expect("24 80");
    terminal.expect("/dev/");
    terminal.resize(50, 132);
    terminal.say("sleep 1; stty size\n");
    terminal.expect("50 132");
    // Typed ahead, a line would be the shell's; after this it is cat's.
    terminal.say("echo go; cat\n");
    terminal.expect("\r\ngo\r\n");
    terminal.say("typed\n");
    terminal.expect("typed\r\ntyped\r\n");
    terminal.say("\x03");
    terminal.expect("# ");
    terminal.say("exit 5\n");
    let (status, _) = terminal.wait();
    assert_eq!(status.code(), Some(5));
}

#[test]
fn no_zombie_stays_in_the_guest() {
    let script = format!("for i in 1 2 3 4 5; do (sleep 0.05 & ) ; done; {ZOMBIES}");
    assert_eq!(shell(&[], &script).ok(), "0\n");
}

#[test]
fn json_and_quiet_are_for_programs() {
    let busybox = image("busybox");
    let out = run(&mut thaw(&[
        "--json",
        "run",
        "--rm",
        "--timings",
        &busybox,
        "true",
    ]));
    assert!(out.status.success(), "{out:?}");
    for line in out.stderr.lines() {
        serde_json::from_str::<serde_json::Value>(line).unwrap_or_else(|e| panic!("{e}: {line}"));
    }
    let out = run(&mut thaw(&["-q", "run", "--rm", &busybox, "true"]));
    assert_eq!((out.code(), out.stderr.as_str()), (0, ""));
}

#[test]
fn a_container_is_waited_for_until_it_serves() {
    let (name, busybox) = (format!("ready-{}", std::process::id()), image("busybox"));
    let serve = "mkdir /tmp/w; (sleep 1; echo ok >/tmp/w/up) & exec httpd -f -p 8080 -h /tmp/w";
    let detached = [
        "run",
        "-d",
        "--name",
        &name,
        "--ready-http",
        "8080/up",
        &busybox,
        "sh",
        "-c",
        serve,
    ];
    run(&mut thaw(&detached)).ok();
    // It is there: nobody has to ask twice.
    let get = ["exec", &name, "wget", "-q", "-O", "-", "http://127.0.0.1:8080/up"];
    assert_eq!(run(&mut thaw(&get)).ok(), "ok\n");
    run(&mut thaw(&["rm", &name])).ok();

    let timed = shell(&["--timings", "--ready-tcp", "8080"], "nc -l -p 8080; exit 4");
    assert_eq!(timed.code(), 4, "{timed:?}");
    assert!(timed.stderr.lines().any(|l| l.starts_with("ready ")), "{timed:?}");
}

#[test]
fn a_container_that_does_not_serve_is_said_so_and_is_gone() {
    let name = format!("unready-{}", std::process::id());
    let flags = ["--name", &name, "--ready-tcp", "8080", "--ready-timeout", "30"];
    let late = shell(&flags, "echo out; exec httpd -f -p 3000");
    assert_eq!((late.code(), late.stdout.as_str()), (107, "out\n"), "{late:?}");
    assert!(late.stderr.contains("what listens is on 3000"), "{late:?}");
    assert_eq!(late.stderr.lines().count(), 1, "one clear line: {late:?}");
    let ended = shell(&["--name", &name, "--ready-http", "8080"], "echo out; exit 3");
    assert_eq!((ended.code(), ended.stdout.as_str()), (107, "out\n"), "{ended:?}");
    assert!(ended.stderr.contains("exited with 3"), "{ended:?}");
    let listed = run(&mut thaw(&["--json", "ps"])).ok();
    assert!(!listed.contains(&name), "{listed}");
}

#[test]
fn seccomp_profile_is_dockers_unless_unconfined() {
    // Its namespace is refused by the profile alone: nobody needs a capability for a user namespace.
    let script = "grep ^Seccomp: /proc/self/status | cut -f 2; unshare -U true && echo made || echo refused; \
                  mkdir /d && touch /d/f && chown 1:1 /d/f && mknod /d/null c 1 3 && chroot / true && \
                  (sleep 0 & wait) && echo ordinary";
    let confined = shell(&[], script);
    assert_eq!(confined.ok(), "2\nrefused\nordinary\n");
    let unconfined = shell(&["--security-opt", "seccomp=unconfined"], script);
    assert_eq!(unconfined.ok(), "0\nmade\nordinary\n");
    let unknown = shell(&["--security-opt", "seccomp=/profile.json"], "true");
    assert_ne!(unknown.code(), 0);
    assert!(
        unknown.stderr.contains("seccomp=/profile.json: No such file"),
        "{unknown:?}"
    );
}
