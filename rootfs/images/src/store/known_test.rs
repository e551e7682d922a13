//! Images that are known in memory, and the changes that make a process look again.

use super::*;

impl Bench {
    fn known(&self, reference: &str) -> Option<Image> {
        let reference = reference.parse::<ImageRef>().unwrap().absolute().unwrap();
        self.store.known(&reference, &Platform::linux_amd64())
    }

    /// Pulls until the result is old enough to be kept.
    async fn known_soon(&self, reference: &str) -> Image {
        for _ in 0..500 {
            self.pull(reference).await.unwrap();
            if let Some(image) = self.known(reference) {
                return image;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("it is never kept");
    }
}

fn one_layer(seed: u64) -> (Blobs, Value) {
    let mut blobs = Blobs::default();
    let image = blobs.image("amd64", &[big_layer(seed, TAR_GZIP)]);
    (blobs, image)
}

#[tokio::test]
async fn an_image_is_known_until_it_is_removed_or_its_source_changes() {
    let bench = Bench::new();
    let (blobs, image) = one_layer(1);
    let reference = bench.layout(&blobs, std::slice::from_ref(&image));
    assert!(bench.known(&reference).is_none());
    assert_eq!(bench.known_soon(&reference).await.digest, digest_of(&image));
    bench.store.remove(&digest_of(&image)).unwrap();
    assert!(bench.known(&reference).is_none(), "removed");

    bench.known_soon(&reference).await;
    let (blobs, other) = one_layer(2);
    bench.layout(&blobs, std::slice::from_ref(&other));
    assert!(bench.known(&reference).is_none(), "the layout names another");
    assert_eq!(bench.known_soon(&reference).await.digest, digest_of(&other));
}

#[tokio::test]
async fn emptied_and_damaged_layers_are_looked_at_again() {
    let bench = Bench::new();
    let (blobs, image) = one_layer(1);
    let reference = bench.layout(&blobs, std::slice::from_ref(&image));
    bench.known_soon(&reference).await;
    bench.store.evict(&digest_of(&image)).unwrap();
    assert!(bench.known(&reference).is_none(), "emptied");

    let known = bench.known_soon(&reference).await;
    let data = &known.blobs[0].data;
    std::fs::File::options()
        .write(true)
        .open(data)
        .unwrap()
        .set_len(1)
        .unwrap();
    assert!(bench.known(&reference).is_none(), "cut");
}

#[tokio::test]
async fn asking_the_source_again_asks_it() {
    let bench = Bench::new();
    let (blobs, image) = one_layer(1);
    let reference = bench.layout(&blobs, std::slice::from_ref(&image));
    bench.known_soon(&reference).await;
    std::fs::remove_dir_all(bench.path("layout").join("blobs")).unwrap();
    let always = PullOptions {
        policy: PullPolicy::Always,
        ..options()
    };
    let asked = bench.pull_with(&reference, &always).await;
    assert!(asked.is_err(), "the source has lost its blobs");
    assert_eq!(bench.pull(&reference).await.unwrap().digest, digest_of(&image));
}
