//! Images without a machine: answering misses, reading ahead by load orders, keeping the store below its limit, making and reading indexes
//! and conversions.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use thaw_imagefs::blob::{BlobFile, CHUNK_SIZE};
use thaw_images::convert::Options;
use thaw_images::prefetch::{self, Recorder};
use thaw_images::progress::Silent;
use thaw_images::store::Image;
use thaw_protocol::access::Access;
use thaw_protocol::miss::{Filled, Miss};
use thaw_protocol::packet;
use thaw_sandbox::config::Config;
use thaw_sandbox::image::convert::{self, Wanted};
use thaw_sandbox::image::record::Recording;
use thaw_sandbox::image::{index, record};
use thaw_sandbox::images::{Images, Pull};
use thaw_sandbox::miss_counts::Refusal;
use thaw_sandbox::misses::{Given, MissServer};

use support::{eventually, make_image};

/// Size in bytes of the file in the test's image.
const FILE: u64 = 24 * CHUNK_SIZE;

/// Bytes that do not compress.
fn noise() -> Vec<u8> {
    let mut state = 88_172_645_463_325_252u64;
    let byte = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..FILE).map(byte).collect()
}

/// A store, and a layout to pull images from.
struct Place {
    directory: tempfile::TempDir,
    images: Images,
}

impl Place {
    fn new(config: &str) -> Place {
        let directory = tempfile::tempdir().unwrap();
        make_image(&directory.path().join("layout"), "file", &noise());
        let config = Config::parse(config).unwrap();
        let images = Images::open_with(&directory.path().join("images"), config).unwrap();
        Place { directory, images }
    }

    fn reference(&self, name: &str) -> String {
        format!("oci:{}", self.directory.path().join(name).display())
    }

    async fn pull(&self, reference: &str) -> Image {
        self.images
            .pull(reference, Pull::Always, false, Arc::new(Silent))
            .await
            .unwrap()
    }

    /// An image that was pulled and then pruned: only its index is kept.
    async fn emptied(&self) -> Image {
        let image = self.pull(&self.reference("layout")).await;
        self.images.store().evict(&image.digest).unwrap();
        let image = self.images.named(&image.digest.to_string()).unwrap();
        assert_eq!(ready(&image), 0);
        image
    }
}

/// The number of chunks of an image's only blob that can be read.
fn ready(image: &Image) -> u64 {
    let blob = &image.blobs[0];
    let open = |path: &Path| fs::File::open(path).unwrap();
    let file = BlobFile::open(open(&blob.data), open(&blob.ready)).unwrap();
    let chunks = 0..blob.length.div_ceil(CHUNK_SIZE);
    chunks
        .filter(|chunk| file.is_ready(chunk * CHUNK_SIZE, 1))
        .count() as u64
}

/// Sends misses, and returns their answers in the order of the misses' numbers.
async fn ask(socket: &Arc<OwnedFd>, misses: Vec<Miss>) -> Vec<Filled> {
    let socket = socket.clone();
    let asked = tokio::task::spawn_blocking(move || {
        for miss in &misses {
            packet::send(socket.as_fd(), miss, &[]).unwrap();
        }
        let answers = misses.iter().map(|_| packet::receive(socket.as_fd()).unwrap().0);
        let mut answers: Vec<Filled> = answers.collect();
        answers.sort_by_key(|answer| answer.id);
        answers
    });
    asked.await.unwrap()
}

fn miss(id: u64, blob: [u8; 32], offset: u64) -> Miss {
    Miss {
        id,
        blob,
        offset,
        length: 4096,
    }
}

#[tokio::test]
async fn a_miss_is_answered_once_its_bytes_are_there() {
    let place = Place::new("");
    let image = place.emptied().await;
    let blob = *image.blobs[0].id.bytes();
    let given = Given::default();
    given.grant(1, &image);
    // As after a kill: the next server answers the repeated requests.
    for _ in 0..2 {
        let (server, socket) = MissServer::start(place.images.clone(), given.clone()).unwrap();
        let answers = ask(&Arc::new(socket), vec![miss(1, blob, 5 * CHUNK_SIZE)]).await;
        assert_eq!(answers[0].result, Ok(()));
        drop(server);
    }
    let file = ready(&image);
    assert!((1..24).contains(&file), "{file} chunks");
}

