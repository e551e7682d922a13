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

/// The API for the shim, served with fakes, and a client of it.
struct Served {
    fake: Arc<Fake>,
    daemon: Arc<Daemon>,
    client: PodsClient,
    directory: tempfile::TempDir,
    stop: tokio::sync::oneshot::Sender<()>,
    serving: tokio::task::JoinHandle<Result<(), Error>>,
}

impl Served {
    async fn start() -> Served {
        let (fake, daemon) = Fake::daemon(true);
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("pods.sock");
        let listening = Listening::open(&socket).unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let serving = tokio::spawn(listening.serve(daemon.clone(), async { drop(stopped.await) }));
        let address = format!("unix://{}", socket.display());
        Served {
            fake,
            daemon,
            client: PodsClient::new(ttrpc::r#async::Client::connect(&address).await.unwrap()),
            directory,
            stop,
            serving,
        }
    }

    async fn create(&self) -> String {
        self.client.create(with(), &request()).await.unwrap().sandbox_id
    }

    async fn end(&self, id: &str) {
        self.client.end(with(), &pod(id)).await.unwrap();
    }

    async fn stop(self) {
        drop(self.stop);
        self.serving.await.unwrap().unwrap();
        assert!(!self.directory.path().join("pods.sock").exists());
        assert_eq!(self.fake.living(), 0);
    }
}

fn with() -> Context {
    Context::default()
}

fn has_code<T: std::fmt::Debug>(answer: ttrpc::Result<T>, code: Code) {
    let refused = answer.unwrap_err();
    assert!(
        matches!(&refused, ttrpc::Error::RpcStatus(s) if s.code() == code),
        "{refused}"
    );
}

fn share(id: &str, source: &str, option: &str) -> AddShareRequest {
    AddShareRequest {
        sandbox_id: id.into(),
        name: "0".into(),
        source: MessageField::some(ShareSource {
            type_: "bind".into(),
            source: source.into(),
            options: vec![option.into()],
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn removed_share(id: &str) -> RemoveShareRequest {
    RemoveShareRequest {
        sandbox_id: id.into(),
        name: "0".into(),
        ..Default::default()
    }
}

fn removed_disk(id: &str, name: &str) -> RemoveDiskRequest {
    RemoveDiskRequest {
        sandbox_id: id.into(),
        name: name.into(),
        ..Default::default()
    }
}

#[tokio::test]
async fn socket_of_a_living_thawd_is_not_taken() {
    let served = Served::start().await;
    assert!(Listening::open(&served.directory.path().join("pods.sock")).is_err());
    served.stop().await;
}

#[tokio::test]
async fn version_is_the_newest_that_both_speak() {
    let served = Served::start().await;
    // A shim of the release before versions sends none.
    let version = |version| VersionRequest {
        version,
        ..Default::default()
    };
    for (theirs, agreed) in [(1, 1), (2, 2), (9, PODS.current)] {
        let answer = served.client.version(with(), &version(theirs)).await.unwrap();
        assert_eq!(answer.version, agreed);
    }
    let none = served.client.version(with(), &version(0)).await;
    has_code(none, Code::FAILED_PRECONDITION);
    served.stop().await;
}

#[tokio::test]
async fn pod_has_the_labels_and_rate_limits_of_its_request() {
    let served = Served::start().await;
    let (client, daemon) = (&served.client, &served.daemon);
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
    let slow = CreatePodRequest {
        net_out_rate: MessageField::some(RateLimit {
            bytes_per_s: 1,
            ..Default::default()
        }),
        ..request()
    };
    let refused = client.create(with(), &slow).await.unwrap_err().to_string();
    assert!(refused.contains("rate_limits.net_out.bytes_per_s"), "{refused}");
    for id in [made.sandbox_id, slowed.sandbox_id] {
        served.end(&id).await;
    }
    served.stop().await;
}

#[tokio::test]
async fn images_are_shown_to_a_pod() {
    let served = Served::start().await;
    let id = served.create().await;
    let show = |digest: &str| ShowImageRequest {
        sandbox_id: id.clone(),
        digest: digest.into(),
        ..Default::default()
    };
    let shown = served.client.show(with(), &show("sha256:1")).await.unwrap();
    assert_eq!(shown.name, "shown-sha256:1");
    has_code(
        served.client.show(with(), &show("missing")).await,
        Code::NOT_FOUND,
    );
    served.end(&id).await;
    served.stop().await;
}

#[tokio::test]
async fn shares_are_added_to_a_pod_once_and_removed() {
    let served = Served::start().await;
    let (client, id) = (&served.client, served.create().await);
    for (source, option) in [("srv", "ro"), ("/srv", "rshared"), ("/srv", "idmap")] {
        let refused = client.add_share(with(), &share(&id, source, option)).await;
        has_code(refused, Code::INVALID_ARGUMENT);
    }
    client.add_share(with(), &share(&id, "/srv", "ro")).await.unwrap();
    client
        .add_share(with(), &share(&id, "/srv", "ro"))
        .await
        .unwrap_err();
    for _ in 0..2 {
        client.remove_share(with(), &removed_share(&id)).await.unwrap();
    }
    served.end(&id).await;
    served.stop().await;
}

#[tokio::test]
async fn disks_of_the_host_are_added_to_a_pod_and_removed() {
    let served = Served::start().await;
    let (client, id) = (&served.client, served.create().await);
    let disk = |major: u32| AddDiskRequest {
        sandbox_id: id.clone(),
        major,
        ..Default::default()
    };
    client.add_disk(with(), &disk(0)).await.unwrap_err();
    let slot = client.add_disk(with(), &disk(7)).await.unwrap().name;
    client
        .remove_disk(with(), &removed_disk(&id, &slot))
        .await
        .unwrap();
    // The sandbox's own disk is not a disk of the host.
    let own = client.remove_disk(with(), &removed_disk(&id, "2")).await;
    has_code(own, Code::INVALID_ARGUMENT);
    served.end(&id).await;
    // Also after its end.
    client.remove_share(with(), &removed_share(&id)).await.unwrap();
    client
        .remove_disk(with(), &removed_disk(&id, &slot))
        .await
        .unwrap();
    served.stop().await;
}

#[tokio::test]
async fn end_of_a_pod_is_reported_to_all_who_wait() {
    let served = Served::start().await;
    let (client, id) = (&served.client, served.create().await);
    let waiting = tokio::spawn({
        let (client, id) = (client.clone(), id.clone());
        async move { client.wait(with(), &pod(&id)).await }
    });
    tokio::task::yield_now().await;
    served.daemon.running(&Wanted::on_node(&id)).unwrap().kill();
    assert_eq!(waiting.await.unwrap().unwrap().reason, "it was killed");
    for _ in 0..2 {
        served.end(&id).await;
    }
    // It ended without a request and stays listed: a late wait gets the reason.
    let failed = client.wait(with(), &pod(&id)).await.unwrap();
    assert!(failed.reason.contains("SIGKILL"), "{failed:?}");
    assert_eq!(served.daemon.cache.get(&id).unwrap().state, "failed");
    has_code(client.wait(with(), &pod("none")).await, Code::NOT_FOUND);
    served.stop().await;
}

#[tokio::test]
async fn stored_snapshot_is_thawed_for_pods_of_its_namespace() {
    let served = Served::start().await;
    let client = &served.client;
    let thaw = ThawPodRequest {
        snapshot: "web".into(),
        namespace: "shop".into(),
        client_pid: std::process::id() as i32,
        ..Default::default()
    };
    let thawed = client.thaw(with(), &thaw).await.unwrap();
    assert_eq!(thawed.container.args, ["serve"]);
    let elsewhere = ThawPodRequest {
        namespace: "other".into(),
        ..thaw.clone()
    };
    has_code(client.thaw(with(), &elsewhere).await, Code::NOT_FOUND);
    let no_network = ThawPodRequest {
        network: MessageField::some(PodNetwork {
            mode: Mode::NAMESPACE.into(),
            namespace: "/missing".into(),
            ..Default::default()
        }),
        ..thaw
    };
    assert!(client.thaw(with(), &no_network).await.is_err());
    served.end(&thawed.sandbox_id).await;
    served.stop().await;
}

#[tokio::test]
async fn pod_is_frozen_and_thawed_for_a_living_shim() {
    let served = Served::start().await;
    let client = &served.client;
    let snapshot = served.directory.path().join("snapshot");
    let frozen = FreezePodRequest {
        sandbox_id: served.create().await,
        directory: snapshot.display().to_string(),
        ..Default::default()
    };
    let thaw = ThawPodRequest {
        directory: frozen.directory.clone(),
        client_pid: std::process::id() as i32,
        labels: [("c".to_owned(), "d".to_owned())].into(),
        ..Default::default()
    };
    let too_early = client.thaw(with(), &thaw).await;
    assert!(too_early.is_err(), "there is no snapshot yet");
    client.freeze(with(), &frozen).await.unwrap();
    let thawed = client.thaw(with(), &thaw).await.unwrap();
    let labels = &served.daemon.cache.get(&thawed.sandbox_id).unwrap().labels;
    assert_eq!(labels["c"], "d");
    // A pod without a running shim would end at once.
    let without_shim = ThawPodRequest {
        client_pid: 0,
        ..thaw
    };
    assert!(client.thaw(with(), &without_shim).await.is_err());
    let without_shim = CreatePodRequest {
        client_pid: 0,
        ..request()
    };
    assert!(client.create(with(), &without_shim).await.is_err());
    for id in [frozen.sandbox_id, thawed.sandbox_id] {
        served.end(&id).await;
    }
    served.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_of_thawd_reports_no_end_of_its_pods() {
    let served = Served::start().await;
    let (client, id) = (served.client.clone(), served.create().await);
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.wait(with(), &pod(&id)).await }
    });
    // Answered after the first request, so that one is waiting by then.
    client.wait(with(), &pod("nobody")).await.unwrap_err();
    served.daemon.end();
    served.daemon.release().await;
    has_code(waiting.await.unwrap(), Code::UNAVAILABLE);
    drop(served.stop);
    served.serving.await.unwrap().unwrap();
}

#[test]
fn refusal_of_a_pod_has_a_remedy_without_command_lines() {
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
