use std::os::unix::fs::symlink;

use serde_json::{Value, json};
use thaw_protocol::e2b::filesystem::{FileType, StatRequest, StatResponse};

use crate::e2b::envd::test_client::Bed;

async fn call(bed: &Bed, method: &str, message: Value) -> (u16, Value) {
    bed.call(&format!("/filesystem.Filesystem/{method}"), message)
        .await
}

async fn code(bed: &Bed, method: &str, message: Value) -> Value {
    let (status, answer) = call(bed, method, message).await;
    assert_ne!(status, 200);
    answer["code"].clone()
}

fn names(list: &Value) -> Vec<&str> {
    let entries = list["entries"].as_array().unwrap();
    entries
        .iter()
        .map(|entry| entry["path"].as_str().unwrap())
        .collect()
}

#[tokio::test]
async fn files_are_described() {
    let bed = Bed::new().await;
    let root = bed.guest.root();
    std::fs::write(root.join("root/a"), "hello").unwrap();
    symlink("a", root.join("root/link")).unwrap();
    symlink("none", root.join("root/dangling")).unwrap();
    let (_, answer) = call(&bed, "Stat", json!({"path": "a"})).await;
    let entry = &answer["entry"];
    assert_eq!((&entry["name"], &entry["path"]), (&json!("a"), &json!("/root/a")));
    assert_eq!(
        (&entry["type"], &entry["size"]),
        (&json!("FILE_TYPE_FILE"), &json!("5"))
    );
    assert_eq!(
        (&entry["mode"], &entry["permissions"]),
        (&json!(0o644), &json!("-rw-r--r--"))
    );
    assert!(entry["modifiedTime"].as_str().unwrap().ends_with('Z'));
    assert!(entry["owner"].is_string() && entry["symlinkTarget"].is_null());
    let request = StatRequest {
        path: "~/link".into(),
    };
    let answer: StatResponse = bed.call_proto("/filesystem.Filesystem/Stat", &request).await;
    let entry = answer.entry.unwrap();
    assert!(entry.is_symlink && entry.r#type() == FileType::File);
    assert_eq!(entry.symlink_target.as_deref(), Some("a"));
    let (_, answer) = call(&bed, "Stat", json!({"path": "/root/dangling"})).await;
    assert_eq!(answer["entry"]["type"], "FILE_TYPE_SYMLINK");
    assert_eq!(
        code(&bed, "Stat", json!({"path": "/root/../none"})).await,
        "not_found"
    );
    assert_eq!(
        code(&bed, "Stat", json!({"path": "~other/x"})).await,
        "invalid_argument"
    );
    assert_eq!(
        code(&bed, "Stat", json!({"path": "/".repeat(5000)})).await,
        "invalid_argument"
    );
}

#[tokio::test]
async fn directories_are_listed_to_a_depth() {
    let bed = Bed::new().await;
    let root = bed.guest.root().join("d");
    std::fs::create_dir_all(root.join("b/c")).unwrap();
    for name in ["a", "b/x", "b/c/y", "e", "f", "g"] {
        std::fs::write(root.join(name), "").unwrap();
    }
    // It is not followed, or the list would not end.
    symlink(".", root.join("loop")).unwrap();
    let list = async |depth: u32| {
        call(&bed, "ListDir", json!({"path": "/d", "depth": depth}))
            .await
            .1
    };
    let one = ["/d/a", "/d/b", "/d/e", "/d/f", "/d/g", "/d/loop"];
    assert_eq!(
        (names(&list(0).await), names(&list(1).await)),
        (one.to_vec(), one.to_vec())
    );
    let two = list(2).await;
    assert_eq!(names(&two), [&one[..], &["/d/b/c", "/d/b/x"]].concat());
    assert_eq!(
        names(&list(9).await),
        [&one[..], &["/d/b/c", "/d/b/x", "/d/b/c/y"]].concat()
    );
    assert_eq!(code(&bed, "ListDir", json!({"path": "/none"})).await, "not_found");
    assert_eq!(
        code(&bed, "ListDir", json!({"path": "/d/a"})).await,
        "invalid_argument"
    );
}

#[tokio::test]
async fn files_are_made_moved_and_removed() {
    let bed = Bed::new().await;
    let (_, made) = call(&bed, "MakeDir", json!({"path": "/x/y"})).await;
    assert_eq!(made["entry"]["type"], "FILE_TYPE_DIRECTORY");
    assert_eq!(
        code(&bed, "MakeDir", json!({"path": "/x"})).await,
        "already_exists"
    );
    std::fs::write(bed.guest.root().join("x/f"), "").unwrap();
    assert_eq!(
        code(&bed, "MakeDir", json!({"path": "/x/f"})).await,
        "invalid_argument"
    );
    let moved = call(&bed, "Move", json!({"source": "/x/f", "destination": "/p/q/f"})).await;
    assert_eq!(moved.1["entry"]["path"], "/p/q/f");
    let missing = json!({"source": "/x/f", "destination": "/never/f"});
    assert_eq!(code(&bed, "Move", missing).await, "not_found");
    assert!(!bed.guest.root().join("never").exists());
    for path in ["/x", "/p/q/f", "/none"] {
        assert_eq!(
            call(&bed, "Remove", json!({"path": path})).await,
            (200, json!({})),
            "{path}"
        );
    }
    assert!(!bed.guest.root().join("x").exists());
    assert_eq!(
        code(&bed, "Remove", json!({"path": "/x/.."})).await,
        "invalid_argument"
    );
}

#[tokio::test]
async fn watched_directory_sends_its_events() {
    let bed = Bed::new().await;
    let message = json!({"path": "/root", "recursive": true, "includeEntry": true});
    let mut frames = bed.open("/filesystem.Filesystem/WatchDir", &[], message).await;
    assert_eq!(frames.message().await.unwrap(), json!({"start": {}}));
    std::fs::write(bed.guest.root().join("root/a"), "x").unwrap();
    let event = frames.message().await.unwrap()["filesystem"].clone();
    assert_eq!(
        (&event["name"], &event["type"]),
        (&json!("a"), &json!("EVENT_TYPE_CREATE"))
    );
    assert_eq!(event["entry"]["path"], "/root/a");
    std::fs::remove_dir_all(bed.guest.root().join("root")).unwrap();
    let (_, error) = frames.all().await;
    assert_eq!(error["code"], "not_found");
    let (_, error) = bed
        .open("/filesystem.Filesystem/WatchDir", &[], json!({"path": "/none"}))
        .await
        .all()
        .await;
    assert_eq!(error["code"], "not_found");
}

#[tokio::test]
async fn caller_that_leaves_ends_its_watch() {
    let bed = Bed::of_fakes().await;
    let mut open = bed.fake.files.open_watches();
    let message = json!({"path": "/quiet", "recursive": true});
    let interval = [("keepalive-ping-interval", "1")];
    let mut frames = bed
        .open("/filesystem.Filesystem/WatchDir", &interval, message.clone())
        .await;
    frames.message().await.unwrap();
    assert_eq!(frames.message().await.unwrap(), json!({"keepalive": {}}));
    assert_eq!(open.borrow().len(), 1);
    drop(frames);
    open.wait_for(|open| open.is_empty()).await.unwrap();
    // Of events that were lost, and of others, the fake has one answer.
    let mut frames = bed
        .open(
            "/filesystem.Filesystem/WatchDir",
            &[],
            json!({"path": "/", "recursive": true}),
        )
        .await;
    frames.message().await.unwrap();
    let (events, error) = frames.all().await;
    assert_eq!((events.len(), &error["code"]), (2, &json!("data_loss")));
    let (_, made) = call(&bed, "CreateWatcher", message).await;
    open.wait_for(|open| open.len() == 1).await.unwrap();
    assert_eq!(
        call(&bed, "RemoveWatcher", json!({"watcherId": made["watcherId"]}))
            .await
            .0,
        200
    );
    open.wait_for(|open| open.is_empty()).await.unwrap();
}

#[tokio::test]
async fn watchers_collect_events_until_they_are_asked() {
    let bed = Bed::new().await;
    let (_, made) = call(&bed, "CreateWatcher", json!({"path": "/root"})).await;
    let watcher = json!({"watcherId": made["watcherId"]});
    assert_eq!(call(&bed, "GetWatcherEvents", watcher.clone()).await.1, json!({}));
    std::fs::write(bed.guest.root().join("root/a"), "x").unwrap();
    let events = async {
        loop {
            let (_, answer) = call(&bed, "GetWatcherEvents", watcher.clone()).await;
            if answer != json!({}) {
                return answer["events"].clone();
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    let events = tokio::time::timeout(crate::e2b::envd::test_client::SOON, events)
        .await
        .unwrap();
    assert_eq!(events[0], json!({"name": "a", "type": "EVENT_TYPE_CREATE"}));
    assert_eq!(call(&bed, "RemoveWatcher", watcher.clone()).await.1, json!({}));
    for method in ["GetWatcherEvents", "RemoveWatcher"] {
        assert_eq!(code(&bed, method, watcher.clone()).await, "not_found");
    }
    for _ in 0..16 {
        assert_eq!(call(&bed, "CreateWatcher", json!({"path": "/etc"})).await.0, 200);
    }
    assert_eq!(
        code(&bed, "CreateWatcher", json!({"path": "/etc"})).await,
        "resource_exhausted"
    );
    assert_eq!(
        code(&bed, "CreateWatcher", json!({"path": "/none"})).await,
        "not_found"
    );
}
