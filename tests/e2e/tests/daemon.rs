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