#[tokio::test]
async fn misses_of_images_a_vmm_was_not_given_are_refused() {
    let place = Place::new("");
    // An image in the store that another VMM was given.
    let image = place.emptied().await;
    let blob = *image.blobs[0].id.bytes();
    let (given, counts) = (Given::default(), place.images.miss_counts());
    let (_server, socket) = MissServer::start(place.images.clone(), given.clone()).unwrap();
    let socket = Arc::new(socket);
    let misses = vec![miss(1, blob, 0), miss(2, [7; 32], 0)];
    for answer in ask(&socket, misses).await {
        let reason = answer.result.unwrap_err();
        assert!(reason.contains("of no image of this machine"), "{reason}");
    }
    assert_eq!((ready(&image), counts.refused(Refusal::NotGiven)), (0, 2));
    given.grant(1, &image);
    let beyond = ask(&socket, vec![miss(1, blob, 0), miss(2, blob, u64::MAX)]).await;
    assert_eq!(beyond[0].result, Ok(()));
    let reason = beyond[1].result.clone().unwrap_err();
    assert!(reason.contains("beyond the blob"), "{reason}");
    given.revoke(1);
    assert!(ask(&socket, vec![miss(1, blob, 0)]).await[0].result.is_err());
    assert_eq!(counts.refused(Refusal::NotGiven), 3);
    assert_eq!(counts.refused(Refusal::OutOfRange), 1);
}

#[tokio::test]
async fn flooding_vmm_does_not_starve_another() {
    let place = Place::new("");
    let image = place.emptied().await;
    let blob = *image.blobs[0].id.bytes();
    let given = Given::default();
    given.grant(1, &image);
    let start = |given: &Given| MissServer::start(place.images.clone(), given.clone()).unwrap();
    let (_hostile, flooded) = start(&Given::default());
    let (_server, socket) = start(&given);
    // More requests than are in progress or fit into its socket, and no answer is read.
    rustix::io::ioctl_fionbio(&flooded, true).unwrap();
    let sent = (0..100_000).take_while(|id| {
        std::thread::yield_now();
        packet::send(flooded.as_fd(), &miss(*id, [7; 32], 0), &[]).is_ok()
    });
    assert!(sent.count() < 100_000);
    let answers = ask(&Arc::new(socket), vec![miss(1, blob, 0)]).await;
    assert_eq!(answers[0].result, Ok(()));
    assert!(place.images.miss_counts().refused(Refusal::NotGiven) < 1000);
}

#[tokio::test]
async fn malformed_miss_closes_the_socket() {
    let place = Place::new("");
    let (_server, socket) = MissServer::start(place.images.clone(), Given::default()).unwrap();
    packet::send(socket.as_fd(), &"not a miss", &[]).unwrap();
    let answer = tokio::task::spawn_blocking(move || packet::receive::<Filled>(socket.as_fd()));
    let closed = answer.await.unwrap();
    assert!(matches!(closed, Err(packet::PacketError::Closed)), "{closed:?}");
    assert_eq!(place.images.miss_counts().refused(Refusal::Malformed), 1);
}

#[tokio::test]
async fn what_was_recorded_is_read_ahead_and_nothing_else() {
    let place = Place::new("");
    let image = place.emptied().await;
    assert!(place.images.prefetch(&image, Arc::new(Silent)).is_none());
    let mut recorder = Recorder::default();
    recorder.access(&image.blobs[0].id, 20 * CHUNK_SIZE, 4096);
    recorder.access(&image.blobs[0].id, 3 * CHUNK_SIZE, 2 * CHUNK_SIZE);
    let order = recorder
        .order(image.digest, record::blobs(&place.images, &image))
        .unwrap();
    prefetch::keep(&image, &order).unwrap();
    let mut ahead = place.images.prefetch(&image, Arc::new(Silent)).unwrap();
    ahead.finished().await;
    let status = ahead.status();
    assert_eq!(
        (status.done, status.failed, status.total),
        (3 * CHUNK_SIZE, 0, 3 * CHUNK_SIZE)
    );
    let chunks = ready(&image);
    assert!((3..20).contains(&chunks), "{chunks} chunks");
    let off = Place::new("[prefetch]\nenabled = false\n");
    let image = off.emptied().await;
    prefetch::keep(&image, &order).unwrap();
    assert!(off.images.prefetch(&image, Arc::new(Silent)).is_none());
}

