//! Tasks of a pod as containerd uses them, with fakes.

#![allow(clippy::unwrap_used)]

#[path = "tasks/abandoned.rs"]
mod abandoned;
#[path = "tasks/checkpoints.rs"]
mod checkpoints;
#[path = "tasks/exits.rs"]
mod exits;
#[path = "tasks/hooks.rs"]
mod hooks;
#[path = "tasks/shared.rs"]
mod shared;
mod shares;
#[path = "tasks/silent.rs"]
mod silent;
mod support;
#[path = "tasks/thawed.rs"]
mod thawed;

use serde_json::json;
use support::{Rig, code, fifo, member};
use thaw_protocol::shim::MessageField;
use thaw_protocol::shim::task::*;
use thaw_protocol::shim::task_types::Status;
use thaw_protocol::shim::{Any, Message};
use thaw_shim::thawd::Thawd;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use ttrpc::Code;
use ttrpc::context::Context;

/// Limit for waiting.
const LONG: std::time::Duration = std::time::Duration::from_secs(60);

#[tokio::test]
async fn task_publishes_events_and_its_delete_ends_the_machine() {
    let rig = Rig::new().await;
    let out = fifo(&rig.path("out"));
    let request = CreateTaskRequest {
        stdout: out.clone(),
        ..rig.request("one", &["echo", "hi"], json!({}))
    };
    let reading = tokio::spawn(async move { tokio::fs::read(out).await.unwrap() });
    rig.create(request.clone()).await.unwrap();
    assert_eq!(code(rig.create(request).await), Code::ALREADY_EXISTS);
    assert_eq!(rig.state("one", "").await.unwrap().status, Status::CREATED.into());
    let waiting = rig.wait("one", "");
    rig.start("one", "").await.unwrap();
    assert_eq!(waiting.await.unwrap(), 0);
    assert_eq!(code(rig.start("one", "").await), Code::FAILED_PRECONDITION);
    // The fifo ends with the output, before the task is deleted.
    assert_eq!(reading.await.unwrap(), b"hi\n");
    let state = rig.state("one", "").await.unwrap();
    assert_eq!((state.status, state.exit_status), (Status::STOPPED.into(), 0));
    assert!(state.exited_at.is_some());
    // A signal to an ended process is not found, whichever process it might hit.
    assert_eq!(code(rig.kill("one", "", libc::SIGTERM).await), Code::NOT_FOUND);
    assert_eq!(rig.delete("one", "").await.unwrap(), 0);
    assert_eq!(code(rig.delete("one", "").await), Code::NOT_FOUND);
    rig.shutdown(false).await;
    rig.ended().await;
    assert_eq!(*rig.thawd.ended.lock().unwrap(), ["sandbox-1"]);
    let made = rig.thawd.made.lock().unwrap()[0].clone();
    assert_eq!(made.client_pid, std::process::id() as i32);
    let created = rig.agent.created.lock().unwrap()[0].clone();
    assert!(
        created
            .storages
            .iter()
            .any(|s| s.options.contains(&"lowerdir=/run/thaw/images/1".to_owned()))
    );
}

#[tokio::test]
async fn events_come_once_and_in_order() {
    let rig = Rig::new().await;
    rig.create(rig.request("one", &["echo"], json!({})))
        .await
        .unwrap();
    rig.start("one", "").await.unwrap();
    rig.wait("one", "").await.unwrap();
    rig.delete("one", "").await.unwrap();
    let all = ["create one", "start one", "exit one 0", "delete one"];
    assert_eq!(rig.events(all.len()).await, all);
    rig.shutdown(false).await;
    rig.ended().await;
    assert_eq!(rig.events(all.len()).await, all);
}

