//! How each of Kata's settings is treated.
//!
//! Names are the section's kind and the key in `configuration.toml`, which equal the annotation after
//! `io.katacontainers.config.` (Kata Containers 3.15.0, "How to set sandbox configuration").
//! docs/kata.md contains this table; a test compares them.

use super::settings::{self, Settings};

/// How a setting is treated.
#[derive(Clone, Copy)]
pub enum Treatment {
    /// It has the same meaning as in Kata.
    Honoured(fn(&mut Settings, &str) -> Result<(), String>),
    /// It has no effect, for this reason.
    Ignored(&'static str),
    /// A pod that sets it is refused, for this reason. In the operator's file it is ignored.
    Refused(&'static str),
}

use Treatment::{Honoured, Ignored, Refused};

const OWN_FILES: &str = "Thaw uses its own VMM, guest kernel and guest image";
const RUNS_PROGRAMS: &str = "the runtime would start a program of the pod's choice on the host";
const ONE_MACHINE: &str = "all machines have the same devices, because they are restored from templates";
const NO_PASSTHROUGH: &str = "host devices are not passed through";
const IN_PROCESS: &str = "the VMM itself serves images, and thaw-share serves host directories";
const OPENS_PATHS: &str = "the runtime would open a path of the pod's choice on the host";
const NOT_VERIFIED: &str = "it is the hash of a file that Thaw replaces with its own";
const NO_STORE: &str = "there is no vhost-user store";

/// All settings, sorted by name.
pub const TABLE: &[(&str, Treatment)] = &[
    (
        "agent.cdh_api_timeout",
        Ignored("the guest has no Confidential Data Hub"),
    ),
    (
        "agent.cdh_api_timeout_ms",
        Ignored("the guest has no Confidential Data Hub"),
    ),
    (
        "agent.container_pipe_size",
        Ignored("pipes have the kernel's default size"),
    ),
    ("agent.enable_tracing", Ignored("thawd traces every start")),
    (
        "agent.kernel_modules",
        Refused("the guest kernel does not load modules"),
    ),
    (
        "hypervisor.asset_hash_type",
        Ignored("no hash is checked: every setting with a hash is refused"),
    ),
    ("hypervisor.blk_logical_sector_size", Ignored(ONE_MACHINE)),
    ("hypervisor.blk_physical_sector_size", Ignored(ONE_MACHINE)),
    (
        "hypervisor.block_device_cache_direct",
        Ignored("each sandbox has its own disks, which use the host's page cache"),
    ),
    (
        "hypervisor.block_device_cache_noflush",
        Refused("without flushes, a crash can corrupt a disk"),
    ),
    (
        "hypervisor.block_device_cache_set",
        Ignored("each sandbox has its own disks, which use the host's page cache"),
    ),
    (
        "hypervisor.block_device_driver",
        Ignored("disks always use virtio-blk"),
    ),
    ("hypervisor.block_device_num_queues", Ignored(ONE_MACHINE)),
    ("hypervisor.block_device_queue_size", Ignored(ONE_MACHINE)),
    ("hypervisor.cold_plug_vfio", Refused(NO_PASSTHROUGH)),
    (
        "hypervisor.cpu_features",
        Ignored("the CPU baseline of the template determines the guest's features"),
    ),
    ("hypervisor.default_gpu_model", Refused(NO_PASSTHROUGH)),
    ("hypervisor.default_gpus", Refused(NO_PASSTHROUGH)),
    ("hypervisor.default_max_vcpus", Honoured(settings::max_vcpus)),
    ("hypervisor.default_maxmemory", Honoured(settings::max_memory)),
    // The name of the same setting in the file.
    ("hypervisor.default_maxvcpus", Honoured(settings::max_vcpus)),
    ("hypervisor.default_memory", Honoured(settings::memory)),
    ("hypervisor.default_vcpus", Honoured(settings::vcpus)),
    (
        "hypervisor.disable_block_device_use",
        Ignored("the root file system is served as files or as an image"),
    ),
    ("hypervisor.disable_image_nvdimm", Ignored(ONE_MACHINE)),
    (
        "hypervisor.disable_vhost_net",
        Ignored("the VMM itself serves the network device"),
    ),
    (
        "hypervisor.disk_rate_limiter_bw_max_rate",
        Honoured(settings::disk_bandwidth),
    ),
    (
        "hypervisor.disk_rate_limiter_bw_one_time_burst",
        Honoured(settings::disk_bandwidth_once),
    ),
    (
        "hypervisor.disk_rate_limiter_ops_max_rate",
        Honoured(settings::disk_operations),
    ),
    (
        "hypervisor.disk_rate_limiter_ops_one_time_burst",
        Honoured(settings::disk_operations_once),
    ),
    ("hypervisor.enable_guest_swap", Ignored("guests have no swap")),
    (
        "hypervisor.enable_hugepages",
        Ignored("sandboxes share the template's pages through the host's page cache"),
    ),
    ("hypervisor.enable_iommu", Ignored(ONE_MACHINE)),
    ("hypervisor.enable_iommu_platform", Ignored(ONE_MACHINE)),
    (
        "hypervisor.enable_iothreads",
        Ignored("every device already has its own thread"),
    ),
    (
        "hypervisor.enable_mem_prealloc",
        Ignored("memory is allocated on first use"),
    ),
    ("hypervisor.enable_vhost_user_store", Refused(NO_PASSTHROUGH)),
    (
        "hypervisor.enable_virtio_mem",
        Ignored("memory always grows through virtio-mem"),
    ),
    ("hypervisor.entropy_source", Refused(OPENS_PATHS)),
    ("hypervisor.file_mem_backend", Refused(OPENS_PATHS)),
    ("hypervisor.firmware", Refused(OWN_FILES)),
    ("hypervisor.firmware_hash", Refused(NOT_VERIFIED)),
    ("hypervisor.firmware_volume", Refused(OWN_FILES)),
    ("hypervisor.firmware_volume_hash", Refused(NOT_VERIFIED)),
    ("hypervisor.guest_hook_path", Refused("the guest runs no hooks")),
    ("hypervisor.hot_plug_vfio", Refused(NO_PASSTHROUGH)),
    ("hypervisor.hypervisor_hash", Refused(NOT_VERIFIED)),
    ("hypervisor.image", Refused(OWN_FILES)),
    ("hypervisor.image_hash", Refused(NOT_VERIFIED)),
    ("hypervisor.initrd", Refused(OWN_FILES)),
    ("hypervisor.initrd_hash", Refused(NOT_VERIFIED)),
    ("hypervisor.jailer_hash", Refused(NOT_VERIFIED)),
    ("hypervisor.jailer_path", Refused(RUNS_PROGRAMS)),
    ("hypervisor.kernel", Refused(OWN_FILES)),
    ("hypervisor.kernel_hash", Refused(NOT_VERIFIED)),
    (
        "hypervisor.kernel_params",
        Refused("the kernel of a restored guest has already read its parameters"),
    ),
    ("hypervisor.machine_accelerators", Ignored(ONE_MACHINE)),
    ("hypervisor.machine_type", Ignored(ONE_MACHINE)),
    ("hypervisor.memory_offset", Ignored(ONE_MACHINE)),
    (
        "hypervisor.memory_slots",
        Ignored("memory always grows through virtio-mem"),
    ),
    ("hypervisor.msize_9p", Ignored(IN_PROCESS)),
    (
        "hypervisor.net_rate_limiter_bw_max_rate",
        Honoured(settings::net_bandwidth),
    ),
    (
        "hypervisor.net_rate_limiter_bw_one_time_burst",
        Honoured(settings::net_bandwidth_once),
    ),
    (
        "hypervisor.net_rate_limiter_ops_max_rate",
        Honoured(settings::net_operations),
    ),
    (
        "hypervisor.net_rate_limiter_ops_one_time_burst",
        Honoured(settings::net_operations_once),
    ),
    ("hypervisor.path", Refused(RUNS_PROGRAMS)),
    ("hypervisor.pcie_root_port", Ignored(ONE_MACHINE)),
    (
        "hypervisor.rx_rate_limiter_max_rate",
        Honoured(settings::received),
    ),
    ("hypervisor.shared_fs", Ignored(IN_PROCESS)),
    ("hypervisor.tx_rate_limiter_max_rate", Honoured(settings::sent)),
    ("hypervisor.use_legacy_serial", Ignored(ONE_MACHINE)),
    (
        "hypervisor.use_vsock",
        Ignored("the agent is always reached over vsock"),
    ),
    ("hypervisor.vhost_user_reconnect_timeout_sec", Ignored(NO_STORE)),
    ("hypervisor.vhost_user_store_path", Refused(OPENS_PATHS)),
    ("hypervisor.virtio_fs_cache", Ignored(IN_PROCESS)),
    ("hypervisor.virtio_fs_cache_size", Ignored(IN_PROCESS)),
    ("hypervisor.virtio_fs_daemon", Refused(RUNS_PROGRAMS)),
    ("hypervisor.virtio_fs_extra_args", Refused(RUNS_PROGRAMS)),
    (
        "runtime.create_container_timeout",
        Honoured(settings::create_timeout),
    ),
    (
        "runtime.disable_guest_seccomp",
        Honoured(settings::disable_guest_seccomp),
    ),
    ("runtime.disable_new_netns", Honoured(settings::disable_new_netns)),
    ("runtime.enable_pprof", Ignored("the shim serves no profiles")),
    (
        "runtime.experimental",
        Ignored("there are no experimental features"),
    ),
    (
        "runtime.experimental_force_guest_pull",
        Refused("the host pulls images and serves them to the guest"),
    ),
    (
        "runtime.internetworking_model",
        Honoured(settings::internetworking_model),
    ),
    (
        "runtime.sandbox_cgroup_only",
        Ignored("a sandbox is always entirely in its pod's cgroup"),
    ),
    (
        "runtime.static_sandbox_resource_mgmt",
        Ignored("a pod has the resources of all its containers from its start"),
    ),
];

/// The treatment of a setting, or `None` if it is unknown.
pub fn treatment(name: &str) -> Option<Treatment> {
    let at = TABLE.binary_search_by(|(known, _)| (*known).cmp(name)).ok()?;
    Some(TABLE[at].1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn syscall_table_is_sorted_and_unique() {
        assert!(TABLE.is_sorted_by(|a, b| a.0 < b.0));
        assert!(matches!(treatment("hypervisor.path"), Some(Refused(_))));
        assert!(treatment("hypervisor.pat").is_none());
    }

    #[test]
    fn document_contains_the_settings_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/kata.md");
        let document = std::fs::read_to_string(path).expect("docs/kata.md");
        let rows: Vec<String> = TABLE
            .iter()
            .map(|(name, treatment)| match treatment {
                Honoured(_) => format!("| `{name}` | honoured | |"),
                Ignored(why) => format!("| `{name}` | ignored | {why} |"),
                Refused(why) => format!("| `{name}` | refused | {why} |"),
            })
            .collect();
        if std::env::var_os("THAW_WRITE_DOCS").is_some() {
            let (head, _) = document.split_once("| setting |").expect("its table");
            let table = format!("| setting | | because |\n|---|---|---|\n{}\n", rows.join("\n"));
            std::fs::write(path, format!("{head}{table}")).expect("written");
            return;
        }
        for row in rows {
            assert!(
                document.contains(&row),
                "docs/kata.md lacks {row}; THAW_WRITE_DOCS=1 writes it"
            );
        }
    }
}
