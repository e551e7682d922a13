use std::os::fd::OwnedFd;

use thaw_protocol::control::Backend;
use thaw_protocol::encoding::EncodingError;

use super::register::*;
use super::*;
use crate::layout::Window;
use crate::virtio::config::Config;
use crate::virtio::device::{AttachError, DeviceError, DeviceSpec, Saved};
use crate::virtio::interrupt::{CONFIG_CHANGE, USED_BUFFER};
use crate::virtio::state::{DecodeError, DeviceRecord, DeviceState, PmemState, QueueRecord};
use crate::virtio::testing::{Layout, MEMORY, eventfd, memory};

#[path = "mmio/freeze_test.rs"]
mod freeze;

const FEATURE: u64 = 1 << 3;
const REGION: SharedMemory = SharedMemory {
    id: 2,
    window: Window {
        start: 0x12_3456_7000,
        size: 0x4_0000_0000,
    },
};

/// A device that records the calls it gets.
struct Probe {
    config: Arc<ConfigSpace>,
    activation: Arc<Mutex<Option<Activation>>>,
    refuse: bool,
}

impl VirtioDevice for Probe {
    fn spec(&self) -> DeviceSpec {
        DeviceSpec {
            device_type: 42,
            features: FEATURE,
            queue_sizes: &[16, 32],
        }
    }
    fn config(&self) -> Arc<ConfigSpace> {
        self.config.clone()
    }
    fn shared_memory(&self) -> &[SharedMemory] {
        &[REGION]
    }
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        if self.refuse {
            return Err(DeviceError::Unanswerable {
                head: 0,
                what: "refused",
            });
        }
        *self.activation.lock().unwrap() = Some(activation);
        Ok(())
    }
    fn reset(&mut self) {
        *self.activation.lock().unwrap() = None;
    }
    fn attach(&mut self, _: Backend, _: Vec<OwnedFd>) -> Result<(), AttachError> {
        Err(AttachError::WrongKind("none"))
    }
    fn save(&mut self) -> Saved {
        Saved::plain(self.activation.lock().unwrap().as_ref())
    }
    fn check(&self, state: &DeviceState, _: Option<&[QueueRecord]>) -> Result<(), String> {
        state.check_plain()
    }
    fn restore(&mut self, activation: Option<Activation>, _: &DeviceState) -> Result<(), DeviceError> {
        *self.activation.lock().unwrap() = activation;
        Ok(())
    }
    fn queue_ready(&mut self, _: usize) -> Result<(), DeviceError> {
        Ok(())
    }
}

struct Rig {
    transport: MmioDevice,
    activation: Arc<Mutex<Option<Activation>>>,
    config: Config<[u8; 8]>,
    interrupt: Arc<Interrupt>,
    kicks: Vec<Arc<EventFd>>,
}

impl Rig {
    fn new() -> Rig {
        Rig::with(false)
    }

    fn with(refuse: bool) -> Rig {
        let activation = Arc::new(Mutex::new(None));
        let config = ConfigSpace::with_writable(vec![1, 2, 3, 4, 5, 6, 7, 8], 4..8).varying(0..1);
        let config: Config<[u8; 8]> = Config::of(config);
        let probe = Probe {
            config: config.space(),
            activation: activation.clone(),
            refuse,
        };
        let interrupt = Arc::new(Interrupt::new(eventfd()));
        let kicks = vec![Arc::new(eventfd()), Arc::new(eventfd())];
        let device = Arc::new(Mutex::new(probe));
        let transport = MmioDevice::new(
            DeviceId::Rng,
            device,
            interrupt.clone(),
            kicks.clone(),
            memory().clone(),
        )
        .unwrap();
        Rig {
            transport,
            activation,
            config,
            interrupt,
            kicks,
        }
    }

