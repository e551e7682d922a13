//! Block devices of the host that containers use. They are attached to disk slots of the running machine, and
//! later detached to free the slot for another disk.
//!
//! Invariant: the guest's driver is bound to a slot again for the first container that uses the disk there, and
//! unbound after the last. When the bind returns, the driver has read the size and block size of the present
//! disk. When the unbind returns, everything is written back, the guest caches nothing of the disk, and every
//! descriptor that is still open returns errors.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use thaw_protocol::agent::agent::Device;
use thaw_protocol::agent::{layout, oci};
use thaw_sys::lock::Lock;

use crate::error::{Error, Result, WithContext};
use crate::warning;

/// The ACPI name of the machine's devices; the `_UID` is the slot.
const ACPI_DEVICE: &str = "LNRO0005";
/// `BLKROSET` (linux/fs.h).
const SET_READ_ONLY: libc::Ioctl = 0x125d;

/// The disks of this guest.
#[derive(Debug)]
pub struct Disks {
    bus: PathBuf,
    nodes: PathBuf,
    /// The containers that use the disk in each slot. Locked while a driver is bound or unbound.
    users: Mutex<BTreeMap<u32, BTreeSet<String>>>,
}

impl Default for Disks {
    fn default() -> Self {
        Disks {
            bus: "/sys/bus".into(),
            nodes: "/dev".into(),
            users: Mutex::default(),
        }
    }
}

/// A disk that a container uses.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Wanted {
    slot: u32,
    path: String,
    read_only: bool,
}

impl Disks {
    /// Makes the disks among `devices` available to a container, and sets their device numbers in this guest in
    /// the specification. A failure leaves nothing behind.
    pub fn take(&self, container: &str, devices: &[Device], spec: &mut oci::Spec) -> Result<()> {
        for wanted in wanted(devices)? {
            if let Err(e) = self.take_one(container, &wanted, spec) {
                self.let_go(container);
                return Err(e);
            }
        }
        Ok(())
    }

    fn take_one(&self, container: &str, wanted: &Wanted, spec: &mut oci::Spec) -> Result<()> {
        let slot = wanted.slot;
        let devices = &mut spec.Linux.mut_or_insert_default().Devices;
        let node = devices
            .iter_mut()
            .find(|d| d.Type == "b" && d.Path == wanted.path);
        let node = node.ok_or_else(|| {
            Error::Invalid(format!("the specification has no block device {}", wanted.path))
        })?;
        let mut users = self.users();
        let of_slot = users.entry(slot).or_default();
        let is_first = of_slot.is_empty();
        of_slot.insert(container.to_owned());
        let device = self.device(slot)?;
        if is_first {
            self.unbind(&device)?;
            self.driver("bind", &device)?;
        }
        let disk = disk(&device)?;
        if is_first && wanted.read_only {
            self.set_read_only(&disk)?;
        }
        (node.Major, node.Minor) = numbers(&disk)?;
        Ok(())
    }

    /// Ends a container's use. Disks that no other container uses are written back and released.
    pub fn let_go(&self, container: &str) {
        let mut users = self.users();
        for (slot, of_slot) in users.iter_mut() {
            if of_slot.remove(container) && of_slot.is_empty() {
                let done = self.device(*slot).and_then(|device| {
                    let written = self.write_back(&device);
                    self.unbind(&device).and(written)
                });
                if let Err(e) = done {
                    warning!("the disk in slot {slot}: {e}");
                }
            }
        }
    }

    /// The virtio device in a slot.
    fn device(&self, slot: u32) -> Result<PathBuf> {
        let platform = self.bus.join("platform/devices");
        let at = entries(&platform)?.into_iter().find(|path| {
            let uid = fs::read_to_string(path.join("firmware_node/uid"));
            starts_with(path, ACPI_DEVICE) && uid.is_ok_and(|uid| uid.trim().parse() == Ok(slot))
        });
        let of_slot = at.map(|path| entries(&path)).transpose()?.unwrap_or_default();
        let device = of_slot.into_iter().find(|path| starts_with(path, "virtio"));
        device.ok_or_else(|| Error::State(format!("this guest's machine has no device in slot {slot}")))
    }

    fn unbind(&self, device: &Path) -> Result<()> {
        match device.join("driver").exists() {
            true => self.driver("unbind", device),
            false => Ok(()),
        }
    }

    fn driver(&self, what: &str, device: &Path) -> Result<()> {
        let name = device.file_name().unwrap_or_default();
        let path = self.bus.join("virtio/drivers/virtio_blk").join(what);
        fs::write(path, name.as_encoded_bytes())
            .with_context(|| format!("{what} the driver of {}", name.display()))
    }

    fn write_back(&self, device: &Path) -> Result<()> {
        let Ok(disk) = disk(device) else { return Ok(()) };
        let node = self.open(&disk)?;
        node.sync_all().with_context(|| "write a disk back".into())
    }

    /// The host refuses writes anyway; this makes them fail at once.
    fn set_read_only(&self, disk: &Path) -> Result<()> {
        let node = self.open(disk)?;
        let yes: libc::c_int = 1;
        // SAFETY: BLKROSET reads one int at its argument, which lives until it returns; the descriptor is open.
        match unsafe { libc::ioctl(node.as_raw_fd(), SET_READ_ONLY, &raw const yes) } {
            0 => Ok(()),
            _ => Err(Error::last("make a disk read-only")),
        }
    }

    fn open(&self, disk: &Path) -> Result<File> {
        let node = self.nodes.join(disk.file_name().unwrap_or_default());
        File::open(&node).with_context(|| format!("open {}", node.display()))
    }

    fn users(&self) -> MutexGuard<'_, BTreeMap<u32, BTreeSet<String>>> {
        self.users.locked()
    }
}

