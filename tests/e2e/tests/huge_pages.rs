//! Huge pages in a pod, as a kubelet asks for them: a limit for each container and a volume that is a hugetlbfs of the host.
//!
//! A minute in a lab, so not in every run: `tests/e2e/run --all yes --only huge_pages`.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use thaw_e2e::cri;
use thaw_e2e::node::{Node, Pod};

const MIB: u64 = 1 << 20;

/// A file system of the host's huge pages, for as long as this is held.
struct Volume<'a>(&'a Path);

impl Volume<'_> {
    fn new(at: &Path) -> Volume<'_> {
        rustix::mount::mount(
            "none",
            at,
            "hugetlbfs",
            rustix::mount::MountFlags::empty(),
            c"pagesize=2M",
        )
        .unwrap();
        Volume(at)
    }
}

impl Drop for Volume<'_> {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

/// Makes a container that has the volume and, where containerd hands on how much, may use this much.
fn create(pod: &Pod<'_>, name: &str, volume: &Volume<'_>, limit: Option<u64>) -> cri::Container {
    let made = pod.create(name, "sleep 1000", |config, _| {
        config.mounts = vec![cri::Mount {
            container_path: "/huge".into(),
            host_path: volume.0.display().to_string(),
        }];
        let resources = config
            .linux
            .get_or_insert_default()
            .resources
            .get_or_insert_default();
        resources.hugepage_limits = limit
            .map(|limit| cri::HugepageLimit {
                page_size: "2MB".into(),
                limit,
            })
            .into_iter()
            .collect();
    });
    made.unwrap()
}

#[test]
#[ignore = "long"]
fn pod_huge_pages_are_the_guests_and_shared_by_containers() {
    let node = Node::new();
    let place = node.home.scratch("huge");
    let volume = Volume::new(&place);
    let pod = node.pod("huge");
    let start =
        |container: &cri::Container| node.try_call::<_, cri::Empty>("StartContainer", container.clone());
    let [a, b] = ["a", "b"].map(|name| create(&pod, name, &volume, Some(8 * MIB)));
    start(&a).unwrap();
    start(&b).unwrap();
    let pool = "awk '/HugePages_Total/ { print $2 }' /proc/meminfo";
    assert_eq!(node.said(&a, pool), "8\n");

    let map = "import mmap, os; f = os.open('/huge/file', os.O_CREAT | os.O_RDWR); os.ftruncate(f, 4 << 20); m = mmap.mmap(f, 4 << 20)";
    node.said(&a, &format!("python3 -c \"{map}; m[:5] = b'hello'; m[-1] = 1\""));
    assert_eq!(
        node.said(&b, &format!("python3 -c \"{map}; print(m[:5].decode(), m[-1])\"")),
        "hello 1\n"
    );
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), 0, "the host's own");
    // MAP_HUGETLB; what a container may not use ends it as the kernel has it, SIGBUS.
    let anonymous = |mib: u64| {
        let size = mib * MIB;
        format!(
            "python3 -c \"import mmap; m = mmap.mmap(-1, {size}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000); m[::2097152] = b'x' * {}; print('used')\"",
            mib / 2
        )
    };
    assert_eq!(node.said(&b, &anonymous(8)), "used\n");
    let (_, _, code) = node.exec(&b, &anonymous(10));
    assert_eq!(code, 128 + 7);

    // By default containerd hands no limits on: there is what there is memory for.
    let unlimited = create(&pod, "unlimited", &volume, None);
    start(&unlimited).unwrap();
    let more = map
        .replace("/huge/file", "/huge/more")
        .replace("4 << 20", "32 << 20");
    let more = format!("python3 -c \"{more}; m[::2097152] = b'x' * 16; print('used')\"; rm /huge/more");
    assert_eq!(node.said(&unlimited, &more), "used\n");

    // More than there is: refused by name, and what was there before is.
    let greedy = create(&pod, "greedy", &volume, Some(4096 * MIB));
    let refused = start(&greedy).unwrap_err();
    assert!(
        refused.message().contains("of 2048 huge pages of 2MB") && refused.message().contains("memory limit"),
        "{refused}"
    );
    assert_eq!(node.said(&a, pool), "8\n");
    node.stop(&b, 0);
    node.remove(&b);
    assert_eq!(node.said(&a, pool), "4\n");
    pod.remove();
    node.is_empty_soon();
}