#[tokio::test]
async fn hung_container_delays_no_other() {
    let rig = Rig::new().await;
    rig.pod(&["hung", "well"]).await;
    rig.agent.hung.lock().unwrap().insert("hung".into());
    let hung = |call: &'static str| {
        let client = rig.client.clone();
        tokio::spawn(async move {
            let id = "hung".to_owned();
            let context = Context::default();
            match call {
                "start" => drop(
                    client
                        .start(
                            context,
                            &StartRequest {
                                id,
                                ..Default::default()
                            },
                        )
                        .await,
                ),
                "stats" => drop(
                    client
                        .stats(
                            context,
                            &StatsRequest {
                                id,
                                ..Default::default()
                            },
                        )
                        .await,
                ),
                _ => drop(
                    client
                        .kill(
                            context,
                            &KillRequest {
                                id,
                                signal: 9,
                                ..Default::default()
                            },
                        )
                        .await,
                ),
            }
        })
    };
    let calls = ["start", "stats", "kill"].map(hung);
    while rig
        .agent
        .heard
        .lock()
        .unwrap()
        .iter()
        .filter(|call| call.ends_with(" hung"))
        .count()
        < 5
    {
        tokio::task::yield_now().await;
    }
    rig.start("well", "").await.unwrap();
    rig.exec("well", "e", &["echo"]).await.unwrap();
    rig.start("well", "e").await.unwrap();
    assert_eq!(rig.wait("well", "e").await.unwrap(), 0);
    rig.kill("well", "", libc::SIGKILL).await.unwrap();
    assert_eq!(rig.wait("well", "").await.unwrap(), 137);
    rig.delete("well", "").await.unwrap();
    // Calls that need no guest are answered for the hung container too.
    assert_eq!(
        rig.state("hung", "").await.unwrap().status,
        Status::CREATED.into()
    );
    assert!(calls.iter().all(|call| !call.is_finished()));
    calls.iter().for_each(|call| call.abort());
}

#[tokio::test]
async fn exec_has_its_own_life_and_its_id_is_reusable() {
    let rig = Rig::new().await;
    rig.create(rig.request("one", &["cat"], json!({}))).await.unwrap();
    assert_eq!(
        code(rig.exec("one", "e", &["echo"]).await),
        Code::FAILED_PRECONDITION
    );
    rig.start("one", "").await.unwrap();
    for _ in 0..2 {
        rig.exec("one", "e", &["echo", "x"]).await.unwrap();
        assert_eq!(code(rig.exec("one", "e", &["echo"]).await), Code::ALREADY_EXISTS);
        assert_eq!(code(rig.kill("one", "e", 9).await), Code::FAILED_PRECONDITION);
        rig.start("one", "e").await.unwrap();
        assert_eq!(rig.wait("one", "e").await.unwrap(), 0);
        assert_eq!(code(rig.kill("one", "e", 9).await), Code::NOT_FOUND);
        assert_eq!(rig.delete("one", "e").await.unwrap(), 0);
        assert_eq!(code(rig.state("one", "e").await), Code::NOT_FOUND);
    }
    rig.exec("one", "f", &["cat"]).await.unwrap();
    rig.start("one", "f").await.unwrap();
    assert_eq!(code(rig.delete("one", "f").await), Code::FAILED_PRECONDITION);
    rig.kill("one", "f", libc::SIGTERM).await.unwrap();
    assert_eq!(rig.wait("one", "f").await.unwrap(), 143);
    rig.exec("one", "g", &["missing"]).await.unwrap();
    assert_eq!(code(rig.start("one", "g").await), Code::NOT_FOUND);
    assert_eq!(rig.delete("one", "g").await.unwrap(), 127);
    rig.exec("one", "h", &["cat"]).await.unwrap();
    assert_eq!(rig.delete("one", "h").await.unwrap(), 0, "it was not started");
    rig.kill("one", "", libc::SIGKILL).await.unwrap();
    rig.wait("one", "").await.unwrap();
    let told = [
        "create one",
        "start one",
        "exec-added e",
        "exec-started e",
        "exit e 0",
        "exec-added e",
        "exec-started e",
        "exit e 0",
        "exec-added f",
        "exec-started f",
        "exit f 143",
        "exec-added g",
        "exec-added h",
        "exit one 137",
    ];
    assert_eq!(rig.events(told.len()).await, told);
}

