use std::fs;

use proptest::prelude::*;

use super::*;

/// `totalram_pages()` in a guest booted with 128 MiB, and with 3 GiB plugged.
const BOOTED: u64 = 114 * MIB / PAGE;
const PLUGGED: u64 = BOOTED + (3072 - 128) * MIB / PAGE;

fn assert_close(got: u64, wanted: u64) {
    assert!(got.abs_diff(wanted) * 50 <= wanted, "{got} is not near {wanted}");
}

#[test]
fn threads_three_gib_plugged_are_those_of_three_gib_booted() {
    let limits = Limits::of(as_booted(PLUGGED));
    assert_close(limits.threads, 24_052);
    assert_eq!(limits.processes, limits.threads / 2);
    assert_eq!(Limits::of(BOOTED).threads, 912);
}

#[test]
fn limits_three_gib_plugged_are_those_of_the_kernels_formulas() {
    let limits = Limits::of(as_booted(PLUGGED));
    assert_close(limits.files, 307_865);
    assert_close(limits.inotify_watches, 24_325);
    assert_close(limits.fanotify_marks, 25_926);
    assert_close(limits.epoll_watches, 685_335);
    assert_close(limits.tcp_memory[1], 48_000);
    assert_close(limits.udp_memory[1], 96_000);
    assert_eq!((limits.tcp_send, limits.tcp_receive), (4 * MIB, 6 * MIB));
    assert_eq!((limits.tcp_orphans, limits.tcp_time_wait), (16_384, 16_384));
    assert_eq!(
        (limits.tcp_syn_backlog, limits.tracked_connections),
        (256, 65_536)
    );
}

#[test]
fn limits_of_a_template_are_the_kernels_own() {
    let limits = Limits::of(BOOTED);
    assert_close(limits.files, 11_483);
    assert_eq!((limits.inotify_watches, limits.fanotify_marks), (8192, 8192));
    assert_eq!((limits.tcp_orphans, limits.tcp_syn_backlog), (512, 128));
    assert_eq!(limits.tracked_connections, 1024);
}

#[test]
fn limits_raised_cover_all_that_depend_on_memory() {
    let limits = Limits::of(as_booted(PLUGGED));
    let raised: std::collections::BTreeMap<_, _> = limits.sysctls().collect();
    for file in [
        "kernel/threads-max",
        "fs/file-max",
        "fs/inotify/max_user_watches",
        "fs/fanotify/max_user_marks",
        "fs/epoll/max_user_watches",
        "net/ipv4/tcp_mem",
        "net/ipv4/udp_mem",
        "net/ipv4/tcp_max_orphans",
        "net/ipv4/tcp_max_tw_buckets",
        "net/ipv4/tcp_max_syn_backlog",
    ] {
        assert!(raised[file][0] > 0, "{file}");
    }
    assert_eq!(raised["net/netfilter/nf_conntrack_max"][0], 65_536);
    // A user may have as many namespaces of each kind as processes.
    for kind in ["user", "pid", "uts", "ipc", "net", "mnt", "cgroup", "time"] {
        let file = format!("user/max_{kind}_namespaces");
        assert_eq!(raised[file.as_str()][0], limits.processes, "{file}");
    }
}

proptest! {
    #[test]
    fn limits_with_more_memory_are_no_lower(a in 0..1u64 << 30, more in 0..1u64 << 20) {
        let (less, more) = (Limits::of(as_booted(a)), Limits::of(as_booted(a + more)));
        for ((file, less), (_, more)) in less.sysctls().zip(more.sysctls()) {
            prop_assert!(less.iter().zip(&more).all(|(less, more)| less <= more), "{file}: {less:?}, {more:?}");
        }
    }
}

fn raised(old: &str, least: &[u64]) -> String {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("limit");
    fs::write(&path, old).unwrap();
    raise(root.path(), "limit", least).unwrap();
    fs::read_to_string(path).unwrap()
}

#[test]
fn raise_a_number_that_is_lower_writes_it() {
    assert_eq!(raised("912\n", &[24_082, 0, 0]), "24082\n");
    assert_eq!(raised("1\t2\t300\n", &[10, 20, 30]), "10\t20\t300\n");
}

#[test]
fn raise_a_number_that_is_higher_leaves_it() {
    assert_eq!(raised("30000\n", &[24_082, 0, 0]), "30000\n");
    assert_eq!(
        raised("4096 16384 4194304\n", &[0, 0, 65_536]),
        "4096 16384 4194304\n"
    );
}

#[test]
fn raise_ignores_a_missing_file() {
    let root = tempfile::tempdir().unwrap();
    raise(root.path(), "net/netfilter/nf_conntrack_max", &[1]).unwrap();
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
}

#[test]
fn raise_a_file_without_numbers_is_an_error_that_names_it() {
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join("limit"), "many\n").unwrap();
    let e = raise(root.path(), "limit", &[1]).unwrap_err();
    assert!(e.to_string().contains("limit"), "{e}");
}

#[test]
fn raise_own_a_limit_that_is_higher_leaves_it() {
    let old = getrlimit(Resource::Nproc);
    raise_own(Resource::Nproc, 0).unwrap();
    assert_eq!(getrlimit(Resource::Nproc), old);
}

#[test]
fn follow_memory_changes_nothing_unless_agent_booted() {
    follow_memory();
    assert_eq!(MADE_FOR.load(Ordering::Relaxed), 0);
}
