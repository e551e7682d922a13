//! Keeps the process small, because there is one for each pod.

/// Makes the allocator use one heap for all threads and return free memory at its end to the kernel.
pub fn keep_small() {
    // SAFETY: called before any thread is started; mallopt changes only the allocator's settings.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 64 * 1024);
    }
}