#[tokio::test]
async fn pause_container_has_no_process() {
    let rig = Rig::new().await;
    rig.pod(&["a"]).await;
    rig.start("a", "").await.unwrap();
    assert!(
        !rig.agent
            .heard
            .lock()
            .unwrap()
            .iter()
            .any(|call| call.ends_with(" pause"))
    );
    assert_eq!(
        rig.state("pause", "").await.unwrap().status,
        Status::RUNNING.into()
    );
    assert_eq!(code(rig.exec("pause", "e", &["echo"]).await), Code::UNIMPLEMENTED);
    let stats = StatsRequest {
        id: "pause".into(),
        ..Default::default()
    };
    rig.client.stats(Context::default(), &stats).await.unwrap();
    // A signal that it would ignore does not end it.
    rig.kill("pause", "", libc::SIGUSR1).await.unwrap();
    rig.kill("a", "", libc::SIGKILL).await.unwrap();
    rig.wait("a", "").await.unwrap();
    rig.delete("a", "").await.unwrap();
    rig.shutdown(false).await;
    assert!(rig.serves(), "a task is there still");
    rig.kill("pause", "", libc::SIGKILL).await.unwrap();
    assert_eq!(rig.wait("pause", "").await.unwrap(), 137);
    assert_eq!(rig.delete("pause", "").await.unwrap(), 137);
    rig.shutdown(false).await;
    rig.ended().await;
    // There is one machine for all of them.
    assert_eq!(rig.thawd.made.lock().unwrap().len(), 1);
    assert_eq!(*rig.thawd.ended.lock().unwrap(), ["sandbox-1"]);
}

#[tokio::test]
async fn oom_event_precedes_the_exit_it_caused() {
    let rig = Rig::new().await;
    rig.create(rig.request("one", &["cat"], json!({}))).await.unwrap();
    rig.start("one", "").await.unwrap();
    rig.agent.run_out_of_memory("one");
    assert_eq!(rig.wait("one", "").await.unwrap(), 137);
    let told = ["create one", "start one", "oom one", "exit one 137"];
    assert_eq!(rig.events(told.len()).await, told);
}

#[tokio::test]
async fn machine_ends_with_its_only_container_but_a_pod_does_not() {
    let rig = Rig::new().await;
    let out = fifo(&rig.path("out"));
    let request = CreateTaskRequest {
        stdout: out.clone(),
        ..rig.request("one", &["echo", "hi"], json!({}))
    };
    rig.create(request).await.unwrap();
    rig.start("one", "").await.unwrap();
    assert_eq!(rig.wait("one", "").await.unwrap(), 0);
    assert!(
        rig.thawd.ended.lock().unwrap().is_empty(),
        "its output is still there"
    );
    assert_eq!(tokio::fs::read(out).await.unwrap(), b"hi\n");
    let ended = async {
        while rig.thawd.ended.lock().unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LONG, ended).await.unwrap();
    assert_eq!(rig.delete("one", "").await.unwrap(), 0);
    assert_eq!(*rig.thawd.ended.lock().unwrap(), ["sandbox-1"], "once");

    let rig = Rig::new().await;
    rig.pod(&["a", "b"]).await;
    rig.start("a", "").await.unwrap();
    rig.kill("a", "", libc::SIGKILL).await.unwrap();
    rig.wait("a", "").await.unwrap();
    rig.delete("a", "").await.unwrap();
    assert!(rig.thawd.ended.lock().unwrap().is_empty());
}

#[tokio::test]
async fn every_task_ends_once_with_its_machine() {
    let rig = Rig::new().await;
    rig.pod(&["a", "b"]).await;
    rig.start("a", "").await.unwrap();
    rig.exec("a", "e", &["cat"]).await.unwrap();
    rig.start("a", "e").await.unwrap();
    rig.thawd
        .machine
        .send_replace(Some("the guest's kernel panicked".into()));
    for (id, exec) in [("pause", ""), ("a", ""), ("a", "e"), ("b", "")] {
        assert_eq!(rig.wait(id, exec).await.unwrap(), 137, "{id} {exec}");
    }
    let mut told = rig.events(11).await.split_off(7);
    told.sort();
    assert_eq!(told, ["exit a 137", "exit b 137", "exit e 137", "exit pause 137"]);
}

