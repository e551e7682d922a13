use super::*;

const MIB: u64 = 1 << 20;
const SMALL: Shape = Shape {
    vcpus: 1,
    memory_mib: 128,
};

fn tenant(name: &str) -> Tenant {
    name.parse().unwrap()
}

fn limited(limits: TenantLimits) -> Arc<Admission> {
    Arc::new(Admission::with(limits, TenantLimits::default()))
}

/// An admission with one of these limits, which has room for exactly two small machines.
fn for_two() -> [(Quantity, Arc<Admission>); 4] {
    let two = |quantity, limits| (quantity, limited(limits));
    [
        two(
            Quantity::Running,
            TenantLimits {
                running: Some(2),
                ..TenantLimits::default()
            },
        ),
        two(
            Quantity::Vcpus,
            TenantLimits {
                vcpus: Some(2),
                ..TenantLimits::default()
            },
        ),
        two(
            Quantity::MemoryMib,
            TenantLimits {
                memory_mib: Some(256),
                ..TenantLimits::default()
            },
        ),
        two(
            Quantity::DiskMib,
            TenantLimits {
                disk_mib: Some(128),
                ..TenantLimits::default()
            },
        ),
    ]
}

#[test]
fn quota_refuses_with_its_name_and_numbers() {
    let acme = tenant("acme");
    for (quantity, admission) in for_two() {
        let create = || admission.create(Some(&acme), SMALL, 64 * MIB);
        let first = create().unwrap();
        let second = create().unwrap();
        let refused = create().unwrap_err();
        assert_eq!(refused.kind, ErrorKind::TenantQuota);
        let limit = admission.limits(Some(&acme)).limits.of(quantity).unwrap();
        for part in [
            "tenant acme".to_owned(),
            format!("{quantity} is {limit}: {limit} used, 0 free"),
        ] {
            assert!(refused.what.contains(&part), "{part}: {refused}");
        }
        // Another tenant, and sandboxes without a tenant, have their own places.
        admission.create(Some(&tenant("other")), SMALL, 64 * MIB).unwrap();
        admission.create(None, SMALL, 64 * MIB).unwrap();
        drop(first);
        let third = create().unwrap();
        drop((second, third));
        assert_eq!(admission.used(Some(&acme)), TenantUse::default());
        assert!(admission.tenants().is_empty(), "an empty account is not kept");
        let counted = admission.refused(false).into_iter().filter(|(_, n)| *n > 0);
        assert_eq!(counted.collect::<Vec<_>>(), [(quantity, 1)]);
    }
}

#[test]
fn last_place_is_given_once() {
    let acme = tenant("acme");
    for (quantity, admission) in for_two() {
        for _ in 0..20 {
            let places: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..8)
                    .map(|_| scope.spawn(|| admission.create(Some(&acme), SMALL, 64 * MIB).ok()))
                    .collect();
                threads.into_iter().filter_map(|t| t.join().unwrap()).collect()
            });
            assert_eq!(places.len(), 2, "{quantity}");
        }
    }
}

#[test]
fn paused_sandbox_keeps_its_disk_and_gives_its_machine_back() {
    let acme = tenant("acme");
    let admission = limited(TenantLimits {
        running: Some(1),
        paused: Some(1),
        disk_mib: Some(128),
        ..TenantLimits::default()
    });
    let running = admission.create(Some(&acme), SMALL, 64 * MIB).unwrap();
    let paused = running.pause().unwrap();
    drop(running);
    let used = admission.used(Some(&acme));
    assert_eq!((used.running, used.paused, used.disk_mib), (0, 1, 64));
    let other = admission.create(Some(&acme), SMALL, 64 * MIB).unwrap();
    let refused = other.pause().unwrap_err();
    assert!(refused.what.contains("paused is 1"), "{refused}");
    let refused = paused.resume(SMALL).unwrap_err();
    assert!(refused.what.contains("running is 1"), "{refused}");
    drop(other);
    let resumed = paused.resume(SMALL).unwrap();
    drop(paused);
    let used = admission.used(Some(&acme));
    assert_eq!((used.running, used.paused, used.disk_mib), (1, 0, 64));
    drop(resumed);
    assert_eq!(admission.used(Some(&acme)), TenantUse::default());
}

#[test]
fn adopted_sandboxes_count_and_are_not_refused() {
    let acme = tenant("acme");
    let capacity = TenantLimits {
        memory_mib: Some(300),
        ..TenantLimits::default()
    };
    let admission = Arc::new(Admission::with(
        TenantLimits {
            running: Some(1),
            paused: Some(0),
            ..TenantLimits::default()
        },
        capacity,
    ));
    let adopted = [(); 3].map(|()| admission.adopt(Some(&acme), SMALL, MIB));
    let paused = admission.adopt_paused(Some(&acme), MIB);
    let used = admission.used(Some(&acme));
    assert_eq!((used.running, used.paused, used.disk_mib), (3, 1, 4));
    let refused = admission.create(Some(&acme), SMALL, MIB).unwrap_err();
    assert!(refused.what.contains("running is 1: 3 used, 0 free"), "{refused}");
    drop((adopted, paused));
    admission.create(Some(&acme), SMALL, MIB).unwrap();
}

