//! glibc's allocator in this process: how many heaps it has, and what it gives back to the kernel.
//!
//! By default it has up to eight heaps for each processor, and each heap keeps what it has grown to, but for what is free at its end.

/// Makes it use at most `most` heaps for all threads. Must be called while there is one thread.
///
/// With one heap it opens no file: otherwise it reads /sys to count processors before it makes more than a few, and
/// /proc/sys/vm/overcommit_memory before it shrinks one other than the first.
pub fn limit_heaps(most: i32) {
    // SAFETY: mallopt has no preconditions, and no other thread runs yet.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, most) };
}

/// Makes it give memory back when more than `bytes` are free at the end of a heap.
pub fn trim_above(bytes: i32) {
    // SAFETY: mallopt has no preconditions; it changes one number.
    unsafe { libc::mallopt(libc::M_TRIM_THRESHOLD, bytes) };
}

/// Gives all free memory back to the kernel, also what lies between used parts of a heap.
pub fn trim() {
    // SAFETY: malloc_trim has no preconditions, and takes the allocator's own locks.
    unsafe { libc::malloc_trim(0) };
}
