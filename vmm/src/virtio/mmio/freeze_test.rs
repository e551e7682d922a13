//! Freezes a device, and tests which records a restore accepts.

use super::*;

fn thaw(record: &DeviceRecord) -> Rig {
    let record = DeviceRecord::decode(&record.encode()).unwrap();
    let rig = Rig::new();
    rig.transport.check(&record).unwrap();
    rig.transport.restore(&record).unwrap();
    rig
}

#[test]
fn a_frozen_device_is_the_same_register_by_register() {
    let rig = Rig::new();
    rig.start();
    rig.interrupt.used_buffer();
    rig.config.change(|bytes| bytes[0] = 9);
    rig.transport.write(CONFIG + 4, &[8; 4]);
    rig.set(QUEUE_SEL, 1);
    rig.set(SHM_SEL, 2);
    let record = rig.transport.save();
    let thawed = thaw(&record);
    assert!(thawed.active());
    assert_eq!(thawed.transport.save(), record);
    for offset in (0..0x110).step_by(4) {
        assert_eq!(thawed.get(offset), rig.get(offset), "register {offset:#x}");
    }
    assert!(thawed.interrupt.line().read().is_err(), "silent while parked");
    thawed.transport.release();
    assert_eq!(thawed.interrupt.line().read().unwrap(), 1);
    // The driver continues: it acknowledges, resets, starts anew.
    thawed.set(INTERRUPT_ACK, USED_BUFFER);
    assert_eq!(thawed.get(INTERRUPT_STATUS), 0);
    thawed.set(STATUS, 0);
    assert!(!thawed.active());
    thawed.start();
    assert!(thawed.active());
}

#[test]
fn a_driver_half_way_up_goes_on_after_the_thaw() {
    let rig = Rig::new();
    rig.negotiate(1 << VIRTIO_F_VERSION_1);
    rig.set_up_queue(0, 16, 0x1000);
    let thawed = thaw(&rig.transport.save());
    assert!(!thawed.active());
    thawed.set_up_queue(1, 32, 0x4000);
    thawed.set(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    assert!(thawed.active());
}

#[test]
fn a_device_that_had_failed_still_needs_its_reset() {
    let rig = Rig::new();
    rig.start();
    rig.interrupt.fail();
    let thawed = thaw(&rig.transport.save());
    assert!(!thawed.active());
    assert_ne!(thawed.get(STATUS) & NEEDS_RESET, 0);
    thawed.transport.release();
    assert_eq!(thawed.interrupt.reasons(), CONFIG_CHANGE);
}

#[test]
fn what_differs_from_the_frozen_device_is_refused_by_name() {
    let rig = Rig::new();
    rig.start();
    let good = rig.transport.save();
    let refused = |change: &dyn Fn(&mut DeviceRecord)| {
        let mut record = good.clone();
        change(&mut record);
        let fresh = Rig::new();
        let before = fresh.transport.save();
        let error = fresh.transport.check(&record).unwrap_err().to_string();
        assert_eq!(fresh.transport.save(), before, "nothing was changed");
        assert!(error.starts_with("Rng: "), "{error}");
        error
    };
    for (what, change) in [
        (
            "device type",
            (&|r: &mut DeviceRecord| r.inventory.device_type = 1) as &dyn Fn(&mut DeviceRecord),
        ),
        ("features", &|r| r.inventory.features ^= 1 << 40),
        ("queue sizes", &|r| r.inventory.queue_sizes[0] = 8),
        ("shared memory", &|r| r.inventory.shared_memory.clear()),
        ("configuration", &|r| r.config[1] = 7),
        ("configuration", &|r| r.config.push(0)),
        ("status", &|r| r.transport.status = DRIVER_OK),
        ("status", &|r| r.transport.status |= 0x10),
        ("status", &|r| r.transport.driver_features |= 1 << 50),
        ("interrupt reasons", &|r| r.transport.reasons = 4),
        ("1 queues", &|r| r.transport.queues.truncate(1)),
        ("queue 0", &|r| r.transport.queues[0].size = 15),
        ("queue 0", &|r| r.transport.queues[0].size = 32),
        ("queue 1", &|r| r.transport.queues[1].descriptors = MEMORY),
        ("queue 1", &|r| r.transport.queues[1].available = u64::MAX - 1),
        ("queue 1", &|r| r.transport.queues[1].used = 1),
        ("another kind", &|r| r.state = PmemState { mapped: 0 }.into()),
    ] {
        let error = refused(change);
        assert!(error.contains(what), "{what}: {error}");
    }
}

#[test]
fn records_of_another_version_or_length_are_refused() {
    let bytes = Rig::new().transport.save().encode();
    assert!(DeviceRecord::decode(&bytes).is_ok());
    let mut other = bytes.clone();
    other[0] += 1;
    assert!(matches!(
        DeviceRecord::decode(&other),
        Err(DecodeError::Version(3))
    ));
    let longer = [&bytes[..], &[0]].concat();
    assert!(matches!(
        DeviceRecord::decode(&longer),
        Err(DecodeError::Malformed(EncodingError::Trailing { bytes: 1, .. }))
    ));
    for length in 0..bytes.len() {
        assert!(DeviceRecord::decode(&bytes[..length]).is_err());
    }
}
