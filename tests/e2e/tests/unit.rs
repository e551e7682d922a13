//! thawd by the unit that is installed, under a systemd of the test's own: what the unit takes from it does not keep it from
//! anything, and its sandboxes outlive it.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Command, Stdio};

use thaw_e2e::home::Home;
use thaw_e2e::{binary, image, run};

#[test]
fn thawd_is_a_service_of_systemd_and_its_sandboxes_outlive_it() {
    let lacks = [
        ("/lib/systemd/systemd", "systemd is not installed"),
        (
            "/sys/fs/cgroup/cgroup.controllers",
            "cgroups are not of version 2",
        ),
    ];
    if let Some((_, why)) = lacks.iter().find(|(path, _)| !Path::new(path).exists()) {
        return thaw_test_skip::skip(why);
    }
    if !rustix::process::geteuid().is_root() {
        return thaw_test_skip::skip("not root");
    }
    let home = Home::new();
    let outputs = home.scratch("systemd");
    let boot = Path::new(env!("CARGO_MANIFEST_DIR")).join("systemd/boot");
    let booted = run(Command::new(boot)
        .args([outputs.as_path(), &home.data()])
        .arg(image("busybox"))
        .env("THAW_BIN", binary("thawd").parent().unwrap())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped()));
    let said = |name: &str| std::fs::read_to_string(outputs.join(name)).unwrap_or_default();
    let course = said("course");
    assert!(
        course.ends_with("\ndone\n"),
        "{booted:?}\nthe course: {course}\nthawd: {}",
        said("thawd")
    );
}
