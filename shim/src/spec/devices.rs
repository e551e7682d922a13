//! Block devices of a specification. Each becomes a disk of the microVM. The rules for the host's device
//! cgroup decide whether the disk is read-only, which the VMM enforces.

use super::config::{Device, DeviceRule, Linux};
use crate::error::{Error, Result};
use crate::host_resource::BlockDevice;

/// A block device of a specification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Path in the container.
    pub path: String,
    pub device: BlockDevice,
}

/// The block devices of a container.
pub fn disks(given: &Linux) -> Result<Vec<Disk>> {
    let blocks = given.devices.iter().filter(|device| device.kind == "b");
    blocks
        .map(|device| disk(device, &given.resources.devices))
        .collect()
}

fn disk(device: &Device, rules: &[DeviceRule]) -> Result<Disk> {
    let Device {
        path, major, minor, ..
    } = device;
    let number = |number: i64| {
        let wrong = |_| Error::Invalid(format!("device {path}: {number} is not a device number"));
        u32::try_from(number).map_err(wrong)
    };
    let may = |access| is_allowed(rules, device, access);
    if !may('r') && !may('w') {
        return Err(Error::Unsupported(format!(
            "{path} is a block device of the host ({major}:{minor}) that the container may neither read nor write: allow it in \
             linux.resources.devices"
        )));
    }
    Ok(Disk {
        path: path.clone(),
        device: BlockDevice {
            major: number(*major)?,
            minor: number(*minor)?,
            read_only: !may('w'),
        },
    })
}

/// Whether the rules permit an access to a block device. The last matching rule decides; without one the
/// access is permitted.
fn is_allowed(rules: &[DeviceRule], device: &Device, access: char) -> bool {
    let any_or = |rule: Option<i64>, number: i64| rule.is_none_or(|rule| rule == -1 || rule == number);
    let is_about = |rule: &&DeviceRule| {
        matches!(rule.kind.as_str(), "" | "a" | "b")
            && any_or(rule.major, device.major)
            && any_or(rule.minor, device.minor)
            // A rule without accesses matches all of them.
            && (rule.access.is_empty() || rule.access.contains(access))
    };
    rules.iter().rev().find(is_about).is_none_or(|rule| rule.allow)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn of(devices: serde_json::Value, rules: serde_json::Value) -> Result<Vec<Disk>> {
        let linux = json!({"devices": devices, "resources": {"devices": rules}});
        disks(&serde_json::from_value(linux).unwrap())
    }

    #[test]
    fn last_matching_device_rule_decides_the_access() {
        let device = json!([
            {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229},
            {"path": "/dev/xvda", "type": "b", "major": 7, "minor": 3},
        ]);
        let none = json!({"allow": false, "access": "rwm"});
        let rule =
            |access: &str| json!({"allow": true, "type": "b", "major": 7, "minor": 3, "access": access});
        let other = json!({"allow": true, "type": "b", "major": 7, "minor": 4, "access": "rwm"});
        let characters = json!({"allow": true, "type": "c", "access": "rwm"});
        for (rules, read_only) in [
            (json!(null), Some(false)),
            (json!([none, rule("rwm")]), Some(false)),
            (json!([none, rule("rw")]), Some(false)),
            (json!([none, rule("w")]), Some(false)),
            (json!([none, rule("r")]), Some(true)),
            (json!([none, rule("rm"), other]), Some(true)),
            (
                json!([none, {"allow": true, "type": "b", "major": -1, "access": "rwm"}]),
                Some(false),
            ),
            (json!([none, {"allow": true, "type": "a"}]), Some(false)),
            (
                json!([rule("rwm"), {"allow": false, "type": "b", "major": 7, "access": "w"}]),
                Some(true),
            ),
            (json!([none, rule("m")]), None),
            (json!([none, other, characters]), None),
            (json!([rule("rwm"), none]), None),
        ] {
            let found = of(device.clone(), rules.clone());
            match read_only {
                Some(read_only) => {
                    let device = BlockDevice {
                        major: 7,
                        minor: 3,
                        read_only,
                    };
                    let path = "/dev/xvda".to_owned();
                    assert_eq!(found.unwrap(), [Disk { path, device }], "{rules}");
                }
                None => assert!(found.unwrap_err().to_string().contains("/dev/xvda"), "{rules}"),
            }
        }
        let huge = json!([{"path": "/dev/x", "type": "b", "major": -1, "minor": 1u64 << 40}]);
        of(huge, json!(null)).unwrap_err();
    }

    proptest! {
        /// A write is permitted only by a rule that allows it, or if no rule matches.
        #[test]
        fn device_without_write_rule_stays_read_only(
            rules in proptest::collection::vec(
                (any::<bool>(), "[abc]?", proptest::option::of(-1i64..3), proptest::option::of(-1i64..3), "[rwm]{0,3}"),
                0..6,
            ),
        ) {
            let rules: Vec<DeviceRule> = rules
                .into_iter()
                .map(|(allow, kind, major, minor, access)| DeviceRule { allow, kind, major, minor, access })
                .collect();
            let device = Device { path: "/dev/x".into(), kind: "b".into(), major: 1, minor: 1, ..Device::default() };
            let allows = |access: char| rules.iter().any(|rule| rule.allow && (rule.access.is_empty() || rule.access.contains(access)));
            let denied = rules.first().is_some_and(|rule| *rule == DeviceRule { access: String::new(), ..DeviceRule::default() });
            if let Ok(disk) = disk(&device, &rules)
                && !disk.device.read_only
            {
                prop_assert!(allows('w') || !denied);
            }
        }
    }
}
