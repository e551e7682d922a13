//! Images from a real registry: Debian's docker-registry on loopback, serving the test images.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Command, Stdio};

use thaw_e2e::upstream::Upstream;
use thaw_e2e::{Outcome, binary, run, thaw};

#[test]
fn an_image_is_pulled_over_http_and_runs() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("registry");
    let registry = Upstream::test_images(&state, None);
    let from = |name: &str| format!("{}/{name}:latest", registry.host);
    let out = run(&mut thaw(&[
        "run",
        "--rm",
        &from("busybox"),
        "echo",
        "from a registry",
    ]))
    .ok();
    assert_eq!(out, "from a registry\n");
    let missing = run(&mut thaw(&["run", "--rm", &from("no-such-image")]));
    assert_eq!(missing.code(), 80, "{missing:?}");
}

/// A certificate for `registry.test`, signed by an authority of the test's own.
fn certificates(folder: &Path) {
    let script = "set -e; cd \"$0\"
        openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout ca-key.pem -out ca.pem \
            -days 2 -subj '/CN=Thaw test authority'
        openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key.pem -out request.pem \
            -subj /CN=registry.test
        printf 'subjectAltName=DNS:registry.test\\nbasicConstraints=critical,CA:FALSE\\n' >extensions
        openssl x509 -req -in request.pem -CA ca.pem -CAkey ca-key.pem -CAcreateserial -days 2 -extfile extensions \
            -out cert.pem";
    let made = Command::new("sh")
        .arg("-c")
        .arg(script)
        .arg(folder)
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
}

/// Runs thaw where `registry.test` is this host: a mount namespace with its own /etc/hosts.
fn thaw_at_registry(folder: &Path, authority: Option<&Path>, args: &[&str]) -> Outcome {
    let hosts = folder.join("hosts");
    std::fs::write(&hosts, "127.0.0.1 localhost registry.test\n").unwrap();
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", "mount --bind \"$0\" /etc/hosts && exec \"$@\""]);
    command.arg(&hosts).arg(binary("thaw")).args(args);
    if let Some(file) = authority {
        command.env("SSL_CERT_FILE", file);
    }
    run(command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped()))
}

#[test]
fn image_is_pulled_over_https_with_a_trusted_authority() {
    let folder = tempfile::tempdir().unwrap();
    certificates(folder.path());
    let state = folder.path().join("registry");
    let registry = Upstream::test_images(&state, Some(folder.path()));
    let reference = format!("{}/busybox:latest", registry.host);
    let pull = ["-q", "image", "pull", &reference];
    let distrusted = thaw_at_registry(folder.path(), None, &pull);
    assert_eq!(
        distrusted.code(),
        81,
        "a certificate nobody vouches for: {distrusted:?}"
    );
    let trusted = thaw_at_registry(folder.path(), Some(&folder.path().join("ca.pem")), &pull);
    assert!(trusted.status.success(), "{trusted:?}");
}
