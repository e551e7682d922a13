use super::*;
use crate::api::fake::Fake;
use thaw_protocol::shim::MessageField;
use thaw_protocol::shim::pods_ttrpc::PodsClient;
use ttrpc::context::Context;

fn pod(id: &str) -> PodRequest {
    PodRequest {
        sandbox_id: id.into(),
        ..Default::default()
    }
}

fn request() -> CreatePodRequest {
    CreatePodRequest {
        network: MessageField::some(PodNetwork {
            mode: Mode::PRIVATE.into(),
            ..Default::default()
        }),
        client_pid: std::process::id() as i32,
        labels: [("a".to_owned(), "b".to_owned())].into(),
        ..Default::default()
    }
}

#[tokio::test]
async fn a_pod_is_made_shown_images_waited_for_and_ended_once() {
    let (fake, daemon) = Fake::daemon(true);
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("pods.sock");
    let listening = Listening::open(&socket).unwrap();
    // No other thawd takes its place.
    assert!(Listening::open(&socket).is_err());
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let served = tokio::spawn(listening.serve(daemon.clone(), async { drop(stopped.await) }));
    let address = format!("unix://{}", socket.display());
    let client = PodsClient::new(ttrpc::r#async::Client::connect(&address).await.unwrap());
    let with = Context::default;

    // A shim says which version it speaks, and is told which both do; one of the release before versions says nothing.
    let version = |version| VersionRequest {
        version,
        ..Default::default()
    };
    for (theirs, agreed) in [(1, 1), (2, 2), (9, PODS.current)] {
        let answer = client.version(with(), &version(theirs)).await.unwrap();
        assert_eq!(answer.version, agreed);
    }
    let refused = client.version(with(), &version(0)).await.unwrap_err();
    assert!(matches!(refused, ttrpc::Error::RpcStatus(s) if s.code() == Code::FAILED_PRECONDITION));

    let made = client.create(with(), &request()).await.unwrap();
    let shown = daemon.cache.get(&made.sandbox_id).unwrap();
    assert_eq!((shown.labels["a"].as_str(), made.vsock.as_str()), ("b", "/fake"));
    assert!(!made.rate_limited);
    let limited = CreatePodRequest {
        disk_rate: MessageField::some(RateLimit {
            bytes_per_s: 1 << 20,
            once_bytes: 8192,
            ..Default::default()
        }),
        net_in_rate: MessageField::some(RateLimit::default()),
        ..request()
    };
    let slowed = client.create(with(), &limited).await.unwrap();
    assert!(slowed.rate_limited);
    let limits = daemon.cache.get(&slowed.sandbox_id).unwrap().rate_limits;
    let disk = limits.disk.unwrap();
    assert_eq!(
        (disk.bytes_per_s, disk.once_bytes, disk.ops_per_s),
        (Some(1 << 20), Some(8192), None)
    );
    assert!(limits.net_in.is_none() && limits.net_out.is_none());
    client.end(with(), &pod(&slowed.sandbox_id)).await.unwrap();
    let slow = CreatePodRequest {
        net_out_rate: MessageField::some(RateLimit {
            bytes_per_s: 1,
            ..Default::default()
        }),
        ..request()
    };
    let refused = client.create(with(), &slow).await.unwrap_err().to_string();
    assert!(refused.contains("rate_limits.net_out.bytes_per_s"), "{refused}");
    let show = |digest: &str| ShowImageRequest {
        sandbox_id: made.sandbox_id.clone(),
        digest: digest.into(),
        ..Default::default()
    };
    let name = client.show(with(), &show("sha256:1")).await.unwrap().name;
    assert_eq!(name, "shown-sha256:1");
    let missing = client.show(with(), &show("missing")).await.unwrap_err();
    assert!(matches!(missing, ttrpc::Error::RpcStatus(s) if s.code() == Code::NOT_FOUND));

    let share = |source: &str, option: &str| AddShareRequest {
        sandbox_id: made.sandbox_id.clone(),
        name: "0".into(),
        source: MessageField::some(ShareSource {
            type_: "bind".into(),
            source: source.into(),
            options: vec![option.into()],
            ..Default::default()
        }),
        ..Default::default()
    };
    for wrong in [
        share("srv", "ro"),
        share("/srv", "rshared"),
        share("/srv", "idmap"),
    ] {
        let refused = client.add_share(with(), &wrong).await.unwrap_err();
        assert!(matches!(refused, ttrpc::Error::RpcStatus(s) if s.code() == Code::INVALID_ARGUMENT));
    }
    client.add_share(with(), &share("/srv", "ro")).await.unwrap();
    client.add_share(with(), &share("/srv", "ro")).await.unwrap_err();
    let gone = RemoveShareRequest {
        sandbox_id: made.sandbox_id.clone(),
        name: "0".into(),
        ..Default::default()
    };
    for _ in 0..2 {
        client.remove_share(with(), &gone).await.unwrap();
    }

    let disk = |major: u32| AddDiskRequest {
        sandbox_id: made.sandbox_id.clone(),
        major,
        ..Default::default()
    };
    client.add_disk(with(), &disk(0)).await.unwrap_err();
    let slot = client.add_disk(with(), &disk(7)).await.unwrap().name;
    let removed = |name: &str| RemoveDiskRequest {
        sandbox_id: made.sandbox_id.clone(),
        name: name.into(),
        ..Default::default()
    };
    client.remove_disk(with(), &removed(&slot)).await.unwrap();
    // The sandbox's own disk is none of the host's.
    let refused = client.remove_disk(with(), &removed("2")).await.unwrap_err();
    assert!(matches!(refused, ttrpc::Error::RpcStatus(s) if s.code() == Code::INVALID_ARGUMENT));

    let waiting = tokio::spawn({
        let (client, id) = (client.clone(), made.sandbox_id.clone());
        async move { client.wait(Context::default(), &pod(&id)).await }
    });
    tokio::task::yield_now().await;
    daemon.running(&Wanted::on_node(&made.sandbox_id)).unwrap().kill();
    assert_eq!(waiting.await.unwrap().unwrap().reason, "it was killed");
    for _ in 0..2 {
        client.end(with(), &pod(&made.sandbox_id)).await.unwrap();
    }
    client.remove_share(with(), &gone).await.unwrap();
    client.remove_disk(with(), &removed(&slot)).await.unwrap();
    // It ended unasked, and stays listed: who waits late is told why.
    let failed = client.wait(with(), &pod(&made.sandbox_id)).await.unwrap();
    assert!(failed.reason.contains("SIGKILL"), "{failed:?}");
    assert_eq!(daemon.cache.get(&made.sandbox_id).unwrap().state, "failed");
    let gone = client.wait(with(), &pod("none")).await.unwrap_err();
    assert!(matches!(gone, ttrpc::Error::RpcStatus(s) if s.code() == Code::NOT_FOUND));
    assert_eq!(fake.living(), 0);

    // What was frozen is made again, for a shim that lives.
    let snapshot = directory.path().join("snapshot");
    let frozen = FreezePodRequest {
        sandbox_id: client.create(with(), &request()).await.unwrap().sandbox_id,
        directory: snapshot.display().to_string(),
        ..Default::default()
    };
    let thaw = ThawPodRequest {
        directory: frozen.directory.clone(),
        client_pid: std::process::id() as i32,
        labels: [("c".to_owned(), "d".to_owned())].into(),
        ..Default::default()
    };
    assert!(
        client.thaw(with(), &thaw).await.is_err(),
        "there is no snapshot yet"
    );
    client.freeze(with(), &frozen).await.unwrap();
    let thawed = client.thaw(with(), &thaw).await.unwrap();
    assert_eq!(daemon.cache.get(&thawed.sandbox_id).unwrap().labels["c"], "d");
    let nobodys = ThawPodRequest {
        client_pid: 0,
        ..thaw
    };
    assert!(client.thaw(with(), &nobodys).await.is_err());
    for id in [frozen.sandbox_id, thawed.sandbox_id] {
        client.end(with(), &pod(&id)).await.unwrap();
    }

    // One whose shim is gone would end at once.
    let nobodys = CreatePodRequest {
        client_pid: 0,
        ..request()
    };
    assert!(client.create(with(), &nobodys).await.is_err());
    drop(stop);
    served.await.unwrap().unwrap();
    assert!(!socket.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thawd_that_ends_tells_no_end_of_a_pod_that_outlives_it() {
    let (_fake, daemon) = Fake::daemon(true);
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("pods.sock");
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let listening = Listening::open(&socket).unwrap();
    let served = tokio::spawn(listening.serve(daemon.clone(), async { drop(stopped.await) }));
    let address = format!("unix://{}", socket.display());
    let client = PodsClient::new(ttrpc::r#async::Client::connect(&address).await.unwrap());
    let made = client.create(Context::default(), &request()).await.unwrap();
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.wait(Context::default(), &pod(&made.sandbox_id)).await }
    });
    // Answered after it, so that it is being waited for.
    client.wait(Context::default(), &pod("nobody")).await.unwrap_err();
    daemon.end();
    daemon.release().await;
    let told = waiting.await.unwrap().unwrap_err();
    assert!(
        matches!(&told, ttrpc::Error::RpcStatus(s) if s.code() == Code::UNAVAILABLE),
        "{told}"
    );
    drop(stop);
    served.await.unwrap().unwrap();
}

#[test]
fn a_refusal_says_what_to_do_to_who_has_a_pod_and_no_command_line() {
    use ErrorKind::*;
    let said = |failure| match refused(failure) {
        ttrpc::Error::RpcStatus(status) => status.message().to_owned(),
        other => panic!("{other} is no status"),
    };
    let of_pods = [
        MemoryTooSmall,
        GuestNotReady,
        HandshakeFailed,
        VmmFailed,
        GuestEnded,
        NetworkUnavailable,
        SandboxNotFound,
        ImageNotStored,
        AgentFailed,
        Shared,
        VolumeUnavailable,
        ShareMissing,
        ShareFailed,
        KvmMissing,
        DiskFull,
        Runtime,
    ];
    for code in of_pods {
        let said = said(Error::new(code, "what: where"));
        assert!(said.starts_with("what: where; "), "{said}");
        assert!(
            !said.contains("--") && !said.contains("lines above"),
            "{code:?}: {said}"
        );
    }
    assert_eq!(
        said(Error::new(Runtime, "what").remedy("its own")),
        "what; its own"
    );
}
