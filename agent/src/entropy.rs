//! Adds entropy to the kernel's pool and reseeds the generator from it at once, so that no clone continues with
//! the random numbers of its template (random(4), `RNDADDENTROPY` and `RNDRESEEDCRNG`).

use std::fs::File;
use std::os::fd::AsRawFd;

use thaw_protocol::handshake::MIN_ENTROPY;

use crate::error::{Error, Result, WithContext};

/// `_IOW('R', 0x03, int[2])`, include/uapi/linux/random.h.
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
/// `_IO('R', 0x07)`.
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
/// Most bytes credited at once, because the pool is no larger.
const MOST: usize = 512;

/// `struct rand_pool_info` with its buffer.
#[repr(C)]
struct PoolInfo {
    entropy_bits: libc::c_int,
    bytes: libc::c_int,
    buffer: [u8; MOST],
}

/// Credits `bytes`, at least [`MIN_ENTROPY`], and reseeds the kernel's generator.
pub fn reseed(bytes: &[u8]) -> Result<()> {
    if bytes.len() < MIN_ENTROPY {
        return Err(Error::Invalid(format!(
            "entropy: {} bytes, at least {MIN_ENTROPY} are needed",
            bytes.len()
        )));
    }
    let device = device()?;
    for chunk in bytes.chunks(MOST) {
        let mut info = PoolInfo {
            entropy_bits: chunk.len() as libc::c_int * 8,
            bytes: chunk.len() as libc::c_int,
            buffer: [0; MOST],
        };
        info.buffer[..chunk.len()].copy_from_slice(chunk);
        // SAFETY: the kernel reads the header and `bytes` bytes of the buffer, all within `info`, which outlives the call.
        if unsafe { libc::ioctl(device.as_raw_fd(), RNDADDENTROPY, &raw const info) } != 0 {
            return Err(Error::last("add entropy to the kernel's pool"));
        }
    }
    reseed_from_pool(&device)
}

/// Reseeds the kernel's generator from its pool. The kernel would do so by itself only after another half of
/// its uptime (`crng_reseed_interval` in Linux 6.1), and use the old seed until then.
pub fn renew() -> Result<()> {
    reseed_from_pool(&device()?)
}

/// Returns the generator's next bytes, in hexadecimal.
pub fn next_bytes() -> Result<String> {
    let mut bytes = [0u8; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .with_context(|| "read random bytes".into())?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

fn device() -> Result<File> {
    let device = File::options().write(true).open("/dev/urandom");
    device.with_context(|| "open /dev/urandom".into())
}

fn reseed_from_pool(device: &File) -> Result<()> {
    // SAFETY: this request takes no argument.
    if unsafe { libc::ioctl(device.as_raw_fd(), RNDRESEEDCRNG) } != 0 {
        return Err(Error::last("reseed the kernel's random generator"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_entropy_is_refused() {
        let e = reseed(&[1; MIN_ENTROPY - 1]).unwrap_err();
        assert!(e.to_string().contains("31 bytes"), "{e}");
    }
}
