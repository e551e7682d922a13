//! Host resources of a pod's containers, with fakes.

use std::time::Duration;

use serde_json::json;
use thaw_protocol::shim::mount::Mount;
use thaw_protocol::shim::task::CreateTaskRequest;

use crate::support::{Rig, member};

/// A task whose root file system comes from another snapshotter, with these mounts.
fn request(
    rig: &Rig,
    id: &str,
    annotations: serde_json::Value,
    mounts: serde_json::Value,
) -> CreateTaskRequest {
    let mut request = rig.request(id, &["cat"], annotations);
    let path = rig.path(id).join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["mounts"] = mounts;
    std::fs::write(&path, config.to_string()).unwrap();
    request.rootfs = vec![Mount {
        type_: "overlay".into(),
        source: "overlay".into(),
        options: vec![format!("lowerdir=/{id}/1:/{id}/2")],
        ..Default::default()
    }];
    request
}

fn bind(rig: &Rig, directory: &str, destination: &str, options: &[&str]) -> serde_json::Value {
    let path = rig.path(directory);
    std::fs::create_dir_all(&path).unwrap();
    json!({"destination": destination, "type": "bind", "source": path, "options": options})
}

#[tokio::test]
async fn share_of_two_containers_is_added_once_removed_with_last() {
    let rig = Rig::new().await;
    rig.pod(&[]).await;
    let volume = bind(&rig, "volume", "/data", &["rbind", "rprivate", "rw"]);
    let config = bind(&rig, "config", "/etc/conf", &["ro"]);
    rig.create(request(&rig, "a", member(), json!([volume, config])))
        .await
        .unwrap();
    rig.create(request(&rig, "b", member(), json!([volume])))
        .await
        .unwrap();
    let shared = |rig: &Rig| -> Vec<(String, String)> {
        let shares = rig.thawd.shares.lock().unwrap();
        shares
            .iter()
            .map(|(name, source)| (name.clone(), source.options.join(",")))
            .collect()
    };
    let expected = [
        ("0", "lowerdir=/a/1:/a/2"),
        ("1", "rbind"),
        ("2", "rbind,rro"),
        ("3", "lowerdir=/b/1:/b/2"),
    ];
    assert_eq!(shared(&rig), expected.map(|(n, o)| (n.to_owned(), o.to_owned())));
    {
        let created = rig.agent.created.lock().unwrap();
        let of = |at: usize| {
            let spec = &created[at].OCI;
            let sources: Vec<String> = spec.Mounts.iter().map(|m| m.source.clone()).collect();
            (spec.Root.Path.clone(), sources)
        };
        let share = |name: &str| format!("/run/thaw/shares/{name}");
        assert_eq!(of(0), (share("0"), vec![share("1"), share("2")]));
        assert_eq!(of(1), (share("3"), vec![share("1")]));
        // The device is mounted before what is on it.
        let storages: Vec<&str> = created[1]
            .storages
            .iter()
            .map(|s| s.mount_point.as_str())
            .collect();
        assert_eq!(
            storages,
            ["/run/thaw/shared", "/run/thaw/shares/3", "/run/thaw/shares/1"]
        );
    }
    for id in ["a", "b"] {
        rig.start(id, "").await.unwrap();
        rig.kill(id, "", libc::SIGKILL).await.unwrap();
        rig.wait(id, "").await.unwrap();
    }
    rig.delete("a", "").await.unwrap();
    let left: Vec<String> = shared(&rig).into_iter().map(|(name, _)| name).collect();
    assert_eq!(left, ["1", "3"]);
    rig.delete("b", "").await.unwrap();
    assert!(shared(&rig).is_empty());
    // A name is not used again, because the guest may remember it.
    rig.create(request(&rig, "c", member(), json!([]))).await.unwrap();
    assert_eq!(shared(&rig)[0].0, "4");
}

#[tokio::test]
async fn share_removal_is_retried_until_thawd_is_back() {
    let rig = Rig::new().await;
    rig.pod(&[]).await;
    rig.create(request(&rig, "a", member(), json!([]))).await.unwrap();
    std::fs::rename(rig.path("pods"), rig.path("away")).unwrap();
    rig.delete("a", "").await.unwrap();
    assert_eq!(rig.thawd.shares.lock().unwrap().len(), 1);
    std::fs::rename(rig.path("away"), rig.path("pods")).unwrap();
    let taken_away = async {
        while !rig.thawd.shares.lock().unwrap().is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), taken_away)
        .await
        .unwrap();
}

