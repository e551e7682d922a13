//! Landlock (Documentation/userspace-api/landlock.rst): the process can open no path, bind and connect no TCP port, and reach no abstract
//! socket and no process outside, even if another part of the jail has a hole. Open descriptors, and descriptors received later, keep their
//! rights.

use std::io;

/// A ruleset that handles every right it names and allows none of them.
#[repr(C)]
#[derive(Default)]
struct Ruleset {
    handled_access_fs: u64,
    handled_access_net: u64,
    scoped: u64,
}

const VERSION: libc::c_uint = 1;

impl Ruleset {
    /// Every right that this version of the interface can deny.
    fn of(version: i64) -> Ruleset {
        // LANDLOCK_ACCESS_FS_*: 13 rights, then REFER, TRUNCATE and, two versions later, IOCTL_DEV.
        let rights = match version {
            1 => 13,
            2 => 14,
            3 | 4 => 15,
            _ => 16,
        };
        Ruleset {
            handled_access_fs: (1 << rights) - 1,
            // LANDLOCK_ACCESS_NET_{BIND,CONNECT}_TCP.
            handled_access_net: if version >= 4 { 0b11 } else { 0 },
            // LANDLOCK_SCOPE_{ABSTRACT_UNIX_SOCKET,SIGNAL}.
            scoped: if version >= 6 { 0b11 } else { 0 },
        }
    }
}

/// Denies every right this kernel's Landlock knows. Returns the version of its interface. Must follow no_new_privs.
///
/// # Errors
/// ENOSYS or EOPNOTSUPP if the kernel has no Landlock, or was booted without it in `lsm=`.
pub(super) fn deny_all() -> io::Result<i64> {
    // SAFETY: without a ruleset the call only returns its version.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<Ruleset>(),
            0usize,
            VERSION,
        )
    };
    if version < 1 {
        return Err(io::Error::last_os_error());
    }
    let ruleset = Ruleset::of(version);
    // SAFETY: the kernel reads as many bytes of the ruleset as its size argument; if it knows a shorter ruleset, the rest must be 0.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            &raw const ruleset,
            size_of::<Ruleset>(),
            0u32,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` is the ruleset just made, which nothing else uses, and is closed once.
    unsafe {
        let restricted = libc::syscall(libc::SYS_landlock_restrict_self, fd, 0u32);
        let error = io::Error::last_os_error();
        libc::close(fd as i32);
        if restricted != 0 {
            return Err(error);
        }
    }
    Ok(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_version_denies_what_it_knows_and_no_bit_it_does_not() {
        let masks = |version| {
            let Ruleset {
                handled_access_fs,
                handled_access_net,
                scoped,
            } = Ruleset::of(version);
            (handled_access_fs, handled_access_net, scoped)
        };
        assert_eq!(masks(1), (0x1fff, 0, 0));
        assert_eq!(masks(2), (0x3fff, 0, 0));
        assert_eq!(masks(3), (0x7fff, 0, 0));
        assert_eq!(masks(4), (0x7fff, 3, 0));
        assert_eq!(masks(5), (0xffff, 3, 0));
        assert_eq!(masks(6), (0xffff, 3, 3));
        assert_eq!(masks(99), (0xffff, 3, 3));
    }
}
