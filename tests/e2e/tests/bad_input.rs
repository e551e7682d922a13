//! Every wrong input: one clear line, a code of its own, nothing left behind.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use thaw_e2e::layout::{Layout, tar_of, tar_with_link};
use thaw_e2e::{Outcome, image, registry, run, thaw};

/// Runs, and checks that it fails with one line that says each of `words`.
fn refused(args: &[&str], words: &[&str]) -> Outcome {
    let out = run(&mut thaw(args));
    let lines: Vec<&str> = sentences(&out).collect();
    assert_eq!(lines.len(), 1, "one clear line: {out:?}");
    for word in words {
        assert!(lines[0].contains(word), "{word:?} not in {:?}", lines[0]);
    }
    assert_eq!(out.stdout, "");
    out
}

/// Lines that say why. A template that is built meanwhile says how far it is.
fn sentences(out: &Outcome) -> impl Iterator<Item = &str> {
    let progress = [
        "thaw: building the template",
        "thaw: another process builds the template",
    ];
    out.stderr
        .lines()
        .filter(move |l| l.starts_with("thaw:") && !progress.iter().any(|p| l.starts_with(p)))
}

fn bad_image(change: impl FnOnce(&mut Layout), words: &[&str]) -> i32 {
    let folder = tempfile::tempdir().unwrap();
    let mut layout = Layout::new(tar_of(&[("bin/sh", b"#!/bin/nothing")]));
    change(&mut layout);
    let reference = layout.write(folder.path());
    refused(&["run", "--rm", &reference], words).code()
}

/// Every kind of wrong input has a code of its own: codes are collected here and compared at the end.
#[test]
fn bad_images_and_registries_each_have_an_exit_code() {
    let mut codes = BTreeMap::new();
    let mut seen = |what: &'static str, code: i32| {
        assert!((64..=125).contains(&code), "{what}: {code}");
        if let Some(other) = codes.insert(code, what) {
            panic!("{what} and {other} share the code {code}");
        }
    };
    seen(
        "digest mismatch",
        bad_image(|l| l.stored_layer = Some(vec![1; l.layer.len()]), &["sha256:"]),
    );
    seen(
        "truncated layer",
        bad_image(|l| l.layer.truncate(700), &["layer"]),
    );
    seen(
        "media type",
        bad_image(
            |l| l.layer_media_type = "application/x-unknown".into(),
            &["application/x-unknown"],
        ),
    );
    seen(
        "architecture",
        bad_image(|l| l.architecture = "arm64".into(), &["arm64", "amd64"]),
    );
    let unsafe_path = bad_image(|l| l.layer = tar_of(&[("../escaped", b"x")]), &["../escaped"]);
    seen("unsafe path", unsafe_path);
    assert_eq!(
        bad_image(|l| l.layer = tar_of(&[("/absolute", b"x")]), &["/absolute"]),
        unsafe_path
    );
    assert_eq!(
        bad_image(|l| l.layer = tar_with_link("link", "../../etc/passwd"), &["link"]),
        unsafe_path
    );
    let ask = |reference: &str, words: &[&str]| refused(&["run", "--rm", reference], words).code();
    seen("registry down", ask(&registry::down(), &["127.0.0.1"]));
    seen(
        "registry 401",
        ask(&registry::answering(401, ""), &["127.0.0.1", "401"]),
    );
    seen(
        "registry 404",
        ask(&registry::answering(404, ""), &["some/image"]),
    );
    seen(
        "registry 429",
        ask(&registry::answering(429, "Retry-After: 1\r\n"), &["429"]),
    );
    seen("registry 500", ask(&registry::answering(500, ""), &["500"]));
    let kernel = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(kernel.path(), b"not an ELF file").unwrap();
    seen("kernel not PVH", with_kernel(kernel.path(), &[]));
    seen(
        "kernel missing",
        with_kernel(Path::new("/no/such/kernel"), &["/no/such/kernel"]),
    );
    let small = refused(
        &["run", "--rm", "--memory", "16m", &image("busybox"), "true"],
        &["memory"],
    );
    seen("memory too small", small.code());
}

fn with_kernel(kernel: &Path, words: &[&str]) -> i32 {
    let out = run(thaw(&["run", "--rm", &image("busybox"), "true"]).env("THAW_KERNEL", kernel));
    let line = sentences(&out).next().unwrap_or_else(|| panic!("{out:?}"));
    assert!(words.iter().all(|w| line.contains(w)), "{line}");
    out.code()
}