#[tokio::test]
async fn killed_vmm_ends_its_tasks_even_if_thawd_is_silent() {
    let mut vmm = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    let rig = Rig::with_vmm(vmm.id() as i32).await;
    rig.create(rig.request("one", &["cat"], json!({}))).await.unwrap();
    assert_eq!(rig.start("one", "").await.unwrap(), vmm.id());
    vmm.kill().unwrap();
    vmm.wait().unwrap();
    assert_eq!(rig.wait("one", "").await.unwrap(), 137);
}

#[tokio::test]
async fn failed_create_or_start_says_why_and_leaves_nothing() {
    let rig = Rig::new().await;
    rig.create(rig.request("one", &["missing"], json!({})))
        .await
        .unwrap();
    assert_eq!(code(rig.start("one", "").await), Code::NOT_FOUND);
    assert_eq!(rig.wait("one", "").await.unwrap(), 127);
    assert_eq!(rig.delete("one", "").await.unwrap(), 127);
    assert_eq!(
        rig.events(2).await,
        ["create one", "delete one"],
        "nothing ran, so nothing ended"
    );

    // Refused before a machine is created.
    let rig = Rig::new().await;
    let mut several = rig.request("two", &["cat"], json!({}));
    several.rootfs = vec![several.rootfs[0].clone(); 2];
    assert_eq!(code(rig.create(several).await), Code::UNIMPLEMENTED);
    assert_eq!(
        code(rig.create(rig.request("three", &["cat"], member())).await),
        Code::FAILED_PRECONDITION
    );
    assert!(rig.thawd.made.lock().unwrap().is_empty());
    // Refused after the machine is created, which is then ended.
    let mut gone = rig.request("four", &["cat"], json!({}));
    gone.rootfs[0].source = "thaw:sha256:gone".into();
    assert_eq!(code(rig.create(gone).await), Code::UNKNOWN);
    assert_eq!(*rig.thawd.ended.lock().unwrap(), ["sandbox-1"]);
    assert_eq!(code(rig.state("four", "").await), Code::NOT_FOUND);
}

#[tokio::test]
async fn streams_are_passed_unchanged_and_close_io_ends_input() {
    let rig = Rig::new().await;
    let (stdin, stdout) = (fifo(&rig.path("in")), fifo(&rig.path("out")));
    let request = CreateTaskRequest {
        stdin: stdin.clone(),
        stdout: stdout.clone(),
        ..rig.request("one", &["cat"], json!({}))
    };
    rig.create(request).await.unwrap();
    rig.start("one", "").await.unwrap();
    let mut out = tokio::fs::File::open(stdout).await.unwrap();
    let bytes: Vec<u8> = (0..100_000u32).flat_map(|n| n.to_le_bytes()).collect();
    // A client disconnects and reconnects; the process's input stays open.
    for part in bytes.chunks(bytes.len() / 2) {
        let mut client = tokio::fs::File::options().write(true).open(&stdin).await.unwrap();
        let writing = async {
            client.write_all(part).await.unwrap();
            client.flush().await.unwrap();
            drop(client);
        };
        let mut got = vec![0; part.len()];
        let (_, read) = tokio::join!(writing, out.read_exact(&mut got));
        read.unwrap();
        assert!(got == part);
    }
    let close = CloseIORequest {
        id: "one".into(),
        stdin: true,
        ..Default::default()
    };
    rig.client.close_io(Context::default(), &close).await.unwrap();
    let mut rest = Vec::new();
    out.read_to_end(&mut rest).await.unwrap();
    assert!(rest.is_empty());
}

