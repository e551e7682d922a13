use axum::body::Body as Stream;
use axum::http::Request;
use serde_json::{Value, json};

use crate::api::test_client::send;
use crate::e2b::test_api::{ACME, Api, OTHER, SOON};

fn step(kind: &str, args: &[&str]) -> Value {
    json!({"type": kind, "args": args, "force": false})
}

fn of_image(steps: Vec<Value>) -> Value {
    json!({"fromImage": "x", "steps": steps, "force": false})
}

fn messages(status: &Value) -> Vec<&str> {
    let entries = status["logEntries"].as_array().unwrap();
    entries
        .iter()
        .map(|entry| entry["message"].as_str().unwrap())
        .collect()
}

#[tokio::test]
async fn build_makes_a_template_of_its_steps() {
    let (api, _guest) = Api::with_guest();
    let place = tempfile::tempdir().unwrap();
    let app = place.path().join("app");
    let steps = vec![
        step("ENV", &["COLOUR", "blue", "BOTH", "$COLOUR-\"green\""]),
        step("WORKDIR", &[app.to_str().unwrap()]),
        step("USER", &["root"]),
        step("RUN", &["echo $BOTH; echo $BOTH > made; pwd"]),
    ];
    let built = api.build(ACME, "web:v1", of_image(steps)).await;
    assert_eq!(built["status"], "ready", "{built}");
    let (log, app) = (messages(&built), app.to_str().unwrap());
    assert!(log.contains(&"ENV COLOUR BOTH") && log.contains(&app), "{log:?}");
    // The second value was expanded by a shell that had the first.
    assert!(log.contains(&"blue-\"green\""), "{log:?}");
    assert_eq!(
        std::fs::read_to_string(format!("{app}/made")).unwrap(),
        "blue-\"green\"\n"
    );
    assert_eq!(
        (api.fake.living(), api.fake.made()),
        (0, 1),
        "the sandbox of the build is gone"
    );
    // It is a template, and no snapshot.
    assert_eq!(
        api.ask(ACME, "GET", "/snapshots", Value::Null).await.ok(200),
        json!([])
    );
    let body = json!({"templateID": "web:v1", "envVars": {"COLOUR": "red"}});
    let made = api.ask(ACME, "POST", "/v2/sandboxes", body).await.ok(201);
    assert_eq!(
        (&made["templateID"], &made["alias"]),
        (&built["templateID"], &json!("web"))
    );
    let notes = api.notes(made["sandboxID"].as_str().unwrap());
    assert_eq!(notes.context.env["BOTH"], "blue-\"green\"");
    assert_eq!(
        (notes.context.workdir.as_deref(), notes.context.user.as_deref()),
        (Some(app), Some("root"))
    );
    // Only the tag that was asked for exists.
    let plain = api
        .ask(ACME, "POST", "/v2/sandboxes", json!({"templateID": "web"}))
        .await;
    assert!(plain.refused(404, "web").contains("default"));
}

#[tokio::test]
async fn failure_names_the_step_and_leaves_nothing() {
    let (api, _guest) = Api::with_guest();
    for (what, at, why) in [
        (
            of_image(vec![
                step("RUN", &["true"]),
                step("RUN", &["echo the reason >&2; exit 3"]),
            ]),
            "2",
            "exit code 3: the reason",
        ),
        (
            of_image(vec![step("ENV", &["A", &"x".repeat(40_000)])]),
            "1",
            "bytes",
        ),
        (json!({"fromImage": "missing"}), "base", "missing"),
        (
            json!({"fromImage": "x", "startCmd": "echo no port; exit 4", "readyCmd": "sleep 60"}),
            "finalize",
            "exit code 4: no port",
        ),
    ] {
        let status = api.build(ACME, "web", what.clone()).await;
        assert_eq!(
            (&status["status"], &status["reason"]["step"]),
            (&json!("error"), &json!(at)),
            "{what}: {status}"
        );
        let message = status["reason"]["message"].as_str().unwrap();
        assert!(message.contains(why), "{what}: {message}");
        assert!(!status["reason"]["logEntries"].as_array().unwrap().is_empty());
        assert_eq!(api.fake.living(), 0, "{what}");
    }
    assert!(api.fake.counts.stored.lock().unwrap().is_empty());
    let plain = api
        .ask(ACME, "POST", "/v2/sandboxes", json!({"templateID": "web"}))
        .await;
    plain.refused(404, "a template without a build");
}

