use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use thaw_imagefs::Digest;
use thaw_protocol::snapshots::Kind;
use thaw_sandbox::images::part::{Node, Part, What};
use tonic::Code;

use super::super::remote::{Pulled, TARGET};
use super::*;

const IMAGE: &str = "containerd.io/snapshot/cri.image-ref";

/// One image of three layers, and one that its registry refuses. It knows no others.
#[derive(Default)]
struct Fake {
    pulls: AtomicUsize,
}

fn diff_ids() -> Vec<Digest> {
    [&b"a"[..], b"b", b"c"].map(Digest::of).to_vec()
}

fn chain() -> Vec<String> {
    let ids = diff_ids();
    let second = Digest::of(format!("{} {}", ids[0], ids[1]).as_bytes());
    let third = Digest::of(format!("{second} {}", ids[2]).as_bytes());
    [ids[0], second, third].map(|id| id.to_string()).to_vec()
}

#[async_trait]
impl Layers for Fake {
    async fn pull(&self, reference: &str) -> Result<Pulled, Error> {
        self.pulls.fetch_add(1, Ordering::Relaxed);
        match reference {
            "registry/image:1" => self.stored("sha256:whole").await,
            "registry/private:1" => Err(Error::new(ErrorKind::RegistryDenied, "401")),
            _ => Err(Error::new(ErrorKind::RegistryFailed, "503")),
        }
    }

    async fn stored(&self, digest: &str) -> Result<Pulled, Error> {
        Ok(Pulled {
            digest: Digest::of(digest.as_bytes()),
            diff_ids: diff_ids(),
            lease: None,
        })
    }

    async fn lowest(&self, digest: &str, count: usize) -> Result<Pulled, Error> {
        self.stored(&format!("{digest}/{count}")).await
    }

    async fn file(&self, _: &str, path: &str) -> Result<Option<Vec<u8>>, Error> {
        Ok((path == "etc/passwd").then(|| b"root:x:0:0".to_vec()))
    }

    async fn volumes(&self, _: &str) -> Result<Part, Error> {
        Ok(Part::none())
    }

    async fn whole(&self, digest: &str) -> Result<Part, Error> {
        let node = Node {
            what: What::Link {
                target: digest.as_bytes().to_vec(),
            },
            number: 7,
            mode: 0o777,
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            changed: (0, 0),
            is_linked: false,
            extended: Vec::new(),
        };
        Ok(Part {
            nodes: [(b"image".to_vec(), node)].into(),
            ..Part::none()
        })
    }

    async fn bytes(&self, _: &str, layer: usize) -> Result<u64, Error> {
        Ok(4096 * layer as u64)
    }
}

async fn open(root: &Path) -> Snapshotter {
    Snapshotter::open(
        Arc::new(Fake::default()),
        &root.join("snapshots"),
        ToString::to_string,
    )
    .await
    .unwrap()
}

async fn prepare(
    service: &Snapshotter,
    key: &str,
    parent: &str,
    labels: &[(&str, &str)],
) -> Result<Vec<Mount>, Status> {
    let labels = labels
        .iter()
        .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
        .collect();
    let request = PrepareSnapshotRequest {
        snapshotter: "thaw".into(),
        key: key.into(),
        parent: parent.into(),
        labels,
    };
    Ok(service.prepare(Request::new(request)).await?.into_inner().mounts)
}

async fn commit(service: &Snapshotter, key: &str, name: &str, labels: &[(&str, &str)]) {
    let request = CommitSnapshotRequest {
        snapshotter: "thaw".into(),
        name: name.into(),
        key: key.into(),
        labels: labels
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect(),
    };
    service.commit(Request::new(request)).await.unwrap();
}

async fn stat(service: &Snapshotter, key: &str) -> Result<Info, Status> {
    let request = StatSnapshotRequest {
        snapshotter: "thaw".into(),
        key: key.into(),
    };
    let answer = service.stat(Request::new(request)).await?.into_inner();
    Ok(answer.info.unwrap())
}

async fn remove(service: &Snapshotter, key: &str) -> Result<(), Status> {
    let request = RemoveSnapshotRequest {
        snapshotter: "thaw".into(),
        key: key.into(),
    };
    service.remove(Request::new(request)).await.map(drop)
}