#[test]
fn capacity_counts_the_machines_of_all() {
    let capacity = TenantLimits {
        memory_mib: Some(300),
        vcpus: Some(8),
        ..TenantLimits::default()
    };
    let admission = Arc::new(Admission::with(TenantLimits::default(), capacity));
    let first = admission.create(Some(&tenant("acme")), SMALL, MIB).unwrap();
    let _pod = admission.adopt(None, SMALL, MIB);
    let refused = admission.create(None, SMALL, MIB).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::NodeCapacity);
    let numbers = "memory_mib is 300: 256 used, 44 free, 128 asked for";
    assert!(refused.what.contains(numbers), "{refused}");
    assert_eq!(admission.refused(true)[Quantity::MemoryMib as usize].1, 1);
    drop(first);
    let _second = admission.create(None, SMALL, MIB).unwrap();
    assert_eq!(admission.node().used_memory_mib, 256);
}

#[test]
fn creations_beyond_the_rate_say_when_to_retry() {
    let acme = tenant("acme");
    let admission = limited(TenantLimits {
        creations_per_minute: Some(2),
        ..TenantLimits::default()
    });
    admission.check(Some(&acme), SMALL, 2).unwrap();
    drop(admission.create(Some(&acme), SMALL, MIB).unwrap());
    let paused = admission
        .create(Some(&acme), SMALL, MIB)
        .unwrap()
        .pause()
        .unwrap();
    for refused in [
        admission.create(Some(&acme), SMALL, MIB).unwrap_err(),
        admission.check(Some(&acme), SMALL, 1).unwrap_err(),
        paused.resume(SMALL).unwrap_err(),
    ] {
        assert_eq!(refused.kind, ErrorKind::CreationRate);
        assert!(refused.what.contains("creations_per_minute is 2: 2 used, 0 free"));
        assert!(matches!(refused.retry_after_s, Some(1..=61)), "{refused}");
    }
    assert_eq!(admission.used(Some(&acme)).creations_per_minute, 2);
    admission.create(Some(&tenant("other")), SMALL, MIB).unwrap();
}

#[test]
fn snapshots_count_with_those_that_are_being_written() {
    let acme = tenant("acme");
    let admission = limited(TenantLimits {
        snapshot_bytes: Some(100),
        ..TenantLimits::default()
    });
    let write = |bytes, stored| admission.snapshot(Some(&acme), bytes, move || stored);
    let first = write(40, 20).unwrap();
    let refused = write(41, 20).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::TenantQuota);
    assert!(
        refused.what.contains("snapshot_bytes is 100: 60 used, 40 free"),
        "{refused}"
    );
    assert_eq!(
        admission.used(Some(&acme)).snapshot_bytes,
        40,
        "a refusal counts nothing"
    );
    let second = write(40, 20).unwrap();
    drop((first, second));
    write(80, 20).unwrap();
    write(u64::MAX, 20).unwrap_err();
    let adopted = admission.adopt_snapshot(Some(&acme), 101);
    assert_eq!(admission.used(Some(&acme)).snapshot_bytes, 101, "not refused");
    drop(adopted);
    // Without a limit, nothing is read.
    let unlimited = limited(TenantLimits::default());
    unlimited
        .snapshot(Some(&acme), u64::MAX, || panic!("read"))
        .unwrap();
}

#[test]
fn limits_of_a_tenant_are_set_and_survive() {
    let data = tempfile::tempdir().unwrap();
    let quotas = toml::from_str("[default]\nrunning = 1\n[tenants.big]\nvcpus = 9\n").unwrap();
    let open = || Admission::open(&quotas, &CapacityConfig::default(), data.path());
    let (acme, big) = (tenant("acme"), tenant("big"));
    let admission = open().unwrap();
    let of = |admission: &Admission, tenant| admission.limits(Some(tenant)).limits;
    assert_eq!(of(&admission, &acme).running, Some(1));
    assert_eq!(
        (of(&admission, &big).running, of(&admission, &big).vcpus),
        (None, Some(9))
    );
    assert_eq!(admission.limits(None), Limits::default());
    let own = TenantLimits {
        memory_mib: Some(7),
        ..TenantLimits::default()
    };
    admission.set_limits(&acme, Some(own)).unwrap();
    let later = open().unwrap();
    for admission in [&admission, &later] {
        let expected = Limits {
            limits: own,
            is_set: true,
        };
        assert_eq!(admission.limits(Some(&acme)), expected);
        assert_eq!(admission.tenants(), [acme.clone(), big.clone()]);
    }
    later.set_limits(&acme, None).unwrap();
    assert_eq!(open().unwrap().limits(Some(&acme)).limits.running, Some(1));
    std::fs::write(data.path().join("tenant-limits.json"), "{").unwrap();
    let refused = open().unwrap_err();
    assert!(refused.what.contains("tenant-limits.json"), "{refused}");
    assert!(refused.remedy.is_some());
}
