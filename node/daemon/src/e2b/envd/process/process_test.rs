use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use thaw_protocol::connect::envelope::Envelope;
use thaw_protocol::e2b::process::process_event::{Event, data_event::Output};
use thaw_protocol::e2b::process::{ListRequest, ListResponse, ProcessConfig, StartRequest, StartResponse};

use crate::e2b::context::Context;
use crate::e2b::envd::test_client::{Bed, Frames, SOON, STREAM};

fn script(text: &str, more: Value) -> Value {
    let mut message = json!({"process": {"cmd": "/bin/sh", "args": ["-c", text]}, "stdin": true});
    let fields = more.as_object().cloned().unwrap_or_default();
    message.as_object_mut().unwrap().extend(fields);
    message
}

async fn start(bed: &Bed, headers: &[(&str, &str)], message: Value) -> (u64, Frames) {
    let mut frames = bed.open("/process.Process/Start", headers, message).await;
    let first = frames.message().await.unwrap();
    (first["event"]["start"]["pid"].as_u64().unwrap(), frames)
}

/// The output of a stream, and its exit code.
async fn output(frames: Frames, kind: &str) -> (Vec<u8>, Value) {
    let (messages, error) = frames.all().await;
    assert_eq!(error, Value::Null);
    let mut output = Vec::new();
    for message in &messages {
        if let Some(data) = message["event"]["data"][kind].as_str() {
            output.extend(STANDARD.decode(data).unwrap());
        }
    }
    (output, messages.last().unwrap()["event"]["end"].clone())
}

async fn call(bed: &Bed, method: &str, message: Value) -> (u16, Value) {
    bed.call(&format!("/process.Process/{method}"), message).await
}

/// Waits until this is so.
async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    let waiting = async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(SOON, waiting).await.unwrap();
}

async fn is_kept(bed: &Bed, pid: u64) -> bool {
    let list = crate::api::fake::Guest::processes(bed.guest.as_ref())
        .list()
        .await
        .unwrap();
    list.iter().any(|info| info.pid as u64 == pid && info.kept)
}

#[tokio::test]
async fn process_runs_and_its_events_come() {
    let bed = Bed::new().await;
    let message = json!({"process": {"cmd": "/bin/sh", "args": ["-c", "echo $A $LOCAL_USER; pwd >&2; exit 3"],
        "envs": {"A": "1"}, "cwd": "~"}, "stdin": false});
    let user = [("authorization", "Basic cm9vdDo=")];
    let (_, frames) = start(&bed, &user, message).await;
    let (messages, error) = frames.all().await;
    assert_eq!(error, Value::Null);
    let text = messages.iter().map(Value::to_string).collect::<String>();
    assert!(text.contains(&STANDARD.encode("1 root\n")), "{text}");
    assert!(text.contains("stderr"), "{text}");
    let end = &messages.last().unwrap()["event"]["end"];
    let expected =
        json!({"exitCode": 3, "exited": true, "status": "exit status 3", "error": "exit status 3"});
    assert_eq!(end, &expected);
}

