//! Mounts that a container gets while it runs.

use thaw_protocol::agent::mounts::AddMountsRequest;
use thaw_protocol::agent::mounts_ttrpc::MountsClient;

use super::sharing::said;
use super::*;

async fn client(g: &Guest) -> MountsClient {
    let address = format!("unix://{}", g.dir().join("1024").display());
    MountsClient::new(ttrpc::r#async::Client::connect(&address).await.unwrap())
}

/// A container that sleeps, and a client for its mounts. In the guest's `volume` is a file `password`.
async fn begin(g: &Guest) -> MountsClient {
    std::fs::create_dir(g.dir().join("volume")).unwrap();
    std::fs::write(g.dir().join("volume/password"), "xyzzy\n").unwrap();
    g.create("c", spec(g, &["sleep", "1000"])).await.unwrap();
    g.start("c").await.unwrap();
    client(g).await
}

/// Mounts the volume at `share` of the guest, and these mounts in the container.
fn request(g: &Guest, mounts: Vec<oci::Mount>) -> AddMountsRequest {
    let place = |name: &str| g.dir().join(name).display().to_string();
    AddMountsRequest {
        container_id: "c".into(),
        storages: vec![Storage {
            driver: "bind".into(),
            source: place("volume"),
            mount_point: place("share"),
            ..Default::default()
        }],
        mounts,
        ..Default::default()
    }
}

#[test]
fn paused_container_gets_mounts_until_it_is_removed() {
    with_guest(|g| async move {
        let client = begin(&g).await;
        let share = g.dir().join("share").display().to_string();
        g.pause("c").await.unwrap();
        let mounts = vec![
            bind(&share, "/run/secrets/key", &["rbind", "rprivate", "ro"]),
            bind(&format!("{share}/password"), "/etc/password", &["bind"]),
        ];
        client
            .add(support::context(), &request(&g, mounts))
            .await
            .unwrap();
        assert!(g.is_frozen("c"));
        g.resume("c").await.unwrap();
        let script =
            "cat /run/secrets/key/password /etc/password; echo new > /run/secrets/key/x || echo refused";
        assert_eq!(said(&g, "c", "seen", script).await, "xyzzy\nxyzzy\nrefused\n");
        // What changes outside is seen inside.
        std::fs::write(g.dir().join("volume/added"), "later\n").unwrap();
        assert_eq!(
            said(&g, "c", "later", "cat /run/secrets/key/added").await,
            "later\n"
        );
        g.remove("c").await.unwrap();
        g.assert_clean().await;
    });
}

#[test]
fn failed_addition_leaves_no_mount() {
    with_guest(|g| async move {
        let client = begin(&g).await;
        let share = g.dir().join("share").display().to_string();
        let first = || bind(&share, "/first", &["rbind"]);
        for (second, code) in [
            (bind(&share, "/bin/busybox/below", &["rbind"]), Code::INTERNAL),
            (bind("/not/there", "/second", &["rbind"]), Code::INTERNAL),
            (bind(&share, "/../second", &["rbind"]), Code::INVALID_ARGUMENT),
            (
                bind(&share, "/second", &["rbind", "dirsync"]),
                Code::UNIMPLEMENTED,
            ),
            (
                support::mount("/second", "tmpfs", "tmpfs", &["size=1m"]),
                Code::INVALID_ARGUMENT,
            ),
        ] {
            let request = request(&g, vec![first(), second]);
            let e = client.add(support::context(), &request).await.unwrap_err();
            assert_eq!(code_of(&e), code, "{e}");
        }
        let left = "mount | grep -c -e /first -e /second";
        assert_eq!(said(&g, "c", "left", left).await, "0\n");
        // In the guest as well: another storage can take its place.
        client
            .add(support::context(), &request(&g, vec![first()]))
            .await
            .unwrap();
        g.signal("c", "", 9).await.unwrap();
        g.wait("c", "c").await;
        let e = client.add(support::context(), &request(&g, vec![first()])).await;
        assert_eq!(code_of(&e.unwrap_err()), Code::FAILED_PRECONDITION);
        g.remove("c").await.unwrap();
        g.assert_clean().await;
    });
}
