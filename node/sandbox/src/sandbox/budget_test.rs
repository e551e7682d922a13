use super::*;

const MIB: u64 = 1 << 20;

fn budget(limit: Option<u64>, data: &Path) -> Arc<Budget> {
    let limit = limit.map(|bytes| DiskLimit::Bytes(Size(bytes)));
    Arc::new(Budget::open(&DiskConfig { limit }, data).unwrap())
}

/// A snapshot's directory that occupies some of its disk.
fn snapshot(data: &Path, name: &str) -> PathBuf {
    let place = data.join(name);
    fs::create_dir_all(place.join("disks")).unwrap();
    fs::write(place.join("disks/blk0"), vec![1; 64 << 10]).unwrap();
    place
}

#[tokio::test]
async fn sandbox_beyond_the_limit_is_refused_with_all_numbers() {
    let data = tempfile::tempdir().unwrap();
    let budget = budget(Some(100 * MIB), data.path());
    let first = budget.sandbox(60 * MIB).await.unwrap();
    let refused = budget.sandbox(60 * MIB).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::DiskBudget);
    for number in [100 * MIB, 64 * MIB] {
        assert!(refused.what.contains(&number.to_string()), "{refused}");
    }
    let statistics = budget.statistics();
    assert_eq!(
        (statistics.limit, statistics.sandboxes),
        (Some(100 * MIB), 64 * MIB)
    );
    assert_eq!(
        (statistics.refused_sandboxes, statistics.refused_snapshots),
        (1, 0)
    );
    drop(first);
    assert_eq!(budget.statistics().sandboxes, 0);
    // The limit holds to the byte.
    let whole = budget.sandbox(96 * MIB).await.unwrap();
    assert_eq!(budget.statistics().sandboxes, 100 * MIB);
    drop(whole);
    assert!(budget.sandbox(96 * MIB + 1).await.is_err());
    assert!(budget.sandbox(u64::MAX).await.is_err());
}

#[tokio::test]
async fn sandboxes_at_once_never_exceed_the_limit() {
    let data = tempfile::tempdir().unwrap();
    let budget = budget(Some(10 * (MIB + LOGS)), data.path());
    let takers = (0..40).map(|_| {
        let budget = budget.clone();
        tokio::spawn(async move { budget.sandbox(MIB).await.ok() })
    });
    let taken: Vec<_> = futures_util::future::join_all(takers).await;
    let shares: Vec<_> = taken.into_iter().filter_map(|share| share.unwrap()).collect();
    assert_eq!(shares.len(), 10);
    assert_eq!(budget.statistics().refused_sandboxes, 30);
}

#[tokio::test]
async fn adopted_sandboxes_count_and_are_never_refused() {
    let data = tempfile::tempdir().unwrap();
    let budget = budget(Some(10 * MIB), data.path());
    let adopted = budget.adopt(50 * MIB);
    assert_eq!(budget.statistics().sandboxes, 54 * MIB);
    assert!(budget.sandbox(MIB).await.is_err());
    drop(adopted);
    let needed = budget.adopt_snapshot(50 * MIB);
    assert_eq!(budget.statistics().snapshots, 50 * MIB);
    drop(needed);
    budget.sandbox(MIB).await.unwrap();
}

#[tokio::test]
async fn removed_snapshot_frees_budget_and_kept_one_survives_restart() {
    let data = tempfile::tempdir().unwrap();
    let disk = Disk::of(tempfile::tempfile().unwrap().into()).unwrap();
    let first = budget(Some(64 * MIB + 512), data.path());
    let share = first.snapshot(64, &disk).await.unwrap();
    assert_eq!(first.statistics().snapshots, 64 * MIB);
    let refused = first.snapshot(64, &disk).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::DiskBudget);
    assert!(refused.what.contains("a snapshot"), "{refused}");
    let place = snapshot(data.path(), "made");
    first.written(share, &place);
    let taken = first.statistics().snapshots;
    assert!((64 << 10..MIB).contains(&taken), "{taken}");

    let second = budget(Some(64 * MIB + 512), data.path());
    assert_eq!(second.statistics().snapshots, taken);
    assert!(second.snapshot(64, &disk).await.is_err());
    fs::remove_dir_all(&place).unwrap();
    second.snapshot(64, &disk).await.unwrap();
    assert_eq!(second.statistics().snapshots, 0);
    assert_eq!(budget(None, data.path()).statistics().snapshots, 0);
}

#[test]
fn damaged_list_is_named_at_the_start() {
    let data = tempfile::tempdir().unwrap();
    let list = data.path().join(LIST);
    for text in ["", "{}", "{\"version\": 2, \"snapshots\": {}}", "[1]"] {
        fs::write(&list, text).unwrap();
        let failure = Budget::open(&DiskConfig::default(), data.path()).unwrap_err();
        assert!(failure.to_string().contains(LIST), "{text}: {failure}");
    }
}

#[test]
fn percent_is_of_the_file_system() {
    let data = tempfile::tempdir().unwrap();
    let of = |percent| {
        let limit = Some(DiskLimit::Percent(percent));
        Budget::open(&DiskConfig { limit }, &data.path().join("not/there"))
            .unwrap()
            .limit
            .unwrap()
    };
    let whole = of(100);
    assert!(whole > 0 && of(50).abs_diff(whole / 2) <= 1 && of(1).abs_diff(whole / 100) <= 1);
}