#[tokio::test]
async fn process_starts_as_the_template_says() {
    let bed = Bed::of_template(Context {
        env: [("A", "1"), ("B", "2")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
        workdir: Some("/root".into()),
        user: Some("user".into()),
    })
    .await;
    let text = "echo $A $B $LOCAL_USER ${PWD##*/}";
    let asked = json!({"process": {"cmd": "/bin/sh", "args": ["-c", text], "envs": {"B": "3"}}});
    let (_, frames) = start(&bed, &[], asked.clone()).await;
    assert_eq!(output(frames, "stdout").await.0, b"1 3 user root\n");
    // A caller takes precedence.
    let headers = [("authorization", "Basic cm9vdDo=")];
    let mut elsewhere = asked;
    elsewhere["process"]["cwd"] = "/etc".into();
    let (_, frames) = start(&bed, &headers, elsewhere).await;
    assert_eq!(output(frames, "stdout").await.0, b"1 3 root etc\n");
}

#[tokio::test]
async fn protobuf_clients_get_protobuf() {
    let bed = Bed::new().await;
    let request = StartRequest {
        process: Some(ProcessConfig {
            cmd: "/bin/echo".into(),
            args: vec!["hi".into()],
            ..ProcessConfig::default()
        }),
        stdin: Some(false),
        ..StartRequest::default()
    };
    let body = Envelope::encode(false, &prost::Message::encode_to_vec(&request)).unwrap();
    let headers = [("content-type", "application/connect+proto")];
    let response = bed
        .send(bed.request("POST", "/process.Process/Start", &headers, body))
        .await;
    assert_eq!(response.headers()["content-type"], "application/connect+proto");
    let mut frames = Frames::of(response);
    let mut events = Vec::new();
    loop {
        let frame = frames.next().await;
        if frame.is_last {
            assert_eq!(frame.data, b"{}");
            break;
        }
        let message: StartResponse = prost::Message::decode(&frame.data[..]).unwrap();
        events.push(message.event.unwrap().event.unwrap());
    }
    assert!(matches!(&events[0], Event::Start(start) if start.pid > 0));
    let data = Some(Output::Stdout(b"hi\n".to_vec()));
    assert!(matches!(&events[1], Event::Data(event) if event.output == data));
    assert!(matches!(&events[2], Event::End(end) if end.exit_code == 0 && end.error.is_none()));
    let list: ListResponse = bed.call_proto("/process.Process/List", &ListRequest {}).await;
    assert!(list.processes.is_empty());
}

#[tokio::test]
async fn long_output_is_whole_however_slowly_it_is_read() {
    let bed = Bed::new().await;
    let (pid, frames) = start(&bed, &[], script("head -c 3000000 /dev/zero", json!({}))).await;
    // It waits for its reader, and is not taken for one without.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!is_kept(&bed, pid).await);
    let (bytes, end) = output(frames, "stdout").await;
    assert_eq!((bytes.len(), &end["exited"]), (3_000_000, &json!(true)));
}

#[tokio::test]
async fn input_reaches_the_process_in_order() {
    let bed = Bed::new().await;
    let (pid, frames) = start(&bed, &[], script("cat", json!({"tag": "cat"}))).await;
    let (status, _) = call(
        &bed,
        "SendInput",
        json!({"process": {"pid": pid}, "input": {"stdin": "YQ=="}}),
    )
    .await;
    assert_eq!(status, 200);
    let messages = [
        json!({"start": {"process": {"tag": "cat"}}}),
        json!({"data": {"input": {"stdin": "Yg=="}}}),
        json!({"keepalive": {}}),
        json!({"data": {"input": {"stdin": "Yw=="}}}),
    ];
    let frames_of = |messages: &[Value]| -> Vec<u8> {
        let encode = |message: &Value| Envelope::encode(false, message.to_string().as_bytes()).unwrap();
        messages.iter().flat_map(encode).collect()
    };
    let send = async |messages: &[Value]| {
        let headers = [("content-type", STREAM)];
        let request = bed.request(
            "POST",
            "/process.Process/StreamInput",
            &headers,
            frames_of(messages),
        );
        Frames::of(bed.send(request).await).all().await
    };
    assert_eq!(send(&messages).await, (vec![json!({})], Value::Null));
    let twice = [&messages[..1], &messages[..1]].concat();
    for bad in [&messages[1..], &messages[..0], &twice[..]] {
        assert_eq!(send(bad).await.1["code"], "invalid_argument");
    }
    let (status, refused) = call(
        &bed,
        "SendInput",
        json!({"process": {"pid": pid}, "input": {"pty": "YQ=="}}),
    )
    .await;
    assert_eq!((status, &refused["code"]), (400, &json!("invalid_argument")));
    let (status, _) = call(&bed, "CloseStdin", json!({"process": {"pid": pid}})).await;
    assert_eq!(status, 200);
    assert_eq!(output(frames, "stdout").await.0, b"abc");
}

#[tokio::test]
async fn processes_are_listed_and_signalled_by_pid_or_tag() {
    let bed = Bed::new().await;
    let (pid, frames) = start(&bed, &[], script("exec sleep 60", json!({"tag": "t"}))).await;
    let (_, list) = call(&bed, "List", json!({})).await;
    let listed = &list["processes"][0];
    assert_eq!((&listed["pid"], &listed["tag"]), (&json!(pid), &json!("t")));
    assert_eq!(listed["config"]["args"], json!(["-c", "exec sleep 60"]));
    for (bad, status) in [
        (json!({"process": {"pid": pid}}), 400),
        (json!({"process": {"pid": 1}, "signal": "SIGNAL_SIGKILL"}), 404),
        (
            json!({"process": {"tag": "other"}, "signal": "SIGNAL_SIGKILL"}),
            404,
        ),
        (json!({"signal": "SIGNAL_SIGKILL"}), 400),
        (json!({"process": {"pid": pid}, "signal": 1}), 400),
    ] {
        assert_eq!(call(&bed, "SendSignal", bad.clone()).await.0, status, "{bad}");
    }
    let kill = json!({"process": {"tag": "t"}, "signal": "SIGNAL_SIGTERM"});
    assert_eq!(call(&bed, "SendSignal", kill).await.0, 200);
    assert_eq!(output(frames, "stdout").await.1["exitCode"], 143);
    until(async || call(&bed, "List", json!({})).await.1 == json!({})).await;
    let (_, error) = bed
        .open("/process.Process/Connect", &[], json!({"process": {"pid": pid}}))
        .await
        .all()
        .await;
    assert_eq!(error["code"], "not_found");
}

#[tokio::test]
async fn process_outlives_its_caller_and_is_read_again() {
    let bed = Bed::new().await;
    let (pid, frames) = start(&bed, &[], script("read x; echo $x; read x; echo $x", json!({}))).await;
    let selector = json!({"process": {"pid": pid}});
    // A second reader, beside the first.
    let mut second = bed.open("/process.Process/Connect", &[], selector.clone()).await;
    assert_eq!(second.message().await.unwrap()["event"]["start"]["pid"], pid);
    drop(frames);
    let line = |text: &str| json!({"process": {"pid": pid}, "input": {"stdin": STANDARD.encode(text)}});
    call(&bed, "SendInput", line("one\n")).await;
    let heard = second.message().await.unwrap();
    assert_eq!(heard["event"]["data"]["stdout"], STANDARD.encode("one\n"));
    drop(second);
    until(async || is_kept(&bed, pid).await).await;
    call(&bed, "SendInput", line("two\n")).await;
    let third = bed.open("/process.Process/Connect", &[], selector).await;
    let (text, end) = output(third, "stdout").await;
    assert_eq!(
        (&text[..], &end["status"]),
        (&b"two\n"[..], &json!("exit status 0"))
    );
}

#[tokio::test]
async fn output_without_a_reader_is_lost_if_the_guest_is_full() {
    let bed = Bed::new().await;
    bed.guest
        .local_processes()
        .is_full
        .store(true, std::sync::atomic::Ordering::SeqCst);
    let endless = "while :; do head -c 100000 /dev/zero; echo; read x; echo $x; done";
    let (pid, frames) = start(&bed, &[], script(endless, json!({}))).await;
    drop(frames);
    // More than its pipe holds, so it would wait if nothing read it.
    let line = json!({"process": {"pid": pid}, "input": {"stdin": STANDARD.encode("x\n")}});
    for _ in 0..10 {
        assert_eq!(call(&bed, "SendInput", line.clone()).await.0, 200);
    }
    let mut again = bed
        .open("/process.Process/Connect", &[], json!({"process": {"pid": pid}}))
        .await;
    again.message().await.unwrap();
    call(&bed, "SendInput", line).await;
    assert!(again.message().await.unwrap()["event"]["data"]["stdout"].is_string());
}

#[tokio::test]
async fn deadline_kills_the_process_and_ends_the_stream() {
    let bed = Bed::new().await;
    let timeout = [("connect-timeout-ms", "300")];
    let (pid, frames) = start(&bed, &timeout, script("exec sleep 60", json!({}))).await;
    let (messages, error) = frames.all().await;
    assert!(messages.is_empty());
    assert_eq!(error["code"], "deadline_exceeded");
    until(async || {
        !call(&bed, "List", json!({}))
            .await
            .1
            .to_string()
            .contains(&pid.to_string())
    })
    .await;
}

#[tokio::test]
async fn silent_streams_are_kept_alive() {
    let bed = Bed::new().await;
    let interval = [("keepalive-ping-interval", "1")];
    let (pid, mut frames) = start(&bed, &interval, script("exec sleep 60", json!({}))).await;
    assert_eq!(
        frames.message().await.unwrap(),
        json!({"event": {"keepalive": {}}})
    );
    let kill = json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"});
    assert_eq!(call(&bed, "SendSignal", kill).await.0, 200);
}

#[tokio::test]
async fn thawds_end_lets_processes_go_on() {
    let bed = Bed::new().await;
    let (pid, frames) = start(&bed, &[], script("read x; echo $x", json!({}))).await;
    bed.daemon.end();
    let (_, error) = frames.all().await;
    assert_eq!(error["code"], "unavailable");
    tokio::time::timeout(SOON, bed.daemon.release()).await.unwrap();
    assert!(is_kept(&bed, pid).await);
}

#[tokio::test]
async fn processes_of_others_are_listed_and_read() {
    let bed = Bed::new().await;
    let options = thaw_sandbox::container::Options {
        command: vec!["/bin/sh".into(), "-c".into(), "read x; echo $x".into()],
        ..Default::default()
    };
    let process = crate::api::fake::Guest::exec(bed.guest.as_ref(), options)
        .await
        .unwrap();
    let (_, list) = call(&bed, "List", json!({})).await;
    let pid = &list["processes"][0]["pid"];
    assert_eq!(list["processes"][0]["config"]["cmd"], "/bin/sh");
    let frames = bed
        .open("/process.Process/Connect", &[], json!({"process": {"pid": pid}}))
        .await;
    process.write(b"hi\n".to_vec()).await.unwrap();
    assert_eq!(output(frames, "stdout").await.0, b"hi\n");
}

#[tokio::test]
async fn terminals_have_sizes_and_their_own_output() {
    let bed = Bed::new().await;
    let size = |rows: u32| json!({"pty": {"size": {"cols": 80, "rows": rows}}});
    let (pid, frames) = start(&bed, &[], script("read x; echo got $x", size(24))).await;
    let mut update = size(30);
    update["process"] = json!({"pid": pid});
    assert_eq!(call(&bed, "Update", update.clone()).await.0, 200);
    update["pty"]["size"]["rows"] = json!(0);
    assert_eq!(call(&bed, "Update", update).await.0, 400);
    assert_eq!(*bed.guest.local_processes().sizes.lock().unwrap(), [(30, 80)]);
    let selector = json!({"pid": pid});
    let (status, refused) = call(&bed, "CloseStdin", json!({"process": selector})).await;
    assert_eq!((status, &refused["code"]), (400, &json!("failed_precondition")));
    let typed = json!({"process": selector, "input": {"pty": STANDARD.encode("x\n")}});
    assert_eq!(call(&bed, "SendInput", typed).await.0, 200);
    let (text, _) = output(frames, "pty").await;
    assert!(String::from_utf8_lossy(&text).contains("got x"));
}

#[tokio::test]
async fn commands_that_cannot_be_are_refused() {
    let bed = Bed::new().await;
    let refused = async |message: Value, headers: &[(&str, &str)]| {
        let (messages, error) = bed
            .open("/process.Process/Start", headers, message)
            .await
            .all()
            .await;
        assert!(messages.is_empty());
        error["code"].as_str().unwrap_or_default().to_owned()
    };
    for bad in [
        json!({}),
        json!({"process": {"cmd": ""}}),
        json!({"process": {"cmd": "/no/such/program"}}),
        json!({"process": {"cmd": "a", "envs": {"": "x"}}}),
        json!({"process": {"cmd": "a", "cwd": "/a\u{0}"}}),
        json!({"process": {"cmd": "a", "args": ["x".repeat(1 << 20)]}}),
        json!({"process": {"cmd": "a"}, "pty": {"size": {"cols": 70000, "rows": 1}}}),
        json!({"process": {"cmd": "a"}, "tag": "x".repeat(300)}),
        json!({"process": 1}),
    ] {
        assert_eq!(refused(bad, &[]).await, "invalid_argument");
    }
    let good = json!({"process": {"cmd": "true"}});
    assert_eq!(
        refused(good.clone(), &[("connect-protocol-version", "2")]).await,
        "invalid_argument"
    );
    assert_eq!(
        refused(good.clone(), &[("connect-content-encoding", "br")]).await,
        "unimplemented"
    );
    assert_eq!(
        refused(good, &[("keepalive-ping-interval", "0")]).await,
        "invalid_argument"
    );
}
