//! thawd may be killed and started again under a running sandbox, which notices nothing.

#![allow(clippy::unwrap_used)]

use rustix::process::Signal;
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
fn machines_made_ahead_are_taken_and_one_that_nobody_took_goes_with_its_maker() {
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
    let said: Vec<String> = std::iter::repeat_with(start).take(8).collect();
    assert!(!was_waiting(&said[0]), "{}", said[0]);
    assert!(said.iter().any(was_waiting), "{}", said[7]);

    // Killed, it leaves those that wait to its successor, which removes them.
    first.kill().unwrap();
    first.wait().unwrap();
    let mut second = home.thawd(&[]);
    assert!(!was_waiting(&start()));
    rustix::process::kill_process(pid_of(second.id() as i32), Signal::TERM).unwrap();
    assert!(second.wait().unwrap().success());
    assert_eq!(std::fs::read_dir(home.run()).unwrap().count(), 0);
}