#[test]
fn a_full_disk_is_said_and_leaves_no_half_image() {
    let folder = tempfile::tempdir().unwrap();
    let status = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"])
        .arg(folder.path())
        .status()
        .unwrap();
    assert!(status.success());
    let image_folder = tempfile::tempdir().unwrap();
    let reference = Layout::new(tar_of(&[("big", &vec![7u8; 4 << 20])])).write(image_folder.path());
    let out = run(thaw(&["run", "--rm", &reference]).env("THAW_DATA", folder.path()));
    let left = Command::new("find")
        .arg(folder.path())
        // Disks formatted in advance are no images.
        .args(["-type", "f", "-size", "+4k", "-not", "-path", "*/disks/*"])
        .output()
        .unwrap();
    let unmounted = Command::new("umount").arg(folder.path()).status().unwrap();
    assert!(unmounted.success(), "the store holds nothing open");
    assert!(
        out.stderr.contains("space") && out.stderr.contains(folder.path().to_str().unwrap()),
        "{out:?}"
    );
    assert_eq!(String::from_utf8_lossy(&left.stdout), "");
}

#[test]
fn full_disk_of_the_host_ends_a_copy_with_its_name() {
    let (name, folder) = (
        format!("full-{}", std::process::id()),
        tempfile::tempdir().unwrap(),
    );
    let small = folder.path().to_str().unwrap();
    let mount = ["-t", "tmpfs", "-o", "size=1m", "tmpfs", small];
    assert!(Command::new("mount").args(mount).status().unwrap().success());
    let script = "mkdir /out && dd if=/dev/urandom of=/out/large bs=1M count=3 2>/dev/null && touch /ready && sleep 100000";
    run(&mut thaw(&[
        "run",
        "-d",
        "--name",
        &name,
        &image("busybox"),
        "sh",
        "-c",
        script,
    ]))
    .ok();
    let wait = "while [ ! -e /ready ]; do sleep 0.1; done";
    run(&mut thaw(&["exec", &name, "sh", "-c", wait])).ok();
    let out = run(&mut thaw(&["cp", &format!("{name}:/out"), small]));
    run(&mut thaw(&["rm", &name])).ok();
    let unmounted = Command::new("umount").arg(small).status().unwrap();
    assert!(
        !out.status.success() && out.stderr.lines().count() == 1,
        "{out:?}"
    );
    assert!(
        out.stderr.contains("large") && out.stderr.contains("No space left"),
        "{out:?}"
    );
    assert!(unmounted.success(), "no file stays open");
}

#[test]
fn missing_and_denied_kvm_each_have_an_exit_code() {
    // /dev is empty in a mount namespace of the command's own; then it is there, but root's.
    let missing = "mount -t tmpfs none /dev && exec \"$@\"";
    let denied = "chown 65534 \"$THAW_DATA\" && mknod \"$THAW_DATA/kvm\" c 10 232 && chmod 600 \"$THAW_DATA/kvm\" && \
                  mount --bind \"$THAW_DATA/kvm\" /dev/kvm && \
                  exec env HOME=/ setpriv --reuid 65534 --regid 65534 --clear-groups \"$@\"";
    let mut codes = Vec::new();
    for script in [missing, denied] {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("unshare");
        command
            .args(["-m", "sh", "-c", script, "sh"])
            .arg(thaw_e2e::binary("thaw"));
        command.args(["run", "--rm", &image("busybox"), "true"]);
        command
            .env("THAW_DATA", folder.path())
            .env("THAW_RUN", folder.path().join("run"));
        let out = run(command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped()));
        assert!(
            out.stderr.starts_with("thaw:") && out.stderr.contains("/dev/kvm"),
            "{out:?}"
        );
        assert_eq!(out.stderr.lines().count(), 1, "{out:?}");
        codes.push(out.code());
    }
    assert_eq!(codes, [64, 65]);
}

#[test]
fn wrong_arguments_are_explained() {
    for args in [
        &["run"][..],
        &["run", "--memory", "lots", "busybox"],
        &["run", "--cpus", "0", "busybox"],
        &["frobnicate"],
    ] {
        let out = run(&mut thaw(args));
        assert!(
            !out.status.success() && !out.stderr.is_empty() && !out.stderr.contains("panicked"),
            "{args:?}: {out:?}"
        );
    }
}
