//! Summary of a pull: which layers were in the store, are read on demand, or were streamed, and how many bytes it fetched.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use thaw_imagefs::digest::Digest;
use thaw_images::form::Form;
use thaw_images::progress::{Event, Progress};
use thaw_sys::lock::Lock;

use crate::human_bytes::HumanBytes;

/// Counts the events that it passes on.
pub struct Counting {
    next: Arc<dyn Progress>,
    layers: Mutex<HashMap<Digest, Layer>>,
}

/// How a layer was obtained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layer {
    Cached,
    Lazy { form: Form, fetched: u64 },
    Streamed { received: u64 },
}

impl Counting {
    /// Passes events on to `next`.
    pub fn new(next: Arc<dyn Progress>) -> Arc<Counting> {
        Arc::new(Counting {
            next,
            layers: Mutex::default(),
        })
    }

    /// Number of bytes fetched.
    pub fn fetched(&self) -> u64 {
        let layers = self.layers.locked();
        layers
            .values()
            .map(|layer| match layer {
                Layer::Cached => 0,
                Layer::Lazy { fetched, .. } => *fetched,
                Layer::Streamed { received } => *received,
            })
            .sum()
    }

    /// The summary in words: `2 layers read as needed (soci), 1 streamed; 1.20 MiB fetched`.
    pub fn summary(&self) -> String {
        let mut counts: BTreeMap<(u8, &str), u64> = BTreeMap::new();
        for layer in self.layers.locked().values() {
            let kind = match layer {
                Layer::Cached => (0, "in the store"),
                Layer::Lazy { form: Form::Tar, .. } => (1, "read as needed (kept index)"),
                Layer::Lazy { form: Form::Soci, .. } => (1, "read as needed (SOCI index)"),
                Layer::Lazy {
                    form: Form::Estargz, ..
                } => (1, "read as needed (eStargz)"),
                Layer::Lazy {
                    form: Form::Accelerated,
                    ..
                } => (1, "read as needed (converted)"),
                Layer::Lazy {
                    form: Form::Nydus, ..
                } => (1, "read as needed (Nydus)"),
                Layer::Streamed { .. } => (2, "streamed"),
            };
            *counts.entry(kind).or_default() += 1;
        }
        if counts.is_empty() {
            return "in the store".into();
        }
        let parts: Vec<String> = counts
            .into_iter()
            .map(|((_, kind), count)| match count {
                1 => format!("1 layer {kind}"),
                count => format!("{count} layers {kind}"),
            })
            .collect();
        format!("{}; {} fetched", parts.join(", "), HumanBytes(self.fetched()))
    }
}

impl Progress for Counting {
    fn event(&self, event: Event) {
        {
            let mut layers = self.layers.locked();
            match &event {
                Event::Cached { layer } => drop(layers.insert(*layer, Layer::Cached)),
                Event::Lazy { layer, form, fetched } => {
                    let (form, fetched) = (*form, *fetched);
                    layers.insert(*layer, Layer::Lazy { form, fetched });
                }
                Event::Started { layer, .. } => drop(layers.insert(*layer, Layer::Streamed { received: 0 })),
                Event::Advanced {
                    layer,
                    received: so_far,
                    ..
                } => {
                    if let Some(Layer::Streamed { received }) = layers.get_mut(layer) {
                        *received = (*so_far).max(*received);
                    }
                }
                _ => {}
            }
        }
        self.next.event(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_images::progress::Silent;

    #[test]
    fn each_layer_counts_once_by_how_it_was_had() {
        let counting = Counting::new(Arc::new(Silent));
        assert_eq!(counting.summary(), "in the store");
        let layer = |name: &str| Digest::of(name.as_bytes());
        for name in ["a", "b"] {
            counting.event(Event::Lazy {
                layer: layer(name),
                form: Form::Soci,
                fetched: 1024,
            });
        }
        counting.event(Event::Started {
            layer: layer("c"),
            total: Some(4096),
        });
        for received in [1024, 2048] {
            counting.event(Event::Advanced {
                layer: layer("c"),
                received,
                unpacked: 0,
            });
        }
        counting.event(Event::Cached { layer: layer("d") });
        assert_eq!(
            counting.summary(),
            "1 layer in the store, 2 layers read as needed (SOCI index), 1 layer streamed; 4.00 KiB fetched"
        );
    }
}
