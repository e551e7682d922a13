//! glibc's allocator in this process.
//!
//! Invariant: it opens no file, because the jail has none.

/// Makes it use one arena. Otherwise it reads /sys to count processors before it makes more than a few arenas, and
/// /proc/sys/vm/overcommit_memory before it shrinks an arena other than the first. One arena is enough, because no hot path allocates. Must be
/// called while there is one thread.
pub fn use_one_arena() {
    // SAFETY: mallopt has no preconditions, and no other thread runs yet.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Gives free memory back to the host: most of what a machine's making allocated, which the allocator would keep for later.
pub fn trim() {
    // SAFETY: malloc_trim has no preconditions, and takes the allocator's own locks.
    unsafe { libc::malloc_trim(0) };
}
