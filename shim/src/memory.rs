//! Keeping the process small: there is one for each pod.

/// Has the allocator keep one heap for all threads, and give back what is free at its end.
pub fn keep_small() {
    // SAFETY: called before any thread is started; mallopt changes the allocator's settings and nothing else.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 64 * 1024);
    }
}
