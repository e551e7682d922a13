//! Mirrors that send other bytes than the requested layer.

use crate::fetch::tests::{counts, mirrored};
use crate::registry::Client;
use crate::source::fixture::{Answer, Server, content};

use super::*;

/// An image of one layer, its registry, and one mirror for each kind of answer.
struct Places {
    registry: Server,
    mirrors: Vec<Server>,
    client: Arc<Client>,
    layer: Digest,
}

type Change = fn(Answer) -> Answer;

fn flipped(mut answer: Answer) -> Answer {
    answer.body[5000] ^= 1;
    answer
}

fn other(mut answer: Answer) -> Answer {
    // It unpacks well, and is of that length, but is another layer.
    let tar = fixture::tar(&[("etc/file", &fixture::noise(9, 400_000))]);
    let length = answer.body.len();
    answer.body = fixture::gzip(&tar);
    answer.body.resize(length, 0);
    answer
}

fn flipped_and_cut(answer: Answer) -> Answer {
    Answer {
        cut: Some(100_000),
        ..flipped(answer)
    }
}

fn true_to_it(answer: Answer) -> Answer {
    answer
}

fn places(registry: Change, mirrors: &[Change]) -> Places {
    let mut blobs = Blobs::default();
    let layer = big_layer(1, TAR_GZIP);
    let digest = Digest::of(&layer.stored);
    let manifest = digest_of(&blobs.image("amd64", &[layer]));
    let serve = |change: Change| {
        let blobs = blobs.clone();
        Server::start(move |asked| {
            let answer = content(&blobs, "v1", manifest, asked);
            match asked.path.contains(&digest.hex()) && answer.body.len() > 5000 {
                true => change(answer),
                false => answer,
            }
        })
    };
    let registry = serve(registry);
    let mirrors: Vec<_> = mirrors.iter().map(|change| serve(*change)).collect();
    let urls: Vec<_> = mirrors
        .iter()
        .map(|it| format!("http://{}", it.address))
        .collect();
    let urls: Vec<_> = urls.iter().map(String::as_str).collect();
    Places {
        registry,
        mirrors,
        client: Client::new(mirrored(&urls)).unwrap(),
        layer: digest,
    }
}

impl Places {
    fn reference(&self) -> String {
        format!("{}/team/app:v1", self.registry.address)
    }

    fn options(&self) -> PullOptions {
        PullOptions {
            client: Some(self.client.clone()),
            ..options()
        }
    }

    async fn pull(&self, bench: &Bench, log: &Arc<Log>) -> Result<Image, Error> {
        let reference = self.reference().parse().unwrap();
        let platform = Platform::linux_amd64();
        bench
            .store
            .pull(&reference, &platform, &self.options(), log.clone())
            .await
    }

    fn asked(&self, server: &Server) -> usize {
        server.count(&self.layer.hex())
    }

    fn wrong(&self, server: &Server) -> u64 {
        counts(&self.client, &server.address.to_string()).wrong_bytes
    }
}

#[tokio::test]
async fn wrong_layer_from_mirror_is_read_from_the_next() {
    let right = {
        let (bench, all) = (Bench::new(), places(true_to_it, &[]));
        let pulled = all.pull(&bench, &Arc::default()).await.unwrap();
        std::fs::read(&pulled.blobs[0].data).unwrap()
    };
    let cases: [(&[Change], usize); 5] = [
        (&[flipped], 1),
        (&[other], 1),
        (&[flipped, other], 1),
        // The second one has it.
        (&[flipped, true_to_it], 0),
        // The registry sends the rest of the first mirror's bytes, then the whole.
        (&[flipped_and_cut], 2),
    ];
    for (mirrors, from_registry) in cases {
        let (bench, log) = (Bench::new(), Arc::new(Log::default()));
        let all = places(true_to_it, mirrors);
        let pulled = all.pull(&bench, &log).await.unwrap();
        assert_eq!(std::fs::read(&pulled.blobs[0].data).unwrap(), right);
        assert_eq!(all.asked(&all.registry), from_registry);
        let mut wrong = 0;
        for (mirror, change) in all.mirrors.iter().zip(mirrors) {
            let expected = u64::from(!std::ptr::fn_addr_eq(*change, true_to_it as Change));
            assert_eq!((all.asked(mirror), all.wrong(mirror)), (1, expected));
            wrong += expected as usize;
        }
        assert_eq!(all.wrong(&all.registry), 0);
        assert_eq!(log.count(|it| matches!(it, Event::Retrying { .. })), wrong);
    }
}

#[tokio::test]
async fn wrong_layer_everywhere_names_all_and_leaves_nothing() {
    let bench = Bench::new();
    let all = places(flipped, &[flipped, other]);
    let error = all.pull(&bench, &Arc::default()).await.unwrap_err();
    assert_eq!(error.code(), "digest_mismatch", "{error}");
    let text = error.to_string();
    assert!(text.contains(&all.layer.to_string()), "{text}");
    for server in all.mirrors.iter().chain([&all.registry]) {
        assert!(text.contains(&server.address.to_string()), "{text}");
        assert_eq!((all.asked(server), all.wrong(server)), (1, 1));
    }
    assert_eq!(bench.leftovers(), Vec::<String>::new());
}

#[tokio::test]
async fn a_mirror_that_keeps_sending_wrong_layers_is_left_alone() {
    let all = places(true_to_it, &[flipped]);
    let mirror = all.mirrors[0].address.to_string();
    for opened in [0, 0, 1] {
        // A mirror that sent a wrong blob is not asked again soon for it; each process opens its endpoints anew.
        all.pull(&Bench::new(), &Arc::default()).await.unwrap();
        assert_eq!(counts(&all.client, &mirror).breaker_opens, opened);
    }
}

#[tokio::test]
async fn a_torn_cache_is_repaired_from_the_next_place_too() {
    use std::os::unix::fs::FileExt;
    let bench = Bench::new();
    let all = places(true_to_it, &[flipped]);
    let pulled = all.pull(&bench, &Arc::default()).await.unwrap();
    let blob = &pulled.blobs[0];
    let whole = std::fs::read(&blob.data).unwrap();
    let data = std::fs::File::options().write(true).open(&blob.data).unwrap();
    data.write_all_at(&[0; 4096], 200_000).unwrap();
    let rebooted = Store {
        boot: BootId([9; 16]),
        ..bench.store.clone()
    };
    rebooted.image(&pulled.digest).unwrap().unwrap();
    rebooted
        .repair(
            &blob.id,
            0,
            blob.length,
            &rebooted.source_options(&all.options()),
            Arc::new(Log::default()),
        )
        .await
        .unwrap();
    assert!(std::fs::read(&blob.data).unwrap() == whole);
    assert_eq!(all.wrong(&all.mirrors[0]), 2);
}
