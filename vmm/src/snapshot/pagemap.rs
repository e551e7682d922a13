//! Which pages of this process are there, and which were written: `/proc/<pid>/pagemap` of itself, handed as a descriptor.