#[tokio::test]
async fn build_waits_for_the_ready_command() {
    let (api, _guest) = Api::with_guest();
    let place = tempfile::tempdir().unwrap();
    let flag = place.path().join("ready");
    let what = json!({
        "fromImage": "x", "startCmd": format!("echo begins; sleep 1; touch {}; exec sleep 3", flag.display()),
        "readyCmd": format!("[ -f {} ]", flag.display()),
    });
    let built = api.build(ACME, "web", what).await;
    assert_eq!(built["status"], "ready", "{built}");
    assert!(flag.exists() && messages(&built).contains(&"begins"), "{built}");
}

#[tokio::test]
async fn deleted_template_ends_its_build() {
    let (api, _guest) = Api::with_guest();
    let status = api
        .start_build(ACME, "web", of_image(vec![step("RUN", &["sleep 600"])]))
        .await;
    let ended = async {
        while api.fake.made() == 0 {
            tokio::task::yield_now().await;
        }
        // The sandbox of a build is not shown.
        assert_eq!(
            api.ask(ACME, "GET", "/v2/sandboxes", Value::Null).await.ok(200),
            json!([])
        );
        api.ask(ACME, "DELETE", "/templates/web", Value::Null)
            .await
            .ok(204);
        while api.fake.living() > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(SOON, ended).await.unwrap();
    api.ask(ACME, "GET", &status, Value::Null)
        .await
        .refused(404, "the build");
    assert!(api.fake.counts.stored.lock().unwrap().is_empty());
}

#[tokio::test]
async fn same_build_uses_the_same_snapshot() {
    let (api, _guest) = Api::with_guest();
    let base = api
        .build(ACME, "base-of-web", of_image(vec![step("ENV", &["A", "1"])]))
        .await;
    assert_eq!(base["status"], "ready", "{base}");
    let what = |force: bool| json!({"fromTemplate": "base-of-web", "steps": [step("RUN", &["echo $A$B"])], "force": force});
    let first = api.build(ACME, "web", what(false)).await;
    assert!(messages(&first).contains(&"1"), "{first}");
    let again = api.build(ACME, "other", what(false)).await;
    assert!(
        messages(&again).contains(&"the same build exists, and is used"),
        "{again}"
    );
    let forced = api.build(ACME, "forced", what(true)).await;
    assert!(messages(&forced).contains(&"1"), "{forced}");
    let stored = || api.fake.counts.stored.lock().unwrap().len();
    assert_eq!(stored(), 3);
    for (name, left) in [("web", 3), ("other", 2), ("forced", 1)] {
        api.ask(ACME, "DELETE", &format!("/templates/{name}"), Value::Null)
            .await
            .ok(204);
        assert_eq!(stored(), left, "{name}");
    }
    // A build that replaces another takes the snapshot's place.
    api.build(ACME, "base-of-web", of_image(vec![])).await;
    assert_eq!(stored(), 1);
}

/// A request without an API key.
async fn put(api: &Api, url: &str, body: Vec<u8>) -> u16 {
    let path = url.strip_prefix("https://node.example").unwrap();
    let request = Request::builder()
        .method("PUT")
        .uri(path)
        .header("host", "node.example");
    let request = request.header("content-length", body.len());
    send(&api.routes, request.body(Stream::from(body)).unwrap())
        .await
        .status()
        .as_u16()
}

/// An archive with `app/main.py`, `app/lib/x.py` and `notes.txt`.
fn archive(compressed: bool) -> Vec<u8> {
    let place = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(place.path().join("app/lib")).unwrap();
    for (file, text) in [
        ("app/main.py", "main"),
        ("app/lib/x.py", "x"),
        ("notes.txt", "notes"),
    ] {
        std::fs::write(place.path().join(file), text).unwrap();
    }
    let mut tar = std::process::Command::new("tar");
    let how = if compressed { "-cz" } else { "-c" };
    let made = tar
        .arg(how)
        .arg("-C")
        .arg(place.path())
        .args(["app", "notes.txt"])
        .output();
    made.unwrap().stdout
}

#[tokio::test]
async fn uploaded_files_are_copied() {
    let (api, guest) = Api::with_guest();
    let (template, _) = api.request_build(ACME, "web").await;
    let (plain, packed) = ("a".repeat(64), "b".repeat(64));
    for (hash, is_compressed) in [(&plain, false), (&packed, true)] {
        let path = format!("/templates/{template}/files/{hash}");
        let headers = [
            ("x-api-key", ACME),
            ("host", "node.example"),
            ("x-forwarded-proto", "https"),
        ];
        let link = api.send("GET", &path, &headers, "").await.ok(201);
        assert_eq!(link["present"], false);
        assert_eq!(
            put(&api, link["url"].as_str().unwrap(), archive(is_compressed)).await,
            200
        );
        let again = api.send("GET", &path, &headers, "").await.ok(201);
        assert_eq!(again["present"], true);
    }
    let place = tempfile::tempdir().unwrap();
    let copy = |from: &str, to: &str, mode: &str, hash: &str| {
        let to = format!("{}/{to}", place.path().display());
        json!({"type": "COPY", "args": [from, to, "", mode], "filesHash": hash})
    };
    let steps = vec![
        copy("app", "all", "", &packed),
        copy("notes.txt", "renamed", "0600", &plain),
        copy("./notes.txt", "into/", "", &plain),
        copy("app/lib/*.py", "matched", "", &packed),
        copy("notes.txt", "all", "", &plain),
    ];
    let built = api.build(ACME, "web", of_image(steps)).await;
    assert_eq!(built["status"], "ready", "{built}");
    for (file, text) in [
        ("all/main.py", "main"),
        ("all/lib/x.py", "x"),
        ("renamed", "notes"),
        ("into/notes.txt", "notes"),
        ("matched/x.py", "x"),
        ("all/notes.txt", "notes"),
    ] {
        assert_eq!(
            std::fs::read_to_string(place.path().join(file)).unwrap(),
            text,
            "{file}"
        );
    }
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(place.path().join("renamed"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    let left = std::fs::read_dir(guest.root()).unwrap().flatten();
    let left = left.filter(|entry| entry.file_name().to_string_lossy().starts_with(".copy"));
    assert_eq!(left.count(), 0, "nothing of the archives is left in the guest");
    let missing = api
        .build(ACME, "web", of_image(vec![copy("nothing", "x", "", &plain)]))
        .await;
    assert_eq!(missing["reason"]["step"], "1", "{missing}");
    assert!(
        missing["reason"]["message"]
            .as_str()
            .unwrap()
            .contains("./nothing"),
        "{missing}"
    );
}

#[tokio::test]
async fn build_that_cannot_be_is_refused_at_once() {
    let (api, _guest) = Api::with_guest();
    for (body, status, word) in [
        (json!({}), 400, "name"),
        (json!({"name": "a b"}), 400, "name"),
        (json!({"name": "base"}), 409, "configuration"),
        (json!({"name": "web:a:b"}), 400, "tags"),
        (json!({"name": "web", "cpuCount": 99}), 400, "cpus"),
        (json!({"name": "web", "memoryMB": 1}), 400, "memory"),
        (
            json!({"name": "web", "minFreeDiskMb": 4_000_000}),
            400,
            "minFreeDiskMb",
        ),
        (json!({"name": "web", "colour": "blue"}), 400, "colour"),
    ] {
        let refused = api.ask(ACME, "POST", "/v3/templates", body.clone()).await;
        let message = refused.refused(status, &body.to_string());
        assert!(message.contains(word), "{body}: {message}");
    }
    let (template, build) = api.request_build(ACME, "web").await;
    let path = format!("/v2/templates/{template}/builds/{build}");
    let files = "a".repeat(64);
    for (body, status, word) in [
        (json!({}), 400, "fromImage"),
        (
            json!({"fromImage": "x", "fromTemplate": "base"}),
            400,
            "fromTemplate",
        ),
        (json!({"fromTemplate": "nothing"}), 404, "nothing"),
        (json!({"fromImage": "oci:/etc"}), 403, "image"),
        (
            json!({"fromImage": "x", "fromImageRegistry": {"type": "registry"}}),
            501,
            "fromImageRegistry",
        ),
        (of_image(vec![step("CMD", &["x"])]), 400, "step 1"),
        (
            of_image(vec![
                json!({"type": "COPY", "args": ["a", "/a"], "filesHash": files}),
            ]),
            400,
            "not uploaded",
        ),
    ] {
        let refused = api.ask(ACME, "POST", &path, body.clone()).await;
        let message = refused.refused(status, &body.to_string());
        assert!(message.contains(word), "{body}: {message}");
    }
    assert_eq!(api.fake.made(), 0);
    api.ask(ACME, "POST", &path, of_image(vec![])).await.ok(202);
    let again = api.ask(ACME, "POST", &path, of_image(vec![])).await;
    again.refused(409, "a build that has begun");
}

#[tokio::test]
async fn template_of_another_tenant_is_not_there_on_any_call() {
    let (api, _guest) = Api::with_guest();
    let built = api.build(ACME, "web", of_image(vec![])).await;
    let text = |field: &str| built[field].as_str().unwrap().to_owned();
    let (id, build, hash) = (text("templateID"), text("buildID"), "a".repeat(64));
    let files = format!("/files/{hash}");
    let calls = [
        ("GET", String::new(), Value::Null),
        ("DELETE", String::new(), Value::Null),
        ("PATCH", String::new(), json!({"public": true})),
        ("GET", "/tags".into(), Value::Null),
        ("GET", files, Value::Null),
        ("GET", format!("/builds/{build}/status"), Value::Null),
        ("GET", format!("/builds/{build}/logs"), Value::Null),
    ];
    for wanted in [id.as_str(), "web"] {
        for (method, rest, body) in &calls {
            let path = format!("/templates/{wanted}{rest}");
            api.ask(OTHER, method, &path, body.clone())
                .await
                .refused(404, &path);
        }
        let path = format!("/v2/templates/{wanted}/builds/{build}");
        api.ask(OTHER, "POST", &path, of_image(vec![]))
            .await
            .refused(404, &path);
        for (method, body) in [
            ("POST", json!({"target": wanted, "tags": ["x"]})),
            ("DELETE", json!({"name": wanted, "tags": ["default"]})),
        ] {
            api.ask(OTHER, method, "/templates/tags", body)
                .await
                .refused(404, method);
        }
        let alias = format!("/templates/aliases/{wanted}");
        api.ask(OTHER, "GET", &alias, Value::Null)
            .await
            .refused(404, &alias);
        let body = json!({"templateID": wanted});
        api.ask(OTHER, "POST", "/v2/sandboxes", body)
            .await
            .refused(404, wanted);
    }
    // Each tenant has names of its own.
    let theirs = api.build(OTHER, "web", of_image(vec![])).await;
    assert_ne!(theirs["templateID"], built["templateID"]);
    // A public one is there for creations, by its id.
    let path = format!("/v2/templates/{id}");
    let changed = api
        .ask(ACME, "PATCH", &path, json!({"public": true}))
        .await
        .ok(200);
    assert_eq!(changed["names"], json!(["web"]));
    let made = api
        .ask(OTHER, "POST", "/v2/sandboxes", json!({"templateID": id}))
        .await
        .ok(201);
    let made = api.daemon.cache.get(made["sandboxID"].as_str().unwrap()).unwrap();
    assert_eq!(made.tenant.as_deref(), Some("other"));
    let delete = format!("/templates/{id}");
    api.ask(OTHER, "DELETE", &delete, Value::Null)
        .await
        .refused(404, "a public template");
}

#[tokio::test]
async fn log_is_read_in_pieces_and_backwards() {
    let (api, _guest) = Api::with_guest();
    let run = step(
        "RUN",
        &["for n in $(seq 150); do echo line $n; done; echo bad >&2"],
    );
    let built = api.build(ACME, "web", of_image(vec![run])).await;
    let text = |field: &str| built[field].as_str().unwrap().to_owned();
    let path = format!("/templates/{}/builds/{}", text("templateID"), text("buildID"));
    let mut all: Vec<String> = Vec::new();
    loop {
        let next = format!("{path}/status?logsOffset={}", all.len());
        let status = api.ask(ACME, "GET", &next, Value::Null).await.ok(200);
        let new = messages(&status);
        if new.is_empty() {
            break;
        }
        assert!(new.len() <= 100);
        all.extend(new.into_iter().map(str::to_owned));
    }
    let lines: Vec<_> = all.iter().filter(|line| line.starts_with("line ")).collect();
    assert_eq!((lines.len(), lines[149].as_str()), (150, "line 150"));
    let warned = api
        .ask(ACME, "GET", &format!("{path}/logs?level=warn"), Value::Null)
        .await
        .ok(200);
    assert_eq!(warned["logs"][0]["message"], "bad");
    let backward = format!("{path}/logs?direction=backward&limit=1");
    let back = api.ask(ACME, "GET", &backward, Value::Null).await;
    assert_eq!(
        back.ok(200)["logs"][0]["message"].as_str(),
        all.last().map(String::as_str)
    );
}
