//! Hooks: they end in time whatever they do, and say why they failed. The generation file: it changes with each identity.

use std::time::{Duration, Instant};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use thaw_protocol::agent::MessageField;
use thaw_protocol::agent::hooks::run_hook_response::Outcome;
use thaw_protocol::agent::hooks::*;
use thaw_protocol::agent::hooks_ttrpc::HooksClient;
use thaw_protocol::handshake::Greeting;
use ttrpc::Code;

use super::support::{Guest, bind, code_of, context, exec_request, identity, spec};
use super::with_guest;

async fn client(g: &Guest) -> HooksClient {
    let address = format!("unix://{}", g.dir().join("1024").display());
    HooksClient::new(ttrpc::r#async::Client::connect(&address).await.unwrap())
}

/// A hook that runs this line of a shell.
fn line(line: &str, timeout_ms: u32) -> RunHookRequest {
    RunHookRequest {
        container_id: "c".into(),
        process: exec_request("c", "", &["sh", "-c", line]).process,
        timeout_ms,
        ..Default::default()
    }
}

fn post(port: u32, path: &str, timeout_ms: u32) -> RunHookRequest {
    RunHookRequest {
        container_id: "c".into(),
        http: MessageField::some(HttpHook {
            port,
            path: path.into(),
            ..Default::default()
        }),
        timeout_ms,
        ..Default::default()
    }
}

/// Starts a container that runs this line, and returns a client for its hooks.
async fn begin(g: &Guest, script: &str) -> HooksClient {
    g.create("c", spec(g, &["sh", "-c", script])).await.unwrap();
    g.start("c").await.unwrap();
    client(g).await
}

/// Waits until so many of the hooks' sleeps are there: what is killed may take a moment to end.
async fn wait_for_sleeps(g: &Guest, expected: u32) {
    let since = Instant::now();
    // The pattern does not match the command lines that it is in itself.
    let count = ["sh", "-c", "busybox ps -o args | grep -c '[s]leep 99'; true"];
    for number in 0.. {
        let id = format!("count{expected}n{number}");
        g.exec("c", &id, &count, false).await.unwrap();
        let counted = String::from_utf8(g.read_all("c", &id, false).await).unwrap();
        if counted == format!("{expected}\n") {
            break;
        }
        assert!(
            since.elapsed() < Duration::from_secs(30),
            "{counted:?} for {expected}"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn run(client: &HooksClient, request: &RunHookRequest) -> (Outcome, String, Vec<u8>) {
    let told = client.run(context(), request).await.unwrap();
    (told.outcome.unwrap(), told.failure, told.output)
}

#[test]
fn hook_runs_in_the_container_and_tells_its_end() {
    with_guest(|g| async move {
        let client = begin(&g, "sleep 1000").await;
        let told = run(&client, &line("cat && echo $$ >/tmp/ran", 60_000)).await;
        assert_eq!(told, (Outcome::SUCCEEDED, String::new(), Vec::new()));
        g.exec("c", "e", &["cat", "/tmp/ran"], false).await.unwrap();
        assert!(!g.read_all("c", "e", false).await.is_empty());

        let (outcome, why, output) = run(&client, &line("echo out; echo err >&2; exit 3", 60_000)).await;
        assert_eq!((outcome, why.as_str()), (Outcome::FAILED, "it exited with 3"));
        let output = String::from_utf8(output).unwrap();
        assert!(output.contains("out\n") && output.contains("err\n"), "{output}");
        let (_, why, _) = run(&client, &line("kill -9 $$", 60_000)).await;
        assert_eq!(why, "it was ended by signal 9");

        // The end of a long output, all of which is read.
        let long = "i=0; while [ $i -lt 40000 ]; do echo $i; i=$((i+1)); done; exit 1";
        let (_, _, output) = run(&client, &line(long, 60_000)).await;
        assert!(output.len() == 4096 && output.ends_with(b"39998\n39999\n"));
        g.remove("c").await.unwrap();
        g.assert_clean().await;
    });
}

#[test]
fn hook_that_hangs_is_killed_with_its_group() {
    with_guest(|g| async move {
        let client = begin(&g, "sleep 1000").await;
        let hangs = "trap '' TERM INT HUP; sleep 998 & sleep 999 & echo begun; wait; wait";
        let since = Instant::now();
        let (outcome, why, output) = run(&client, &line(hangs, 3000)).await;
        assert_eq!((outcome, output), (Outcome::TIMED_OUT, b"begun\n".to_vec()));
        assert_eq!(why, "it did not end within 3000 ms, and was killed");
        assert!(since.elapsed() < Duration::from_secs(30));
        // Also one that fills its output, and one whose caller is gone.
        let (outcome, _, output) = run(&client, &line("busybox yes", 3000)).await;
        assert_eq!((outcome, output.len()), (Outcome::TIMED_OUT, 4096));
        let short = ttrpc::context::with_duration(Duration::from_millis(50));
        assert!(client.run(short, &line("sleep 997", 3000)).await.is_err());
        wait_for_sleeps(&g, 0).await;

        // A process that it leaves behind on purpose goes on, and delays no answer.
        let since = Instant::now();
        let (outcome, _, _) = run(&client, &line("sleep 996 & exit 0", 60_000)).await;
        assert_eq!(outcome, Outcome::SUCCEEDED);
        assert!(since.elapsed() < Duration::from_secs(10));
        wait_for_sleeps(&g, 1).await;

        // A daemon has a process group of its own, so it outlives the time limit too. It ends with the container.
        let (outcome, _, _) = run(&client, &line("busybox setsid sleep 995 & sleep 994", 3000)).await;
        assert_eq!(outcome, Outcome::TIMED_OUT);
        wait_for_sleeps(&g, 2).await;
        g.remove("c").await.unwrap();
        g.assert_clean().await;
    });
}

#[test]
fn request_succeeds_by_its_status() {
    with_guest(|g| async move {
        let serve = |status: &str, port: u16| {
            let answer = format!("HTTP/1.1 {status}\\r\\nConnection: close\\r\\n\\r\\nwhy not\\n");
            format!(
                "while :; do printf '{answer}' | busybox nc -l -p {port} | head -c 20 >>/tmp/asked-{port}; done & "
            )
        };
        let silent = "busybox nc -l -p 8003 -e sleep 1000 & ";
        let script = serve("204 No Content", 8001) + &serve("503 Busy", 8002) + silent + "echo up; wait";
        let client = begin(&g, &script).await;
        g.read_until("c", "c", "up\n").await;
        let eventually = async |request: &RunHookRequest| loop {
            match run(&client, request).await {
                (Outcome::FAILED, why, _) if why.starts_with("nothing accepts") => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                told => break told,
            }
        };
        let (outcome, why, _) = eventually(&post(8001, "/thawed?x=1", 10_000)).await;
        assert_eq!(outcome, Outcome::SUCCEEDED, "{why}");
        let (outcome, why, output) = eventually(&post(8002, "/thawed", 10_000)).await;
        assert_eq!(
            (outcome, why.as_str()),
            (Outcome::FAILED, "port 8002 answered 503 to POST /thawed")
        );
        assert_eq!(output, b"why not\n");
        let (outcome, why, _) = eventually(&post(8003, "/", 300)).await;
        assert_eq!(outcome, Outcome::TIMED_OUT);
        assert_eq!(why, "POST / was not answered on port 8003 within 300 ms");
        let (outcome, why, _) = run(&client, &post(8004, "/", 10_000)).await;
        assert_eq!(
            (outcome, why.as_str()),
            (
                Outcome::FAILED,
                "nothing accepts connections on port 8004 of localhost"
            )
        );
        // It is answered before what it asked is written.
        let asked = "until [ $(wc -c < /tmp/asked-8001) -ge 20 ]; do :; done; head -c 20 /tmp/asked-8001";
        g.exec("c", "e", &["sh", "-c", asked], false).await.unwrap();
        assert_eq!(g.read_all("c", "e", false).await, b"POST /thawed?x=1 HTT");
        g.remove("c").await.unwrap();
        g.assert_clean().await;
    });
}

#[test]
fn invalid_hooks_are_refused_and_stopped_guests_start_none() {
    with_guest(|g| async move {
        let client = client(&g).await;
        g.create("c", spec(&g, &["sleep", "1000"])).await.unwrap();
        let early = client.run(context(), &line("true", 1000)).await.unwrap_err();
        assert_eq!(code_of(&early), Code::FAILED_PRECONDITION, "{early}");
        let early = client.run(context(), &post(1, "/", 1000)).await.unwrap_err();
        assert_eq!(code_of(&early), Code::FAILED_PRECONDITION, "{early}");
        g.start("c").await.unwrap();
        let mut both = line("true", 1000);
        both.http = post(1, "/", 1).http;
        let mut elsewhere = line("true", 1000);
        elsewhere.container_id = "nobody".into();
        for bad in [
            line("true", 0),
            line("true", 600_001),
            post(0, "/", 1000),
            post(65_536, "/", 1000),
            post(1, "thawed", 1000),
            post(1, "/\r\nX: y", 1000),
            both,
            elsewhere,
            RunHookRequest {
                process: MessageField::none(),
                ..line("true", 1000)
            },
        ] {
            let e = client.run(context(), &bad).await.unwrap_err();
            assert_eq!(code_of(&e), Code::INVALID_ARGUMENT, "{bad:?}: {e}");
        }
        let mut missing = line("true", 1000);
        missing.process.mut_or_insert_default().Args = vec!["/missing".into()];
        let e = client.run(context(), &missing).await.unwrap_err();
        assert_eq!(code_of(&e), Code::NOT_FOUND, "{e}");

        g.greet(&Greeting::Quiesce);
        let late = client.run(context(), &line("true", 200)).await.unwrap_err();
        assert!(late.to_string().contains("within 200 ms"), "{late}");
        g.greet(&Greeting::Continue);
        assert_eq!(run(&client, &line("true", 60_000)).await.0, Outcome::SUCCEEDED);
        g.remove("c").await.unwrap();
        g.assert_clean().await;
    });
}

#[test]
fn generation_changes_with_each_identity() {
    with_guest(|g| async move {
        let generation = "/run/thaw/generation";
        let mut s = spec(&g, &["sleep", "1000"]);
        s.Mounts.push(bind(generation, generation, &["bind", "ro"]));
        g.create("c", s).await.unwrap();
        g.start("c").await.unwrap();
        let mut seen = Vec::new();
        for n in 8..11 {
            let id = format!("e{n}");
            g.exec("c", &id, &["cat", generation], false).await.unwrap();
            let text = String::from_utf8(g.read_all("c", &id, false).await).unwrap();
            let digits = text.trim_end_matches('\n');
            assert!(text.len() == 33 && digits.len() == 32, "{text:?}");
            assert!(digits.bytes().all(|b| b.is_ascii_hexdigit()) && !seen.contains(&text));
            seen.push(text);
            g.greet(&Greeting::Quiesce);
            assert_eq!(g.becomes(identity(n)).failure, None);
        }
        let write = format!("echo x >{generation} || echo refused");
        g.exec("c", "w", &["sh", "-c", &write], false).await.unwrap();
        assert_eq!(g.read_all("c", "w", false).await, b"refused\n");

        // A program that watches the file is told.
        let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).unwrap();
        inotify::add_watch(&watch, g.path_in(generation), WatchFlags::CLOSE_WRITE).unwrap();
        let mut event = [0; 64];
        assert!(
            rustix::io::read(&watch, &mut event).is_err(),
            "nothing has changed yet"
        );
        assert_eq!(g.becomes(identity(11)).failure, None);
        assert!(rustix::io::read(&watch, &mut event).unwrap() > 0);
        g.remove("c").await.unwrap();
        g.assert_clean().await;
    });
}
