//! How often vCPUs of this project entered their guests, as the kernel's tracing tells (`kvm:kvm_entry`).

use std::fs;
use std::path::{Path, PathBuf};

const INSTANCES: &str = "/sys/kernel/tracing/instances";

/// A trace buffer of our own.
pub struct Entries {
    instance: PathBuf,
}

impl Entries {
    /// Begins to count; none where this kernel does not trace, or not for us.
    pub fn watch() -> Option<Entries> {
        let instance = Path::new(INSTANCES).join(format!("thaw-{}", std::process::id()));
        fs::create_dir(&instance).ok()?;
        let entries = Entries { instance };
        fs::write(entries.instance.join("events/kvm/kvm_entry/enable"), "1").ok()?;
        Some(entries)
    }

    /// Entries since the last call. The threads are known by their name: other machines may run on this host.
    pub fn count(&self) -> usize {
        let trace = self.instance.join("trace");
        let text = fs::read_to_string(&trace).unwrap();
        fs::write(&trace, "").unwrap();
        text.lines()
            .filter(|line| line.trim_start().starts_with("vcpu"))
            .count()
    }
}

impl Drop for Entries {
    fn drop(&mut self) {
        let _ = fs::write(self.instance.join("events/kvm/kvm_entry/enable"), "0");
        let _ = fs::remove_dir(&self.instance);
    }
}