/// The number of lines in the journal beside an image.
fn journal(image: &Image) -> usize {
    let journal = image.metadata.with_file_name("recording");
    fs::read_to_string(journal).map_or(0, |text| text.lines().count())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recording_outlives_the_process_that_makes_it() {
    let place = Place::new("");
    let image = place.emptied().await;
    let begin = || {
        let (mut recording, socket) = Recording::start().unwrap();
        recording.keep_journal(&place.images, &image);
        for chunk in [20, 3, 20] {
            let access = Access {
                blob: *image.blobs[0].id.bytes(),
                offset: chunk * CHUNK_SIZE,
                length: 4096,
                dropped: 0,
            };
            packet::send(socket.as_fd(), &access, &[]).unwrap();
        }
        eventually("the journal has what was read", || journal(&image) == 3);
        (recording, socket)
    };
    // The recording is never finished: its lock is released with its last descriptor.
    drop(begin());
    eventually("what is left is used", || prefetch::find(&image).is_some());
    let mut ahead = place.images.prefetch(&image, Arc::new(Silent)).unwrap();
    ahead.finished().await;
    assert_eq!(ahead.status().done, 2 * CHUNK_SIZE);
    assert_eq!(journal(&image), 0);

    // A finished recording leaves nothing but its result.
    let (recording, socket) = begin();
    drop(socket);
    let recorded = recording.finish(&place.images, &image, None).await.unwrap();
    assert_eq!(recorded.unwrap().runs, 2);
    assert_eq!(journal(&image), 0);
}

#[tokio::test]
async fn store_over_its_limit_evicts_all_but_leased_images() {
    let place = Place::new("[store]\nlimit = \"1m\"\n");
    let image = place.pull(&place.reference("layout")).await;
    let lease = image.lease().unwrap();
    place.images.collect_in_background().unwrap().await.unwrap();
    assert_eq!(ready(&image), 24);
    drop(lease);
    place.images.collect_in_background().unwrap().await.unwrap();
    let image = place.images.named(&image.digest.to_string()).unwrap();
    assert_eq!(ready(&image), 0);
}

#[tokio::test]
async fn an_indexed_and_a_converted_image_are_read_as_needed() {
    let place = Place::new("");
    let from = place.reference("layout");
    let indexed = place.reference("made:soci");
    let finely = index::Cut {
        least: 0,
        span: 1 << 20,
    };
    index::index(
        &place.images,
        &from,
        Some(&indexed),
        finely,
        false,
        Arc::new(Silent),
    )
    .await
    .unwrap();
    let converted = place.reference("made:converted");
    let wanted = |to| Wanted {
        from: &from,
        to,
        dictionaries: &[],
        trace: None,
        options: Options::default(),
        plain_http: false,
    };
    let first = convert::convert(&place.images, wanted(&converted), Arc::new(Silent))
        .await
        .unwrap();
    let again = place.reference("made:again");
    let second = convert::convert(&place.images, wanted(&again), Arc::new(Silent))
        .await
        .unwrap();
    assert_eq!(first.digest, second.digest);
    place.images.store().prune(false).unwrap();
    for reference in [indexed, converted] {
        let image = place.pull(&reference).await;
        assert_eq!(ready(&image), 0, "{reference}");
        place
            .images
            .fill(&image.blobs[0].id, 7 * CHUNK_SIZE, 1)
            .await
            .unwrap();
        let chunks = ready(&image);
        assert!((1..24).contains(&chunks), "{reference}: {chunks} chunks");
        place.images.store().prune(false).unwrap();
    }
}
