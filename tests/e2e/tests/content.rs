//! What the guest sees of an image is what the image says.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use thaw_e2e::{image, run, thaw};

fn shell(image: &str, script: &str) -> String {
    run(&mut thaw(&["run", "--rm", image, "sh", "-c", script])).ok()
}

#[test]
fn whiteouts_and_opaque_directories_leave_what_they_should() {
    // The image says what must be left of its /w after its three layers.
    let script = "cd /w && find . -type f | sed 's|^./||' | sort | while read f; do echo $f $(cat $f); done >/tmp/left; \
                  cmp /tmp/left /expected && wc -l </tmp/left";
    let lines: usize = shell(&image("whiteouts"), script).trim().parse().unwrap();
    assert!(lines >= 7, "{lines}");
}

#[test]
fn modes_links_nodes_times_and_sizes_are_the_layers() {
    let script = "cd /t; stat -c '%a' setuid sticky-dir setgid-dir; stat -c '%h' hard-1; \
                  [ $(stat -c %i hard-1) = $(stat -c %i hard-2) ] && echo one inode; stat -c '%y' .; cat hard-2";
    let out = shell(&image("filetypes"), script);
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines[..3], ["4755", "1777", "2775"], "{out}");
    assert!(lines[3].parse::<u32>().unwrap() >= 2, "{out}");
    assert_eq!(lines[4], "one inode", "{out}");
    assert!(lines[5].starts_with("2020-09-13 12:26:40.000000001"), "{out}");
    assert_eq!(lines[6], "one inode, three names", "{out}");
}

#[test]
fn every_compression_and_container_of_an_image_runs() {
    for name in ["zstd", "uncompressed", "several-platforms"] {
        assert_eq!(shell(&image(name), "echo ran"), "ran\n", "{name}");
    }
    let images = std::env::var("THAW_TEST_IMAGES").unwrap();
    let archive = Path::new(&images).with_file_name("busybox.tar");
    assert_eq!(
        shell(&format!("docker-archive:{}", archive.display()), "echo ran"),
        "ran\n"
    );
}

#[test]
fn the_images_configuration_is_honoured() {
    let out = run(&mut thaw(&["run", "--rm", &image("entrypoint")])).ok();
    let where_and_who = "1000:1001:1001 1002 /home/worker/made/at/start /home/worker blue and green";
    assert_eq!(
        out,
        format!("entrypoint: fixed from the command\n{where_and_who}\n")
    );
    let out = run(&mut thaw(&[
        "run",
        "--rm",
        &image("entrypoint"),
        "one",
        "two words",
    ]))
    .ok();
    assert!(out.starts_with("entrypoint: fixed one two words\n"), "{out}");
}