    fn get(&self, offset: u64) -> u32 {
        let mut data = [0xAA; 4];
        self.transport.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn set(&self, offset: u64, value: u32) {
        self.transport.write(offset, &value.to_le_bytes());
    }

    fn negotiate(&self, features: u64) -> u32 {
        self.set(STATUS, 0);
        self.set(STATUS, ACKNOWLEDGE);
        self.set(STATUS, ACKNOWLEDGE | DRIVER);
        for half in 0..2 {
            self.set(DRIVER_FEATURES_SEL, half);
            self.set(DRIVER_FEATURES, (features >> (32 * half)) as u32);
        }
        self.set(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK);
        self.get(STATUS)
    }

    fn set_up_queue(&self, queue: u32, size: u16, start: u64) {
        let layout = Layout::new(memory(), start, size);
        self.set(QUEUE_SEL, queue);
        self.set(QUEUE_NUM, u32::from(size));
        let addresses = [
            (QUEUE_DESC_LOW, layout.descriptors),
            (QUEUE_DRIVER_LOW, layout.available),
            (QUEUE_DEVICE_LOW, layout.used),
        ];
        for (register, address) in addresses {
            self.set(register, address as u32);
            self.set(register + 4, (address >> 32) as u32);
        }
        self.set(QUEUE_READY, 1);
    }

    fn start(&self) {
        assert_ne!(self.negotiate(1 << VIRTIO_F_VERSION_1) & FEATURES_OK, 0);
        self.set_up_queue(0, 16, 0x1000);
        self.set_up_queue(1, 32, 0x4000);
        self.set(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    }

    fn active(&self) -> bool {
        self.activation.lock().unwrap().is_some()
    }
}

#[test]
fn the_window_says_what_it_is() {
    let rig = Rig::new();
    assert_eq!(rig.get(MAGIC_VALUE).to_le_bytes(), *b"virt");
    assert_eq!(rig.get(super::register::VERSION), 2);
    assert_eq!(rig.get(DEVICE_ID), 42);
    rig.set(DEVICE_FEATURES_SEL, 0);
    assert_eq!(u64::from(rig.get(DEVICE_FEATURES)), FEATURE | 1 << 28 | 1 << 29);
    rig.set(DEVICE_FEATURES_SEL, 1);
    assert_eq!(rig.get(DEVICE_FEATURES), 1);
    rig.set(DEVICE_FEATURES_SEL, 2);
    assert_eq!(rig.get(DEVICE_FEATURES), 0);
}

#[test]
fn a_driver_goes_from_reset_to_running() {
    let rig = Rig::new();
    assert_eq!(rig.get(STATUS), 0);
    rig.start();
    assert_eq!(rig.get(STATUS), ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    let activation = rig.activation.lock().unwrap();
    let activation = activation.as_ref().unwrap();
    assert_eq!(activation.features, 1 << VIRTIO_F_VERSION_1);
    assert_eq!(
        activation.queues.iter().map(|q| q.size()).collect::<Vec<_>>(),
        [16, 32]
    );
    assert!(
        rig.kicks.iter().all(|kick| kick.read().is_ok()),
        "early buffers are looked for"
    );
}

#[test]
fn features_not_offered_or_without_version_1_are_refused() {
    let rig = Rig::new();
    assert_eq!(rig.negotiate(1 << VIRTIO_F_VERSION_1 | 1 << 7) & FEATURES_OK, 0);
    assert_eq!(rig.negotiate(FEATURE) & FEATURES_OK, 0);
    assert_ne!(rig.negotiate(FEATURE | 1 << VIRTIO_F_VERSION_1) & FEATURES_OK, 0);
}

#[test]
fn features_are_fixed_once_accepted_and_closed_before_driver() {
    let rig = Rig::new();
    rig.set(DRIVER_FEATURES_SEL, 1);
    rig.set(DRIVER_FEATURES, 1);
    rig.set(STATUS, ACKNOWLEDGE);
    rig.set(STATUS, ACKNOWLEDGE | DRIVER);
    rig.set(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK);
    assert_eq!(
        rig.get(STATUS) & FEATURES_OK,
        0,
        "written before DRIVER, VERSION_1 did not count"
    );

    rig.negotiate(1 << VIRTIO_F_VERSION_1);
    rig.set(DRIVER_FEATURES_SEL, 0);
    rig.set(DRIVER_FEATURES, FEATURE as u32);
    rig.set(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    assert_eq!(
        rig.activation.lock().unwrap().as_ref().unwrap().features,
        1 << VIRTIO_F_VERSION_1
    );
}

#[test]
fn steps_out_of_order_do_not_happen() {
    let rig = Rig::new();
    rig.set(STATUS, DRIVER);
    assert_eq!(rig.get(STATUS), 0);
    rig.set(STATUS, ACKNOWLEDGE | DRIVER | DRIVER_OK);
    assert_eq!(
        rig.get(STATUS),
        ACKNOWLEDGE | DRIVER,
        "no DRIVER_OK without FEATURES_OK"
    );
    rig.set(STATUS, ACKNOWLEDGE);
    assert_eq!(rig.get(STATUS), ACKNOWLEDGE | DRIVER, "no bit is cleared");
    rig.set(STATUS, ACKNOWLEDGE | DRIVER | NEEDS_RESET | 0x100);
    assert_eq!(
        rig.get(STATUS),
        ACKNOWLEDGE | DRIVER,
        "NEEDS_RESET is the device's"
    );
    assert!(!rig.active());
    rig.set(STATUS, ACKNOWLEDGE | DRIVER | FAILED);
    assert_eq!(rig.get(STATUS), ACKNOWLEDGE | DRIVER | FAILED);
}

#[test]
fn queues_are_set_up_between_features_and_running_only() {
    let rig = Rig::new();
    rig.set(QUEUE_SEL, 1);
    assert_eq!(rig.get(QUEUE_NUM_MAX), 32);
    rig.set(QUEUE_READY, 1);
    assert_eq!(rig.get(QUEUE_READY), 0, "not before FEATURES_OK");
    rig.set(QUEUE_SEL, 2);
    assert_eq!(
        (rig.get(QUEUE_NUM_MAX), rig.get(QUEUE_READY)),
        (0, 0),
        "there is no third queue"
    );

    rig.start();
    rig.set(QUEUE_SEL, 1);
    assert_eq!(rig.get(QUEUE_READY), 1);
    rig.set(QUEUE_READY, 0);
    assert_eq!(rig.get(QUEUE_READY), 1, "not while running");
}

#[test]
fn a_ready_queue_keeps_its_shape_and_bad_sizes_are_ignored() {
    let rig = Rig::new();
    rig.negotiate(1 << VIRTIO_F_VERSION_1);
    rig.set(QUEUE_SEL, 0);
    for size in [0, 3, 32, 0x1_0010] {
        rig.set(QUEUE_NUM, size);
    }
    rig.set_up_queue(0, 8, 0x1000);
    rig.set(QUEUE_NUM, 4);
    rig.set(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    let activation = rig.activation.lock().unwrap();
    assert_eq!(activation.as_ref().unwrap().queues[0].size(), 8);
}

#[test]
fn rings_outside_memory_need_a_reset() {
    let rig = Rig::new();
    rig.negotiate(1 << VIRTIO_F_VERSION_1);
    rig.set(QUEUE_SEL, 0);
    rig.set(QUEUE_DESC_LOW, (MEMORY - 16) as u32);
    rig.set(QUEUE_READY, 1);
    rig.set(STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    assert_ne!(rig.get(STATUS) & NEEDS_RESET, 0);
    assert!(!rig.active());
    assert_eq!(rig.get(INTERRUPT_STATUS), CONFIG_CHANGE);
}

#[test]
fn device_that_fails_to_start_recovers_by_a_reset() {
    let rig = Rig::with(true);
    rig.start();
    assert_ne!(rig.get(STATUS) & NEEDS_RESET, 0);
    rig.set(STATUS, 0);
    assert_eq!(rig.get(STATUS), 0);
    assert_eq!(rig.get(INTERRUPT_STATUS), 0);
}

#[test]
fn a_reset_forgets_everything_the_driver_did() {
    let rig = Rig::new();
    rig.start();
    rig.interrupt.used_buffer();
    rig.interrupt.fail();
    rig.set(STATUS, 0);
    assert!(!rig.active());
    assert_eq!((rig.get(STATUS), rig.get(INTERRUPT_STATUS)), (0, 0));
    rig.set(QUEUE_SEL, 0);
    assert_eq!(rig.get(QUEUE_READY), 0);
    rig.start();
    assert!(rig.active(), "and it can start again");
}

#[test]
fn interrupt_reasons_stay_until_acknowledged() {
    let rig = Rig::new();
    rig.start();
    rig.interrupt.used_buffer();
    rig.interrupt.config_changed();
    assert_eq!(rig.get(INTERRUPT_STATUS), USED_BUFFER | CONFIG_CHANGE);
    rig.set(INTERRUPT_ACK, USED_BUFFER);
    assert_eq!(rig.get(INTERRUPT_STATUS), CONFIG_CHANGE);
}

#[test]
fn configuration_is_read_in_any_width_with_its_generation() {
    let rig = Rig::new();
    let mut long = [0; 8];
    rig.transport.read(CONFIG, &mut long);
    assert_eq!(long, [1, 2, 3, 4, 5, 6, 7, 8]);
    let mut byte = [0];
    rig.transport.read(CONFIG + 2, &mut byte);
    assert_eq!(byte, [3]);
    let before = rig.get(CONFIG_GENERATION);
    rig.transport.write(CONFIG, &[9; 4]);
    rig.transport.write(CONFIG + 4, &[9; 4]);
    assert_eq!(rig.config.space().bytes(), [1, 2, 3, 4, 9, 9, 9, 9]);
    assert_eq!(
        rig.get(CONFIG_GENERATION),
        before,
        "the driver's own writes are no news to it"
    );
    rig.config.change(|bytes| bytes[0] = 7);
    assert_ne!(rig.get(CONFIG_GENERATION), before);
}

#[test]
fn shared_memory_is_told_by_id_and_absent_regions_are_all_ones() {
    let rig = Rig::new();
    rig.set(SHM_SEL, 2);
    let long = |low| u64::from(rig.get(low)) | u64::from(rig.get(low + 4)) << 32;
    assert_eq!(
        (long(SHM_BASE_LOW), long(SHM_LEN_LOW)),
        (REGION.window.start, REGION.window.size)
    );
    rig.set(SHM_SEL, 0);
    assert_eq!(long(SHM_LEN_LOW), u64::MAX);
}

#[test]
fn registers_take_whole_words_only() {
    let rig = Rig::new();
    let mut half = [0xAA; 2];
    rig.transport.read(MAGIC_VALUE, &mut half);
    assert_eq!(half, [0; 2]);
    rig.transport.write(STATUS, &[1]);
    assert_eq!(rig.get(STATUS), 0);
    assert_eq!(rig.get(0x0f0), 0, "no register there");
}

#[test]
fn notify_register_kicks_the_queue_it_names() {
    let rig = Rig::new();
    rig.start();
    rig.kicks.iter().for_each(|kick| drop(kick.read()));
    rig.set(QUEUE_NOTIFY, 1);
    rig.set(QUEUE_NOTIFY, 9);
    assert!(rig.kicks[0].read().is_err());
    assert!(rig.kicks[1].read().is_ok());
}

proptest::proptest! {
    /// No sequence of writes panics, and the device is active only while DRIVER_OK is set.
    #[test]
    fn any_writes_are_survived(
        writes in proptest::collection::vec((0u64..0x40, proptest::num::u32::ANY, 0usize..4), 0..200),
    ) {
        let rig = Rig::new();
        for (register, value, kind) in writes {
            match kind {
                0 => rig.set(register * 4, value),
                1 => rig.set(STATUS, value & 0xcf),
                2 => rig.start(),
                _ => rig.set(register * 4, value % 4),
            }
            let running = rig.get(STATUS) & (DRIVER_OK | NEEDS_RESET) == DRIVER_OK;
            assert_eq!(rig.active(), running);
        }
    }
}
