//! Device nodes of the guest that `--device` gives a container. Major and minor numbers: Documentation/admin-guide/devices.txt.

use std::str::FromStr;

use thaw_protocol::agent::oci;

use crate::closest::closest;

/// The devices that the guest's kernel has besides those of every container. It makes a loop device when that is opened, and
/// `/dev/loop-control` gives a program the number of a free one.
const GUESTS: [Device; 12] = [
    character("/dev/fuse", 10, 229),
    character("/dev/kmsg", 1, 11),
    character("/dev/loop-control", 10, 237),
    loop_device("/dev/loop0", 0),
    loop_device("/dev/loop1", 1),
    loop_device("/dev/loop2", 2),
    loop_device("/dev/loop3", 3),
    loop_device("/dev/loop4", 4),
    loop_device("/dev/loop5", 5),
    loop_device("/dev/loop6", 6),
    loop_device("/dev/loop7", 7),
    character("/dev/net/tun", 10, 200),
];

const fn character(path: &'static str, major: i64, minor: i64) -> Device {
    Device {
        path,
        kind: 'c',
        major,
        minor,
    }
}

const fn loop_device(path: &'static str, minor: i64) -> Device {
    Device {
        path,
        kind: 'b',
        major: 7,
        minor,
    }
}

/// Read and write for everyone, as docker makes them.
const MODE: u32 = 0o666;

/// A device of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    path: &'static str,
    kind: char,
    major: i64,
    minor: i64,
}

impl Device {
    pub(super) fn node(&self) -> oci::LinuxDevice {
        oci::LinuxDevice {
            Path: self.path.into(),
            Type: self.kind.into(),
            Major: self.major,
            Minor: self.minor,
            FileMode: MODE,
            ..Default::default()
        }
    }
}

/// The nodes of a privileged container: all devices of the guest.
pub(super) fn all() -> Vec<oci::LinuxDevice> {
    GUESTS.iter().map(Device::node).collect()
}

impl FromStr for Device {
    type Err = String;

    /// Reads `PATH`, or `PATH:PATH` or `PATH:PATH:rwm` with the same path twice.
    fn from_str(text: &str) -> Result<Device, String> {
        let mut parts = text.split(':');
        let path = parts.next().unwrap_or_default();
        let known = GUESTS.iter().find(|device| device.path == path).ok_or_else(|| {
            let names: Vec<&str> = GUESTS.iter().map(|device| device.path).collect();
            format!(
                "the guest has no device {path:?} to give, and those of the host stay there: there are {}{}",
                names.join(", "),
                closest(path, names.iter().copied())
            )
        })?;
        match (parts.next(), parts.next(), parts.next()) {
            (None, None, None) => Ok(*known),
            (Some(inside), access, None) if inside == path => match access {
                None | Some("rwm" | "rw") => Ok(*known),
                Some(access) => Err(format!(
                    "{access:?}: a device is given for reading and writing, as rwm"
                )),
            },
            _ => Err(format!(
                "{text:?}: a device has the same path in the container, as {path}:{path}:rwm"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_the_guests_own() {
        for text in ["/dev/fuse", "/dev/fuse:/dev/fuse", "/dev/fuse:/dev/fuse:rwm"] {
            let node = text.parse::<Device>().unwrap().node();
            assert_eq!(
                (node.Path.as_str(), node.Major, node.Minor),
                ("/dev/fuse", 10, 229)
            );
        }
        let node = "/dev/loop3".parse::<Device>().unwrap().node();
        assert_eq!((node.Type.as_str(), node.Major, node.Minor), ("b", 7, 3));
        for (wrong, named) in [
            ("/dev/sda", "/dev/sda"),
            ("/dev/kvm", "/dev/net/tun"),
            ("/dev/fuse:/dev/other", "same path"),
            ("/dev/fuse:/dev/fuse:r", "\"r\""),
            ("/dev/fuse:/dev/fuse:rwm:x", "same path"),
            ("", "\"\""),
        ] {
            let refused = wrong.parse::<Device>().unwrap_err();
            assert!(refused.contains(named), "{refused}");
        }
    }
}
