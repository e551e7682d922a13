//! What hostile bytes reach, one target a file: each takes any bytes, and panics where Thaw does not do with them what it must.
//!
//! Only in builds with `--cfg fuzzing` ([`instrument`](../instrument) sets it), in which some of Thaw's crates have entrances for this
//! crate.
#![cfg(fuzzing)]

mod guest;
mod runtime;
mod script;

/// A function that any bytes may be given.
pub type Target = fn(&[u8]);

macro_rules! targets {
    ($($name:ident),* $(,)?) => {
        $(mod $name;)*
        /// Every target by its name.
        pub const TARGETS: &[(&str, Target)] = &[$((stringify!($name), $name::run)),*];
    };
}

targets! {
    archive_unpack,
    balloon,
    blk_disk,
    blk_flight,
    blk_image,
    chunk_table,
    connect_frames,
    control_requests,
    docker_archive,
    erofs_reader,
    erofs_tree,
    estargz,
    first_bytes,
    fuse_messages,
    kept_index,
    layer_indexing,
    load_order,
    metadata_document,
    mmio_queues,
    net,
    nydus_bootstrap,
    peer_messages,
    ready_file,
    registry_answers,
    seccomp_profile,
    share_frames,
    snapshot_artifact,
    snapshot_state,
    soci_index,
    span_expand,
    tar_layer,
    ttrpc_answers,
    virtio_mem,
    vsock_muxer,
    ztoc,
}
