//! A full disk gives a typed error that names the place, and leaves nothing behind.

use std::io;

use rustix::mount::{MountFlags, mount};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use tokio_util::sync::CancellationToken;

use crate::layer::DataSink;
use crate::source::LayerSource;
use crate::store::layer::{Job, run};

use super::*;

#[test]
fn a_full_disk_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().to_owned();
    // This thread creates the runtime's threads, so they share its mount namespace.
    let done = std::thread::spawn(move || {
        // SAFETY: a mount namespace of its own does not affect the memory safety of other threads.
        if unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.is_err() {
            return false;
        }
        rustix::mount::mount_change(
            "/",
            rustix::mount::MountPropagationFlags::PRIVATE | rustix::mount::MountPropagationFlags::REC,
        )
        .unwrap();
        let disk = root.join("disk");
        std::fs::create_dir(&disk).unwrap();
        mount("thaw-test", &disk, "tmpfs", MountFlags::empty(), c"size=1500k").unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let store = Store::open(&disk.join("store")).unwrap();
            let mut blobs = Blobs::default();
            let layers: Vec<_> = (0..6).map(|seed| big_layer(seed, TAR_GZIP)).collect();
            let image = blobs.image("amd64", &layers);
            blobs.write_layout(&root.join("layout"), &[image]);
            let reference = format!("oci:{}", root.join("layout").display()).parse().unwrap();
            let log = Arc::new(Log::default());
            let pulled = store
                .pull(&reference, &Platform::linux_amd64(), &options(), log)
                .await;
            let error = pulled.unwrap_err();
            assert_eq!(error.code(), "disk_full", "{error}");
            assert!(error.to_string().contains(&*disk.to_string_lossy()), "{error}");
            for kind in ["layers", "images", "refs"] {
                assert_eq!(store.entries(kind).unwrap(), Vec::<String>::new());
            }
        });
        true
    })
    .join()
    .unwrap();
    if !done {
        thaw_test_skip::skip("all but the sink's error: no mount namespace here");
    }
}

struct Full;

impl DataSink for Full {
    fn append(&mut self, _bytes: &[u8]) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(
            rustix::io::Errno::NOSPC.raw_os_error(),
        ))
    }

    fn skip(&mut self, _length: u64) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_sink_that_is_full_is_disk_full() {
    let layer = big_layer(1, TAR_GZIP);
    let source = LayerSource {
        diff_id: layer.diff_id,
        digest: Some(Digest::of(&layer.stored)),
        size: Some(layer.stored.len() as u64),
        urls: Vec::new(),
        member: None,
    };
    let job = Job {
        layer: source,
        body: Box::new(io::Cursor::new(layer.stored)),
        progress: Arc::new(Log::default()),
        cancelled: CancellationToken::new(),
    };
    let error = run(job, &mut Full, Path::new("/var/lib/somewhere")).unwrap_err();
    assert!(
        matches!(&error, Error::DiskFull { path } if path == Path::new("/var/lib/somewhere")),
        "{error}"
    );
}