/// Ignores devices of other types, which are the guest's own.
fn wanted(devices: &[Device]) -> Result<Vec<Wanted>> {
    let ours = devices.iter().filter(|device| device.type_ == layout::HOST_DISK);
    let wanted = ours.map(|device| {
        let slot = device.id.parse();
        Ok(Wanted {
            slot: slot
                .map_err(|_| Error::Invalid(format!("{:?} is not the number of a disk slot", device.id)))?,
            path: device.container_path.clone(),
            read_only: device.options.iter().any(|option| option == layout::READ_ONLY),
        })
    });
    wanted.collect()
}

/// The disk of a bound virtio device: `block/NAME` below it.
fn disk(device: &Path) -> Result<PathBuf> {
    let disks = entries(&device.join("block")).unwrap_or_default();
    let none = || Error::State(format!("{} has no disk", device.display()));
    disks.into_iter().next().ok_or_else(none)
}

/// Its device numbers in this guest.
fn numbers(disk: &Path) -> Result<(i64, i64)> {
    let path = disk.join("dev");
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let numbers = text.trim().split_once(':');
    let parsed = numbers.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    parsed.ok_or_else(|| Error::State(format!("{} is {text:?}", path.display())))
}

fn entries(directory: &Path) -> Result<Vec<PathBuf>> {
    let read = fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))?;
    Ok(read.flatten().map(|entry| entry.path()).collect())
}

fn starts_with(path: &Path, prefix: &str) -> bool {
    path.file_name()
        .is_some_and(|name| name.as_encoded_bytes().starts_with(prefix.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A guest with a bound disk in slot 3.
    struct Guest {
        place: tempfile::TempDir,
        disks: Disks,
    }

    impl Guest {
        fn new() -> Guest {
            let place = tempfile::tempdir().unwrap();
            let path = |path: &str| place.path().join(path);
            for (slot, device) in [(2, "LNRO0005:02"), (3, "LNRO0005:03")] {
                let at = path(&format!("bus/platform/devices/{device}"));
                fs::create_dir_all(at.join("firmware_node")).unwrap();
                fs::write(at.join("firmware_node/uid"), format!("{slot}\n")).unwrap();
            }
            let virtio = path("bus/platform/devices/LNRO0005:03/virtio4");
            fs::create_dir_all(virtio.join("block/vdb")).unwrap();
            fs::write(virtio.join("block/vdb/dev"), "254:16\n").unwrap();
            fs::create_dir_all(path("bus/virtio/drivers/virtio_blk")).unwrap();
            symlink("/", virtio.join("driver")).unwrap();
            fs::create_dir(path("dev")).unwrap();
            fs::write(path("dev/vdb"), "").unwrap();
            let disks = Disks {
                bus: path("bus"),
                nodes: path("dev"),
                users: Mutex::default(),
            };
            Guest { place, disks }
        }

        /// The writes to the driver since the last call.
        fn told(&self) -> Vec<&'static str> {
            let driver = self.place.path().join("bus/virtio/drivers/virtio_blk");
            let told = ["unbind", "bind"].into_iter();
            told.filter(|what| match fs::read_to_string(driver.join(what)) {
                Ok(name) => {
                    assert_eq!(name, "virtio4");
                    fs::remove_file(driver.join(what)).unwrap();
                    true
                }
                Err(_) => false,
            })
            .collect()
        }
    }

    fn spec() -> oci::Spec {
        let mut spec = oci::Spec::new();
        spec.Linux.mut_or_insert_default().Devices = vec![oci::LinuxDevice {
            Path: "/dev/xvda".into(),
            Type: "b".into(),
            Major: 7,
            Minor: 1,
            ..Default::default()
        }];
        spec
    }

    #[test]
    fn disk_driver_is_bound_by_first_user_unbound_by_last() {
        let guest = Guest::new();
        let device = [layout::host_disk("3", "/dev/xvda", false)];
        for (container, told) in [("a", &["unbind", "bind"][..]), ("b", &[])] {
            let mut spec = spec();
            guest.disks.take(container, &device, &mut spec).unwrap();
            let node = &spec.Linux.Devices[0];
            assert_eq!((node.Major, node.Minor), (254, 16));
            assert_eq!(guest.told(), told);
        }
        guest.disks.let_go("a");
        guest.disks.let_go("nobody");
        assert!(guest.told().is_empty());
        guest.disks.let_go("b");
        assert_eq!(guest.told(), ["unbind"]);
        guest.disks.let_go("b");
        assert!(guest.told().is_empty());
    }

    #[test]
    fn unavailable_huge_pages_are_refused_without_change() {
        let guest = Guest::new();
        let there = layout::host_disk("3", "/dev/xvda", false);
        let nonsense = Device {
            id: "x".into(),
            ..there.clone()
        };
        for (device, word) in [
            (layout::host_disk("3", "/dev/other", false), "/dev/other"),
            (layout::host_disk("9", "/dev/xvda", false), "slot 9"),
            (layout::host_disk("2", "/dev/xvda", false), "slot 2"),
            (nonsense, "\"x\""),
        ] {
            let error = guest.disks.take("a", &[there.clone(), device], &mut spec());
            let error = error.unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
            let told = guest.told();
            assert!(told.is_empty() || told.contains(&"unbind"));
            assert!(guest.disks.users().values().all(BTreeSet::is_empty));
        }
        // Other devices are the guest's own.
        let other = Device {
            type_: "mmioblk".into(),
            ..there
        };
        let mut untouched = spec();
        guest.disks.take("a", &[other], &mut untouched).unwrap();
        assert_eq!(untouched.Linux.Devices[0].Major, 7);
    }
}
