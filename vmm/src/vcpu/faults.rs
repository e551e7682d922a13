//! Page faults of a thread. They are the host's cost of a guest's first touch of its memory.

/// Page faults, minor and major, the calling thread has taken (getrusage(2), `RUSAGE_THREAD`).
pub fn of_this_thread() -> u64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` is writable memory of the size the call fills in; an all-zero rusage is a valid one.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
        usage.assume_init()
    };
    usage.ru_minflt as u64 + usage.ru_majflt as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touching_pages_is_counted() {
        let before = of_this_thread();
        // So large that malloc always maps it anew: what was freed before has its pages already.
        let mut pages = vec![0u8; 64 << 20];
        for page in pages.chunks_mut(4096) {
            std::hint::black_box(page)[0] = 1;
        }
        // Huge pages, where the host gives them, need one fault for 512 pages.
        assert!(of_this_thread() >= before + 3);
    }
}