#[tokio::test]
async fn container_whose_share_fails_leaves_no_share() {
    let rig = Rig::new().await;
    rig.pod(&[]).await;
    let good = bind(&rig, "good", "/good", &[]);
    let bad = bind(&rig, "refused", "/bad", &[]);
    let refused = rig.create(request(&rig, "a", member(), json!([good, bad]))).await;
    let said = refused.unwrap_err().to_string();
    assert!(
        said.contains("the mount at /bad") && said.contains("refused"),
        "{said}"
    );
    assert!(rig.thawd.shares.lock().unwrap().is_empty());
    assert!(rig.agent.created.lock().unwrap().is_empty());
    // Another container may try again.
    rig.create(request(&rig, "b", member(), json!([good])))
        .await
        .unwrap();
    assert_eq!(rig.thawd.shares.lock().unwrap().len(), 2);
}

/// A task with a block device of these numbers, which it may read, and write unless `read_only`.
fn with_disk(rig: &Rig, id: &str, (major, minor): (u32, u32), read_only: bool) -> CreateTaskRequest {
    let request = request(rig, id, member(), json!([]));
    let path = rig.path(id).join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["linux"]["devices"] = json!([{"path": "/dev/xvda", "type": "b", "major": major, "minor": minor}]);
    let access = if read_only { "r" } else { "rwm" };
    config["linux"]["resources"]["devices"] = json!([
        {"allow": false, "access": "rwm"},
        {"allow": true, "type": "b", "major": major, "minor": minor, "access": access}
    ]);
    std::fs::write(&path, config.to_string()).unwrap();
    request
}

#[tokio::test]
async fn block_device_is_a_disk_while_a_container_has_it() {
    let rig = Rig::new().await;
    rig.pod(&[]).await;
    let disks = |rig: &Rig| rig.thawd.disks.lock().unwrap().clone();
    for (id, device, read_only) in [("a", (7, 1), false), ("b", (7, 1), false), ("c", (7, 1), true)] {
        rig.create(with_disk(&rig, id, device, read_only)).await.unwrap();
    }
    let expected = [("3".to_owned(), (7, 1, false)), ("4".to_owned(), (7, 1, true))];
    assert_eq!(disks(&rig), expected.into());
    {
        let created = rig.agent.created.lock().unwrap();
        let told: Vec<_> = created
            .iter()
            .map(|request| {
                let [device] = &request.devices[..] else {
                    panic!("{:?}", request.devices)
                };
                assert_eq!(device.container_path, "/dev/xvda");
                assert_eq!(request.OCI.Linux.Devices[0].Path, "/dev/xvda");
                (device.id.clone(), device.options.join(","))
            })
            .collect();
        let slot = |slot: &str, options: &str| (slot.to_owned(), options.to_owned());
        assert_eq!(told, [slot("3", ""), slot("3", ""), slot("4", "ro")]);
    }
    let refused = rig.create(with_disk(&rig, "d", (0, 1), false)).await;
    let said = refused.unwrap_err().to_string();
    assert!(
        said.contains("the device /dev/xvda") && said.contains("refused"),
        "{said}"
    );
    for id in ["a", "b", "c"] {
        rig.start(id, "").await.unwrap();
        rig.kill(id, "", libc::SIGKILL).await.unwrap();
        rig.wait(id, "").await.unwrap();
        assert!(disks(&rig).contains_key("4"));
        assert_eq!(disks(&rig).contains_key("3"), id != "c");
        rig.delete(id, "").await.unwrap();
    }
    assert!(disks(&rig).is_empty());
}

#[tokio::test]
async fn guest_writes_back_before_its_machine_ends() {
    let rig = Rig::new().await;
    rig.create(request(&rig, "one", json!({}), json!([])))
        .await
        .unwrap();
    rig.start("one", "").await.unwrap();
    rig.thawd.holds_on.send_replace(true);
    rig.kill("one", "", libc::SIGKILL).await.unwrap();
    rig.wait("one", "").await.unwrap();
    // After its deletion it has released the host's resources, which happens with the end of its machine.
    {
        let mut deleting = std::pin::pin!(rig.delete("one", ""));
        let soon = tokio::time::timeout(Duration::from_millis(300), &mut deleting);
        assert!(soon.await.is_err());
        rig.thawd.holds_on.send_replace(false);
        deleting.await.unwrap();
    }
    assert!(rig.agent.heard.lock().unwrap().contains(&"remove one".to_owned()));
    rig.shutdown(false).await;
    rig.ended().await;
    assert_eq!(*rig.thawd.ended.lock().unwrap(), ["sandbox-1"]);
}

#[tokio::test]
async fn root_without_mount_is_the_bundles_directory() {
    let rig = Rig::new().await;
    let request = CreateTaskRequest {
        rootfs: Vec::new(),
        ..request(&rig, "one", json!({}), json!([]))
    };
    rig.create(request).await.unwrap();
    let shares = rig.thawd.shares.lock().unwrap();
    let expected = rig.path("one").join("rootfs");
    assert_eq!(
        (shares["0"].type_.as_str(), shares["0"].source.as_str()),
        ("bind", expected.to_str().unwrap())
    );
}
