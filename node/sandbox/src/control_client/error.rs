//! Why a call to a VMM failed, and which replies are invalid.

use std::time::Duration;

use rustix::io::Errno;
use thaw_protocol::control::{ControlError, ErrorCode};
use thaw_protocol::encoding::EncodingError;
use thaw_protocol::packet::PacketError;
use thaw_protocol::versions::VersionError;

use super::Vmm;
use crate::error::{Error, ErrorKind};

/// Why a request has no reply.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The VMM refused the request.
    #[error(transparent)]
    Refused(#[from] ControlError),
    /// The connection is gone: the VMM ended.
    #[error("{vmm} closed its control connection")]
    Closed { vmm: Vmm },
    /// This side closed the connection because of the VMM's misconduct.
    #[error("{vmm} broke the control protocol: {misconduct}")]
    Broken { vmm: Vmm, misconduct: Misconduct },
    /// The request could not be sent.
    #[error("cannot send to {vmm}: {error}")]
    Send { vmm: Vmm, error: PacketError },
    /// No reply came in time.
    #[error("{vmm} has not answered {asked} within {} s", after.as_secs())]
    Silent {
        vmm: Vmm,
        asked: &'static str,
        after: Duration,
    },
    /// Too many earlier requests have no reply yet.
    #[error("{vmm} was not asked {asked}: it owes too many answers")]
    Busy { vmm: Vmm, asked: &'static str },
    /// The VMM's release does not support the request.
    #[error("{vmm} speaks version {speaks} of the control protocol, which has no {asked}")]
    TooOld {
        vmm: Vmm,
        asked: &'static str,
        speaks: u32,
    },
    /// The VMM is of a release that this one does not support.
    #[error("{vmm}: {error}")]
    Version { vmm: Vmm, error: VersionError },
    /// The reply is of the wrong kind.
    #[error("{vmm} answered {asked} with {answer}")]
    Odd {
        vmm: Vmm,
        asked: &'static str,
        answer: &'static str,
    },
}

/// A VMM's violation of the protocol, after which its connection is closed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Misconduct {
    /// A packet is not a valid message.
    #[error("it sent what is no message ({0})")]
    Malformed(EncodingError),
    /// A packet has more bytes or descriptors than any message.
    #[error("it sent a packet with more bytes or descriptors than any message has")]
    Oversize,
    /// Too many unrequested replies and unexpected descriptors.
    #[error("it sent {0} replies or descriptors that were not requested")]
    Strays(u32),
}

/// Whether a system call of the VMM failed because the disk is full. The VMM sends the kernel's message, which contains the error number.
fn says_full(message: &str) -> bool {
    let errors = [Errno::NOSPC, Errno::DQUOT];
    errors
        .iter()
        .any(|e| message.contains(&std::io::Error::from(*e).to_string()))
}

impl From<CallError> for Error {
    fn from(error: CallError) -> Error {
        let kind = match &error {
            CallError::Refused(refusal) => match refusal.code {
                ErrorCode::Kvm => ErrorKind::KvmInadequate,
                ErrorCode::NotPvh => ErrorKind::KernelNotPvh,
                ErrorCode::MemoryTooSmall => ErrorKind::MemoryTooSmall,
                ErrorCode::Snapshot => ErrorKind::SnapshotDamaged,
                ErrorCode::Incompatible => ErrorKind::SnapshotIncompatible,
                ErrorCode::Shared => ErrorKind::Shared,
                ErrorCode::System if says_full(&refusal.message) => ErrorKind::DiskFull,
                ErrorCode::WrongState
                | ErrorCode::Invalid
                | ErrorCode::Unswapped
                | ErrorCode::System
                | ErrorCode::Version
                | ErrorCode::Unprotected => ErrorKind::VmmFailed,
            },
            CallError::TooOld { .. } => ErrorKind::VmmTooOld,
            _ => ErrorKind::VmmFailed,
        };
        let failure = Error::new(kind, error.to_string());
        match error {
            CallError::Closed { .. } | CallError::Broken { .. } | CallError::Silent { .. } => failure.lost(),
            _ => failure,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vmm_without_room_is_a_full_disk() {
        let refused = |code, error: Errno| {
            let message = format!("cannot write the memory file: {}", std::io::Error::from(error));
            Error::from(CallError::Refused(ControlError { code, message })).kind
        };
        assert_eq!(refused(ErrorCode::System, Errno::NOSPC), ErrorKind::DiskFull);
        assert_eq!(refused(ErrorCode::System, Errno::DQUOT), ErrorKind::DiskFull);
        assert_eq!(refused(ErrorCode::System, Errno::IO), ErrorKind::VmmFailed);
        assert_eq!(refused(ErrorCode::Invalid, Errno::NOSPC), ErrorKind::VmmFailed);
    }
}
