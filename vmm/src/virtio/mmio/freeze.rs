//! Saves a device and its registers as a record, and restores them.
//!
//! Invariant: [`MmioDevice::check`] accepts only values that a driver could have written. So a restored device never gets a state that its
//! driver could not have set.

use thaw_sys::lock::Lock;
use virtio_queue::QueueT;

use super::{ACKNOWLEDGE, DRIVER, DRIVER_OK, FAILED, FEATURES_OK, MmioDevice, Registers};
use crate::virtio::device::RestoreError;
use crate::virtio::interrupt::{CONFIG_CHANGE, USED_BUFFER};
use crate::virtio::state::{DeviceRecord, InventoryRecord, QueueRecord, TransportRecord};

impl MmioDevice {
    /// The state a freeze keeps. No event may be in progress and no vCPU may run.
    pub fn save(&self) -> DeviceRecord {
        let registers = self.registers();
        let mut device = self.device.locked();
        let saved = device.save();
        // For a device that is not active: the setup that the driver has made so far.
        let queues = saved.queues.unwrap_or_else(|| {
            let queues = registers.queues.iter();
            queues
                .map(|queue| QueueRecord::new(queue.state(), false))
                .collect()
        });
        let (config, generation) = self.config.snapshot();
        DeviceRecord {
            id: self.id,
            inventory: self.inventory(&registers),
            transport: TransportRecord {
                status: registers.status,
                device_features_select: registers.device_features_select,
                driver_features_select: registers.driver_features_select,
                driver_features: registers.driver_features,
                queue_select: registers.queue_select,
                shared_memory_select: registers.shared_memory_select,
                queues,
                reasons: self.interrupt.reasons(),
                needs_reset: self.interrupt.failed(),
            },
            config,
            generation,
            state: saved.state,
            backed: device.is_backed(),
        }
    }

    /// Whether [`Self::restore`] would accept `record`; changes nothing.
    pub fn check(&self, record: &DeviceRecord) -> Result<(), RestoreError> {
        self.check_inventory(record)?;
        self.check_transport(&record.transport)
            .and_then(|()| {
                let queues = is_active(&record.transport).then_some(&record.transport.queues[..]);
                self.device.locked().check(&record.state, queues)
            })
            .map_err(|what| RestoreError::Invalid {
                device: self.id,
                what,
            })
    }

    /// Restores `record` into a device whose driver was never up. [`Self::check`] must have accepted the record. No event is served and no
    /// interrupt raised before [`Self::release`].
    pub fn restore(&self, record: &DeviceRecord) -> Result<(), RestoreError> {
        let transport = &record.transport;
        let mut registers = self.registers();
        registers.status = transport.status;
        registers.device_features_select = transport.device_features_select;
        registers.driver_features_select = transport.driver_features_select;
        registers.driver_features = transport.driver_features;
        registers.queue_select = transport.queue_select;
        registers.shared_memory_select = transport.shared_memory_select;
        for (queue, record) in registers.queues.iter_mut().zip(&transport.queues) {
            if let Some(restored) = record.queue(queue.max_size(), false) {
                *queue = restored;
            }
        }
        self.config.restore(&record.config, record.generation);
        self.interrupt.restore(
            transport.reasons,
            transport.status & DRIVER_OK != 0,
            transport.needs_reset,
        );
        let activation = is_active(transport)
            .then(|| self.activation(&registers))
            .flatten();
        let active = activation.is_some();
        self.device
            .locked()
            .restore(activation, &record.state)
            .map_err(|error| RestoreError::System {
                device: self.id,
                error,
            })?;
        for (index, queue) in (0..).zip(&transport.queues) {
            if active && queue.has_work {
                self.kick(index);
            }
        }
        Ok(())
    }

    /// Raises the pending interrupt of a restored device. From now on interrupts are raised as usual.
    pub fn release(&self) {
        self.interrupt.release();
    }

    fn inventory(&self, registers: &Registers) -> InventoryRecord {
        let regions = self.shared_memory.iter();
        InventoryRecord {
            device_type: self.device_type,
            features: self.features,
            queue_sizes: registers.queues.iter().map(QueueT::max_size).collect(),
            shared_memory: regions
                .map(|region| (region.id, region.window.start, region.window.size))
                .collect(),
        }
    }

    /// Checks that the frozen properties are this device's.
    fn check_inventory(&self, record: &DeviceRecord) -> Result<(), RestoreError> {
        let (frozen, here) = (&record.inventory, self.inventory(&self.registers()));
        let fields = [
            (
                "device type",
                frozen.device_type.to_string(),
                here.device_type.to_string(),
            ),
            (
                "features",
                format!("{:#x}", frozen.features),
                format!("{:#x}", here.features),
            ),
            (
                "queue sizes",
                format!("{:?}", frozen.queue_sizes),
                format!("{:?}", here.queue_sizes),
            ),
            (
                "shared memory",
                format!("{:x?}", frozen.shared_memory),
                format!("{:x?}", here.shared_memory),
            ),
        ];
        for (field, frozen, here) in fields {
            if frozen != here {
                return Err(self.mismatch(field, frozen, here));
            }
        }
        self.config.check(&record.config).map_err(|differs| {
            let (frozen, here) = differs.sides();
            self.mismatch("configuration", frozen, here)
        })
    }

    fn mismatch(&self, field: &'static str, frozen: String, here: String) -> RestoreError {
        RestoreError::Mismatch {
            device: self.id,
            field,
            frozen,
            here,
        }
    }

    /// Checks that a driver could have written these values.
    fn check_transport(&self, transport: &TransportRecord) -> Result<(), String> {
        let status = transport.status;
        let has = |bit: u32| status & bit != 0;
        let known = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK | FAILED;
        let ordered = (!has(DRIVER) || has(ACKNOWLEDGE))
            && (!has(FEATURES_OK) || has(DRIVER) && self.acceptable(transport.driver_features))
            && (!has(DRIVER_OK) || has(FEATURES_OK));
        if status & !known != 0 || !ordered {
            return Err(format!(
                "status {status:#x} with features {:#x} cannot be reached",
                transport.driver_features
            ));
        }
        if transport.reasons & !(USED_BUFFER | CONFIG_CHANGE) != 0 {
            return Err(format!("interrupt reasons {:#x} do not exist", transport.reasons));
        }
        let registers = self.registers();
        if transport.queues.len() != registers.queues.len() {
            return Err(format!("{} queues", transport.queues.len()));
        }
        for (index, (record, here)) in transport.queues.iter().zip(&registers.queues).enumerate() {
            let queue = record.queue(here.max_size(), false);
            let valid = queue.is_some_and(|queue| {
                !(queue.ready() && is_active(transport)) || queue.is_valid(&self.memory)
            });
            if !valid {
                return Err(format!(
                    "queue {index} of {} entries is not in guest memory",
                    record.size
                ));
            }
        }
        Ok(())
    }
}

/// Whether the device serves its queues: the driver is up, and it has not failed.
fn is_active(transport: &TransportRecord) -> bool {
    transport.status & DRIVER_OK != 0 && !transport.needs_reset
}