#[tokio::test]
async fn pull_finds_all_layers_and_a_container_gets_the_image() {
    let root = tempfile::tempdir().unwrap();
    let service = open(root.path()).await;
    let mut parent = String::new();
    for target in chain() {
        let labels = [(TARGET, target.as_str()), (IMAGE, "registry/image:1")];
        let status = prepare(&service, "extract-1", &parent, &labels)
            .await
            .unwrap_err();
        assert_eq!(status.code(), Code::AlreadyExists, "{status}");
        let info = stat(&service, &target).await.unwrap();
        assert_eq!((info.kind(), &info.parent), (Kind::Committed, &parent));
        assert_eq!(info.labels[TARGET], target);
        parent = target;
    }
    // A second pull of the same image returns the same.
    let labels = [(TARGET, &parent[..]), (IMAGE, "registry/image:1")];
    let status = prepare(&service, "extract-2", &chain()[1], &labels)
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::AlreadyExists);

    let mount = prepare(&service, "container", &parent, &[])
        .await
        .unwrap()
        .remove(0);
    let whole = format!("{}/3", Digest::of(b"sha256:whole"));
    assert_eq!(mount.source, format!("thaw:{}", Digest::of(whole.as_bytes())));
    // A program that mounts it on the host finds the image's users.
    let lower = mount.options.iter().find_map(|o| o.strip_prefix("lowerdir="));
    let users = std::fs::read(Path::new(lower.unwrap()).join("etc/passwd")).unwrap();
    assert_eq!(users, b"root:x:0:0");
    // A container on the lowest layers gets an image of only those.
    let below = prepare(&service, "other", &chain()[0], &[])
        .await
        .unwrap()
        .remove(0);
    let lowest = format!("{}/1", Digest::of(b"sha256:whole"));
    assert_eq!(below.source, format!("thaw:{}", Digest::of(lowest.as_bytes())));

    // A new thawd finds all snapshots.
    let service = open(root.path()).await;
    let request = MountsRequest {
        snapshotter: "thaw".into(),
        key: "container".into(),
    };
    let again = service.mounts(Request::new(request)).await.unwrap().into_inner();
    assert_eq!(again.mounts, [mount]);
    assert_eq!(
        remove(&service, &parent).await.unwrap_err().code(),
        Code::FailedPrecondition
    );
    for key in ["container", "other", &chain()[2], &chain()[1], &chain()[0]] {
        remove(&service, key).await.unwrap();
    }
    assert_eq!(
        std::fs::read_dir(root.path().join("snapshots")).unwrap().count(),
        0
    );
}

