//! The error code of each refused request.

use thaw_protocol::control::{ControlError, DeviceId, ErrorCode};

use crate::kernel::KernelError;
use crate::memory::MemoryError;
use crate::snapshot::freeze::FreezeError;
use crate::snapshot::live::LiveError;
use crate::snapshot::protection::ProtectionError;
use crate::snapshot::uffd::UffdError;
use crate::snapshot::{FileError, RestoreError};
use crate::virtio::{AttachError, InventoryError, NotSettled};

pub fn refused(code: ErrorCode, message: String) -> ControlError {
    ControlError { code, message }
}

pub fn invalid(message: String) -> ControlError {
    refused(ErrorCode::Invalid, message)
}

/// For `map_err`: the error names the step that failed.
pub fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> ControlError {
    move |e| refused(ErrorCode::System, format!("{what}: {e}"))
}

pub fn kvm_error(e: thaw_hypervisor::Error) -> ControlError {
    use thaw_hypervisor::Error as E;
    let code = match e {
        E::NotKvm(_) => ErrorCode::Invalid,
        E::TscFrequency { .. } | E::XsaveSize { .. } | E::BelowBaseline { .. } | E::Virtualises(_) => {
            ErrorCode::Incompatible
        }
        _ => ErrorCode::Kvm,
    };
    refused(code, e.to_string())
}

pub fn memory_error(e: MemoryError) -> ControlError {
    let code = match e {
        MemoryError::Slot { .. } => ErrorCode::Kvm,
        MemoryError::Map { .. } | MemoryError::Regions(_) => ErrorCode::System,
    };
    refused(code, e.to_string())
}

pub fn kernel_error(e: KernelError) -> ControlError {
    let code = match e {
        KernelError::NotElf(_) | KernelError::NoPvhNote | KernelError::Damaged(_) | KernelError::Load(_) => {
            ErrorCode::NotPvh
        }
        KernelError::MemoryTooSmall { .. } => ErrorCode::MemoryTooSmall,
        KernelError::Io(_) => ErrorCode::System,
    };
    refused(code, e.to_string())
}

pub fn attach_error(e: AttachError) -> ControlError {
    let code = match e {
        AttachError::System { .. } => ErrorCode::System,
        AttachError::Frozen(_) => ErrorCode::Unswapped,
        _ => ErrorCode::Invalid,
    };
    refused(code, e.to_string())
}

/// Names every device of `not_settled`, which must not be empty, with the reason why it keeps the machine from being thawed.
pub fn not_settled(not_settled: &[(DeviceId, NotSettled)]) -> ControlError {
    let why = [
        (
            NotSettled::NotMentioned,
            "nobody said what is behind DEVICES now: attach a backend to each, or declare it empty",
        ),
        (
            NotSettled::WasBacked,
            "DEVICES had a backend when frozen and cannot be empty",
        ),
        (
            NotSettled::IsBacked,
            "DEVICES cannot be empty: a backend is attached",
        ),
    ];
    let sentence = |(why, sentence): (NotSettled, &str)| {
        let of_this = not_settled.iter().filter(|(_, other)| *other == why);
        let devices: Vec<DeviceId> = of_this.map(|(device, _)| *device).collect();
        (!devices.is_empty()).then(|| sentence.replace("DEVICES", &format!("{devices:?}")))
    };
    let message: Vec<String> = why.into_iter().filter_map(sentence).collect();
    refused(ErrorCode::Unswapped, message.join("; "))
}

pub fn inventory_error(e: InventoryError) -> ControlError {
    let code = match e {
        InventoryError::Kvm { .. } => ErrorCode::Kvm,
        _ => ErrorCode::System,
    };
    refused(code, e.to_string())
}

pub fn file_error(e: FileError) -> ControlError {
    let code = match e {
        FileError::Io { .. } => ErrorCode::System,
        FileError::NotEmpty { .. } => ErrorCode::Invalid,
        _ => ErrorCode::Snapshot,
    };
    refused(code, e.to_string())
}

pub fn freeze_error(e: FreezeError) -> ControlError {
    let code = match e {
        FreezeError::Pagemap(_) | FreezeError::Write { .. } | FreezeError::File(_) => ErrorCode::System,
        _ => ErrorCode::Invalid,
    };
    refused(code, e.to_string())
}

pub fn live_error(e: LiveError) -> ControlError {
    let code = match e {
        LiveError::Freeze(e) => return freeze_error(e),
        LiveError::Protection(
            ProtectionError::Open(_) | ProtectionError::Register { .. } | ProtectionError::Slow { .. },
        ) => ErrorCode::Unprotected,
        LiveError::Protection(_) => ErrorCode::System,
    };
    refused(code, e.to_string())
}

pub fn memory_restore_error(e: RestoreError) -> ControlError {
    let code = match e {
        RestoreError::CutShort { .. } | RestoreError::Unplugged { .. } => ErrorCode::Snapshot,
        RestoreError::Layers { .. } | RestoreError::Shape { .. } => ErrorCode::Incompatible,
        _ => ErrorCode::System,
    };
    refused(code, e.to_string())
}

pub fn uffd_error(e: UffdError) -> ControlError {
    match e {
        UffdError::Shape(e) => memory_restore_error(e),
        other => refused(ErrorCode::System, other.to_string()),
    }
}

pub fn device_restore_error(e: crate::virtio::RestoreError) -> ControlError {
    use crate::virtio::RestoreError as E;
    let code = match e {
        E::Device { .. } | E::Mismatch { .. } => ErrorCode::Incompatible,
        E::Invalid { .. } => ErrorCode::Snapshot,
        E::System { .. } => ErrorCode::System,
    };
    refused(code, e.to_string())
}
