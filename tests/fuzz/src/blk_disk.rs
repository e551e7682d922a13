//! Requests to a disk that is a file, which may be written or not and may be replaced, taken away and limited meanwhile, also by a layer over
//! a base.
//!
//! Checked: each file keeps its length, the first one its bytes past the last whole sector, and the base all of its bytes.

use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use thaw_protocol::control::{Backend, DeviceId};
use thaw_protocol::device_limits::{Bucket, DeviceLimits, DeviceLimit};
use thaw_protocol::disk_layer::file_bytes;
use thaw_vmm::virtio::VirtioDevice;
use thaw_vmm::virtio::blk::Blk;
use thaw_vmm::virtio::event_loop::EventLoop;

use crate::guest::{self, World, memory_file};
use crate::script::Script;

const SECTORS: u64 = 100;
/// What is no whole sector is not the disk's.
const TAIL: &[u8] = b"not of the disk";
/// What the base is filled with.
const BASE: u8 = 0xBA;

struct Disks {
    device: Option<Arc<Mutex<dyn VirtioDevice>>>,
    file: OwnedFd,
    /// Every byte is [`BASE`].
    base: OwnedFd,
    layer: OwnedFd,
}

impl World for Disks {
    const ID: DeviceId = DeviceId::Blk1;

    fn device(&mut self, event_loop: &EventLoop) -> Arc<Mutex<dyn VirtioDevice>> {
        let registrar = event_loop.registrar(DeviceId::Blk1);
        let device: Arc<Mutex<dyn VirtioDevice>> = Arc::new(Mutex::new(Blk::new("blk1", registrar)));
        self.device = Some(device.clone());
        device
    }

    fn attach(&mut self) {
        self.attach_as(false).expect("a file is a disk");
    }

    fn act(&mut self, script: &mut Script<'_>) {
        let Some(device) = &self.device else { return };
        match script.byte() % 5 {
            0 => device.lock().expect("nobody panicked").detach().expect("a disk can be taken away"),
            // Refused where the guest was frozen with one it could write.
            1 => drop(self.attach_as(true)),
            2 => self.attach(),
            3 => {
                let [base, layer] = [&self.base, &self.layer].map(|file| file.try_clone().expect("a descriptor"));
                let mut device = device.lock().expect("nobody panicked");
                device.attach(Backend::LayeredDisk, vec![base, layer]).expect("two files are a disk");
            }
            _ => {
                let bucket = NonZeroU64::new(script.byte().into()).map(|burst| Bucket {
                    per_second: burst,
                    burst,
                    once: script.word().into(),
                });
                let limit = DeviceLimit {
                    bytes: bucket,
                    operations: bucket,
                };
                let limited = device.lock().expect("nobody panicked").limit(DeviceLimits::Disk(limit));
                limited.expect("a disk has limits");
            }
        }
    }

    fn check(&self) {
        let end = SECTORS * 512;
        let length = |file| rustix::fs::fstat(file).expect("a file").st_size as u64;
        assert_eq!(length(&self.file), end + TAIL.len() as u64);
        assert_eq!((length(&self.base), length(&self.layer)), (end, file_bytes(end)));
        let mut base = vec![0; end as usize];
        rustix::io::pread(&self.base, &mut base[..], 0).expect("a file");
        assert!(base.iter().all(|byte| *byte == BASE), "the base is never written");
        let mut tail = [0; TAIL.len()];
        rustix::io::pread(&self.file, &mut tail, end).expect("a file");
        assert_eq!(tail, TAIL);
    }
}

impl Disks {
    fn attach_as(&mut self, read_only: bool) -> Result<(), thaw_vmm::virtio::device::AttachError> {
        let Some(device) = &self.device else { return Ok(()) };
        let file = self.file.try_clone().expect("a descriptor");
        let mut device = device.lock().expect("nobody panicked");
        device.attach(Backend::Disk { read_only }, vec![file])
    }
}

/// See [`guest`].
pub fn run(input: &[u8]) {
    let file = memory_file(SECTORS * 512 + TAIL.len() as u64);
    rustix::io::pwrite(&file, TAIL, SECTORS * 512).expect("room");
    let (base, layer) = (memory_file(SECTORS * 512), memory_file(file_bytes(SECTORS * 512)));
    rustix::io::pwrite(&base, &[BASE; SECTORS as usize * 512], 0).expect("room");
    let disks = Disks {
        device: None,
        file,
        base,
        layer,
    };
    guest::run(disks, input);
}