#[tokio::test]
async fn without_an_image_it_is_an_ordinary_snapshotter() {
    let root = tempfile::tempdir().unwrap();
    let service = open(root.path()).await;
    // containerd unpacks by itself if its labels name no image.
    let mount = prepare(&service, "extract", "", &[(TARGET, "sha256:x")])
        .await
        .unwrap()
        .remove(0);
    assert_eq!(mount.r#type, "bind");
    std::fs::write(Path::new(&mount.source).join("file"), [0; 9000]).unwrap();
    let request = UsageRequest {
        snapshotter: "thaw".into(),
        key: "extract".into(),
    };
    let used = service.usage(Request::new(request)).await.unwrap().into_inner();
    assert!(used.size >= 9000 && used.inodes == 2, "{used:?}");
    commit(&service, "extract", "layer", &[(TARGET, "sha256:x")]).await;
    assert_eq!(
        stat(&service, "extract").await.unwrap_err().code(),
        Code::NotFound
    );
    let mount = prepare(&service, "container", "layer", &[])
        .await
        .unwrap()
        .remove(0);
    assert_eq!(mount.r#type, "overlay");
}

#[tokio::test]
async fn what_a_registry_keeps_from_the_store_containerd_unpacks() {
    let (root, layers) = (tempfile::tempdir().unwrap(), Arc::new(Fake::default()));
    let service = Snapshotter::open(
        layers.clone(),
        &root.path().join("snapshots"),
        ToString::to_string,
    )
    .await
    .unwrap();
    let mut parent = String::new();
    for target in chain() {
        let labels = [(TARGET, target.as_str()), (IMAGE, "registry/private:1")];
        let mount = prepare(&service, "extract", &parent, &labels)
            .await
            .unwrap()
            .remove(0);
        let into = mount.options.iter().find_map(|o| o.strip_prefix("upperdir="));
        let into = Path::new(into.unwrap_or(&mount.source));
        std::fs::write(into.join("of-this-layer"), &target).unwrap();
        commit(&service, "extract", &target, &labels).await;
        parent = target;
    }
    let asked = layers.pulls.load(Ordering::Relaxed);
    assert_eq!(asked, 1, "not again for each layer");
    let mount = prepare(&service, "container", &parent, &[])
        .await
        .unwrap()
        .remove(0);
    assert_eq!((&mount.r#type[..], &mount.source[..]), ("overlay", "overlay"));
    let lower = mount.options.iter().find_map(|o| o.strip_prefix("lowerdir="));
    let nearest_first: Vec<String> = lower
        .unwrap()
        .split(':')
        .map(|directory| std::fs::read_to_string(Path::new(directory).join("of-this-layer")).unwrap())
        .collect();
    assert_eq!(nearest_first, chain().into_iter().rev().collect::<Vec<_>>());
}

#[tokio::test]
async fn containerd_unpacks_onto_layers_of_the_store_as_they_are() {
    let root = tempfile::tempdir().unwrap();
    let service = open(root.path()).await;
    let [lowest, below, target] = &chain()[..] else {
        panic!()
    };
    for (target, parent) in [(lowest, ""), (below, lowest)] {
        let known = [(TARGET, target.as_str()), (IMAGE, "registry/image:1")];
        prepare(&service, "extract", parent, &known).await.unwrap_err();
    }
    let kept = [(TARGET, target.as_str()), (IMAGE, "registry/private:1")];
    let mount = prepare(&service, "extract", below, &kept)
        .await
        .unwrap()
        .remove(0);
    assert_eq!((&mount.r#type[..], &mount.source[..]), ("overlay", "overlay"));
    let lower = mount.options.iter().find_map(|o| o.strip_prefix("lowerdir="));
    let whole = Path::new(lower.unwrap());
    let both = Digest::of(format!("{}/2", Digest::of(b"sha256:whole")).as_bytes());
    let said = std::fs::read_link(whole.join("image")).unwrap();
    assert_eq!(said, Path::new(&both.to_string()));
    let request = |key: &String| UsageRequest {
        snapshotter: "thaw".into(),
        key: key.clone(),
    };
    for (layer, inodes) in [(lowest, 0), (below, 2)] {
        let used = service
            .usage(Request::new(request(layer)))
            .await
            .unwrap()
            .into_inner();
        assert_eq!(used.inodes, inodes, "{used:?}");
    }
    commit(&service, "extract", target, &kept).await;
    let mount = prepare(&service, "container", target, &[])
        .await
        .unwrap()
        .remove(0);
    let lower = mount.options.iter().find_map(|o| o.strip_prefix("lowerdir="));
    let (nearest, farthest) = lower.unwrap().split_once(':').unwrap();
    assert!(
        nearest.ends_with("/fs") && Path::new(farthest) == whole,
        "{lower:?}"
    );
    for key in ["container", target, below, lowest] {
        remove(&service, key).await.unwrap();
    }
    assert!(!whole.exists(), "it goes with its layer");
}

#[tokio::test]
async fn what_cannot_be_is_told_by_its_code_and_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    let service = open(root.path()).await;
    let elsewhere = [(TARGET, "sha256:x"), (IMAGE, "registry/none:1")];
    let status = prepare(&service, "extract", "", &elsewhere).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    // The registry's image has no such layer, so none is shown.
    let exchanged = [(TARGET, "sha256:x"), (IMAGE, "registry/image:1")];
    let status = prepare(&service, "extract", "", &exchanged).await.unwrap_err();
    assert_eq!(status.code(), Code::Internal);
    assert_eq!(
        prepare(&service, "container", "nothing", &[])
            .await
            .unwrap_err()
            .code(),
        Code::NotFound
    );
    assert_eq!(
        std::fs::read_dir(root.path().join("snapshots")).unwrap().count(),
        0
    );
}

#[tokio::test]
async fn labels_change_and_lists_are_filtered() {
    let root = tempfile::tempdir().unwrap();
    let service = open(root.path()).await;
    let target = &chain()[0];
    let labels = [(TARGET, target.as_str()), (IMAGE, "registry/image:1")];
    prepare(&service, "x", "", &labels).await.unwrap_err();
    let update = |paths: &[&str], labels: &[(&str, &str)]| UpdateSnapshotRequest {
        snapshotter: "thaw".into(),
        info: Some(Info {
            name: target.clone(),
            labels: labels
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect(),
            ..Info::default()
        }),
        update_mask: Some(prost_types::FieldMask {
            paths: paths.iter().map(|path| (*path).to_owned()).collect(),
        }),
    };
    let request = update(
        &["labels.containerd.io/gc.root"],
        &[("containerd.io/gc.root", "1")],
    );
    service.update(Request::new(request)).await.unwrap();
    let info = stat(&service, target).await.unwrap();
    assert_eq!(
        (info.labels.len(), &info.labels["containerd.io/gc.root"][..]),
        (3, "1")
    );
    let request = update(&["parent"], &[]);
    assert_eq!(
        service.update(Request::new(request)).await.unwrap_err().code(),
        Code::InvalidArgument
    );

    use futures_util::StreamExt;
    let list = async |filters: &[String]| {
        let request = ListSnapshotsRequest {
            snapshotter: "thaw".into(),
            filters: filters.to_vec(),
        };
        let stream = service.list(Request::new(request)).await?.into_inner();
        let messages: Vec<_> = stream.collect().await;
        Ok::<usize, Status>(messages.into_iter().map(|it| it.unwrap().info.len()).sum())
    };
    assert_eq!(list(&[]).await.unwrap(), 1);
    let by_label = format!("labels.\"{TARGET}\"=={target},parent==\"\"");
    assert_eq!(list(&[by_label]).await.unwrap(), 1);
    assert_eq!(list(&["kind==active".to_owned()]).await.unwrap(), 0);
    assert_eq!(
        list(&["kind~=a".to_owned()]).await.unwrap_err().code(),
        Code::InvalidArgument
    );
}
