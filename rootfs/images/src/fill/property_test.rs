//! Ready chunks are right after any sequence of fills, evictions, torn files and restarts.

use std::sync::OnceLock;

use proptest::prelude::*;
use thaw_imagefs::blob::BootId;

use super::*;

#[derive(Clone, Debug)]
enum Step {
    /// Offset and length as shares of the blob.
    Fill(usize, f64, f64, bool),
    Evict,
    /// The host crashes; a page of each of these chunks did not reach the disk.
    Reboot(Vec<prop::sample::Index>),
    /// A digest, or the ready file's header, did not.
    Torn(prop::sample::Index),
    /// The process dies.
    Restart,
    Verify,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..2usize, 0.0..1.0, 0.0..0.3, any::<bool>()).prop_map(|(blob, at, length, prefetch)| {
            Step::Fill(blob, at, length, prefetch)
        }),
        1 => Just(Step::Evict),
        1 => proptest::collection::vec(any::<prop::sample::Index>(), 0..4).prop_map(Step::Reboot),
        1 => any::<prop::sample::Index>().prop_map(Step::Torn),
        1 => Just(Step::Restart),
        1 => Just(Step::Verify),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]
    #[test]
    fn only_right_bytes_are_ready(steps in proptest::collection::vec(step(), 1..14)) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            static LAYERS: OnceLock<[Layer; 2]> = OnceLock::new();
            let layers = LAYERS.get_or_init(|| [layer(1, TAR_GZIP, 1 << 20), layer(2, TAR_GZIP, 200_000)]);
            let bench = Bench::new(layers).await;
            let mut store = bench.store.clone();
            let mut filler = Filler::new(store.clone(), fetch_options());
            for (number, step) in steps.iter().enumerate() {
                match step {
                    Step::Fill(blob, at, length, prefetch) => {
                        let blob = &bench.image.blobs[*blob];
                        let share = |share: f64| (blob.length as f64 * share) as u64;
                        let priority = if *prefetch { Priority::Prefetch } else { Priority::Demand };
                        match filler.fill(&blob.id, share(*at), share(*length), priority).await {
                            Ok(()) => assert!(open(blob).missing(share(*at), share(*length)).next().is_none()),
                            // Torn: the image is pulled again before its next start.
                            Err(error) => {
                                assert_eq!(error.code(), "not_found", "{error}");
                                assert!(store.image(&bench.image.digest).unwrap().is_none());
                                let reference = bench.image.reference.parse().unwrap();
                                let platform = Platform::linux_amd64();
                                store.pull(&reference, &platform, &options(), Arc::new(Silent)).await.unwrap();
                            }
                        }
                    }
                    Step::Evict => {
                        if store.image(&bench.image.digest).unwrap().is_some() {
                            store.evict(&bench.image.digest).unwrap();
                        }
                    }
                    Step::Reboot(torn) => {
                        for torn in torn {
                            let blob = &bench.image.blobs[torn.index(2)];
                            let data = std::fs::File::options().write(true).open(&blob.data).unwrap();
                            let page = torn.index((blob.length / 4096) as usize) as u64;
                            data.write_all_at(&[0xa5; 4096], page * 4096).unwrap();
                        }
                        store = store.after_boot(BootId([number as u8 + 10; 16]));
                        filler = Filler::new(store.clone(), fetch_options());
                        // A start looks up the image first, which clears the bits.
                        store.image(&bench.image.digest).unwrap();
                    }
                    Step::Torn(at) => {
                        let blob = &bench.image.blobs[at.index(2)];
                        let ready = std::fs::File::options().read(true).write(true).open(&blob.ready).unwrap();
                        let length = ready.metadata().unwrap().len();
                        ready.write_all_at(&[0x5a; 8], at.index((length - 8) as usize) as u64 / 8 * 8 ).unwrap();
                        store = store.after_boot(BootId([number as u8 + 10; 16]));
                        filler = Filler::new(store.clone(), fetch_options());
                        if store.image(&bench.image.digest).unwrap().is_none() {
                            let reference = bench.image.reference.parse().unwrap();
                            let platform = Platform::linux_amd64();
                            store.pull(&reference, &platform, &options(), Arc::new(Silent)).await.unwrap();
                        }
                    }
                    Step::Restart => {
                        store = store.reopened();
                        filler = Filler::new(store.clone(), fetch_options());
                    }
                    Step::Verify => {
                        if store.image(&bench.image.digest).unwrap().is_some() {
                            let report = store.verify(&bench.image.digest).unwrap();
                            assert!(report.is_sound(), "{report:?}");
                        }
                    }
                }
                bench.check();
            }
            filler.fill(&bench.image.blobs[0].id, 0, u64::MAX, Priority::Demand).await.unwrap();
            bench.check();
        });
    }
}
