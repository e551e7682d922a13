//! containerd with Thaw as its snapshotter: pulls by CRI fetch no layer, and containers get the store's image.

#![allow(clippy::unwrap_used)]

use thaw_e2e::containerd::Containerd;
use thaw_e2e::home::Home;
use thaw_e2e::run;
use thaw_e2e::upstream::Upstream;

/// The committed snapshot nothing stands on.
fn top(containerd: &Containerd) -> String {
    let listed = containerd.ctr(&["snapshots", "--snapshotter", "thaw", "ls"]);
    let rows: Vec<Vec<&str>> = listed
        .lines()
        .skip(1)
        .map(|line| line.split_whitespace().collect())
        .collect();
    let parents: Vec<&str> = rows
        .iter()
        .filter(|row| row.len() == 3)
        .map(|row| row[1])
        .collect();
    let tops: Vec<&str> = rows
        .iter()
        .map(|row| row[0])
        .filter(|name| !parents.contains(name))
        .collect();
    assert_eq!(tops.len(), 1, "{listed}");
    tops[0].into()
}

#[test]
fn pulls_by_cri_fetch_no_layer_and_a_container_gets_the_image() {
    let home = Home::new();
    let upstream = Upstream::test_images(&home.scratch("registry"), None);
    let socket = home.run().join("snapshots.sock");
    let mut thawd = home.thawd(&["--snapshots-socket", socket.to_str().unwrap()]);
    let image = format!("{}/python3:latest", upstream.host);
    let containerd = Containerd::start(&home, &socket, &image);
    containerd.pull(&image).unwrap();

    // What containerd has is documents; file data is the store's.
    let contents = containerd.ctr(&["content", "ls"]);
    assert!(
        contents
            .lines()
            .skip(1)
            .all(|line| !line.contains("MB") && !line.contains("MiB")),
        "{contents}"
    );
    assert!(!home.stored("data").is_empty());

    // A container's snapshot is one mount that Thaw's shim knows, by the image's digest.
    let top = top(&containerd);
    containerd.ctr(&["snapshots", "--snapshotter", "thaw", "prepare", "container", &top]);
    let told_by = [
        "snapshots",
        "--snapshotter",
        "thaw",
        "mounts",
        "/target",
        "container",
    ];
    let told = containerd.try_ctr(&told_by).unwrap();
    let stored = run(&mut home.thaw(&["--json", "image", "ls"])).ok();
    let stored: serde_json::Value = serde_json::from_str(&stored).unwrap();
    let digest = stored[0]["digest"].as_str().unwrap();
    assert!(told.contains(&format!("thaw:{digest}")), "{told}; {stored}");

    // Killed and started again, it knows what it knew.
    thawd.kill().unwrap();
    thawd.wait().unwrap();
    let mut thawd = home.thawd(&["--snapshots-socket", socket.to_str().unwrap()]);
    // containerd dials again by itself, after a pause of its own.
    let mut again = Err(String::new());
    for _ in 0..100 {
        again = containerd.try_ctr(&told_by);
        if again.is_ok() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    assert_eq!(again.as_ref(), Ok(&told));

    // What is not there is an error, and leaves no snapshot.
    let absent = format!("{}/no-such-image:latest", upstream.host);
    assert!(containerd.pull(&absent).is_err());
    containerd.ctr(&["snapshots", "--snapshotter", "thaw", "rm", "container"]);
    thawd.kill().unwrap();
    thawd.wait().unwrap();
}