#[tokio::test]
async fn input_after_exit_is_dropped_without_a_broken_pipe() {
    let rig = Rig::new().await;
    let (stdin, stdout) = (fifo(&rig.path("in")), fifo(&rig.path("out")));
    let request = CreateTaskRequest {
        stdin: stdin.clone(),
        stdout: stdout.clone(),
        ..rig.request("one", &["echo", "hi"], json!({}))
    };
    rig.create(request).await.unwrap();
    let mut client = tokio::fs::File::options().write(true).open(&stdin).await.unwrap();
    let mut out = tokio::fs::File::open(stdout).await.unwrap();
    rig.start("one", "").await.unwrap();
    assert_eq!(rig.wait("one", "").await.unwrap(), 0);
    // More than a fifo can hold.
    for _ in 0..8 {
        client.write_all(&[4; 32 * 1024]).await.unwrap();
        client.flush().await.unwrap();
    }
    let mut said = String::new();
    out.read_to_string(&mut said).await.unwrap();
    assert_eq!(said, "hi\n");
    rig.delete("one", "").await.unwrap();
    // A process that another test is starting may hold a copy of the other end for a moment.
    let broken = loop {
        if let Err(e) = client.write_all(b"late").await.and(client.flush().await) {
            break e;
        }
    };
    assert_eq!(broken.kind(), std::io::ErrorKind::BrokenPipe);
}

#[tokio::test]
async fn container_is_paused_updated_and_measured() {
    let rig = Rig::new().await;
    rig.create(rig.request("one", &["cat"], json!({}))).await.unwrap();
    let pause = PauseRequest {
        id: "one".into(),
        ..Default::default()
    };
    assert_eq!(
        code(rig.client.pause(Context::default(), &pause).await),
        Code::FAILED_PRECONDITION
    );
    rig.start("one", "").await.unwrap();
    rig.client.pause(Context::default(), &pause).await.unwrap();
    assert_eq!(rig.state("one", "").await.unwrap().status, Status::PAUSED.into());
    let resume = ResumeRequest {
        id: "one".into(),
        ..Default::default()
    };
    rig.client.resume(Context::default(), &resume).await.unwrap();
    assert_eq!(rig.state("one", "").await.unwrap().status, Status::RUNNING.into());
    let update = UpdateTaskRequest {
        id: "one".into(),
        resources: MessageField::some(Any {
            value: json!({"memory": {"limit": 1048576}}).to_string().into_bytes(),
            ..Default::default()
        }),
        ..Default::default()
    };
    rig.client.update(Context::default(), &update).await.unwrap();
    assert!(
        rig.agent
            .heard
            .lock()
            .unwrap()
            .contains(&"update 1048576 one".to_owned())
    );
    let stats = StatsRequest {
        id: "one".into(),
        ..Default::default()
    };
    let stats = rig.client.stats(Context::default(), &stats).await.unwrap().stats;
    assert_eq!(stats.type_url, "io.containerd.cgroups.v2.Metrics");
    thaw_protocol::shim::cgroup2::Metrics::parse_from_bytes(&stats.value).unwrap();
    let told = ["create one", "start one", "paused one", "resumed one"];
    assert_eq!(rig.events(told.len()).await, told);
}

#[tokio::test]
async fn delete_after_a_killed_shim_ends_its_machine() {
    let rig = Rig::new().await;
    rig.create(rig.request("one", &["cat"], json!({}))).await.unwrap();
    // The shim is not needed: the bundle has all information.
    rig.served.lock().unwrap().take().unwrap().abort();
    rig.clean("one").await;
    assert_eq!(*rig.thawd.ended.lock().unwrap(), ["sandbox-1"]);
}

#[tokio::test]
async fn missing_thawd_error_names_the_unit_to_start() {
    let thawd = Thawd::at(std::path::Path::new("/nowhere/pods.sock"));
    let error = thawd.end("x").await.unwrap_err().to_string();
    assert!(
        error.contains("thawd.service") && error.contains("/nowhere/pods.sock"),
        "{error}"
    );
}
