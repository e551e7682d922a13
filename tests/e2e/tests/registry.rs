//! Images from a real registry: Debian's docker-registry on loopback, serving the test images.

#![allow(clippy::unwrap_used)]

use std::process::Command;

use thaw_e2e::{run, thaw};

#[test]
fn an_image_is_pulled_from_a_registry_and_runs() {
    let tool = std::env::current_dir().unwrap().join("tests/images/registry");
    let started = Command::new(&tool).arg("start").output().unwrap();
    assert!(started.status.success(), "{started:?}");
    let url = Command::new(&tool).arg("url").output().unwrap();
    let host = String::from_utf8(url.stdout)
        .unwrap()
        .trim()
        .trim_start_matches("http://")
        .to_string();
    let out = run(&mut thaw(&[
        "run",
        "--rm",
        &format!("{host}/busybox:latest"),
        "echo",
        "from a registry",
    ]));
    let missing = run(&mut thaw(&[
        "run",
        "--rm",
        &format!("{host}/no-such-image:latest"),
    ]));
    let stopped = Command::new(&tool).arg("stop").status().unwrap();
    assert!(stopped.success());
    assert_eq!(out.ok(), "from a registry\n");
    assert_eq!(missing.code(), 80, "{missing:?}");
}
