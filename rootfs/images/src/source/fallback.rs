//! Reading a layer with fallback: if a mirror sends wrong bytes, the layer is read again from the next place.
//!
//! Invariants: places are tried in order, each at most once, so that reading ends. The last place is where the image is
//! from, and its answer is final, good or bad.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::Error;
use crate::registry::stats::EndpointStats;

use super::{LayerBody, LayerSource, Source};

/// The place that sends a layer.
#[derive(Clone)]
pub struct Sender {
    /// Its name in messages.
    pub(super) name: String,
    pub(super) rank: Rank,
}

#[derive(Clone)]
pub(super) enum Rank {
    /// The next place to ask is `next`, if `wrong` becomes true for the bytes of this one.
    Mirror { next: usize, wrong: Arc<AtomicBool> },
    /// The place the image is from, with its counters if it has any.
    Last(Option<Arc<EndpointStats>>),
}

impl Sender {
    /// The only place.
    pub(super) fn only(name: String) -> Self {
        Self {
            name,
            rank: Rank::Last(None),
        }
    }
}

/// One reading of one layer.
pub struct Fallback<'a> {
    source: &'a dyn Source,
    layer: &'a LayerSource,
    place: usize,
    senders: Vec<Sender>,
}

impl<'a> Fallback<'a> {
    pub fn new(source: &'a dyn Source, layer: &'a LayerSource) -> Self {
        Self {
            source,
            layer,
            place: 0,
            senders: Vec::new(),
        }
    }

    /// Opens the layer at the first place that has it and was not yet asked.
    ///
    /// # Errors
    /// Those of the last place.
    pub async fn open(&mut self) -> Result<LayerBody, Error> {
        let body = self.source.open(self.layer, self.place).await?;
        self.senders.push(body.sender.clone());
        Ok(body)
    }

    /// Handles an error of reading the body to its end. If the place sent wrong bytes and there is another place, returns
    /// the name of the former; [`Self::open`] then opens the latter.
    ///
    /// # Errors
    /// `error`, if there is no other place. If it is about wrong bytes, it names all places that sent wrong bytes.
    pub fn failed(&mut self, error: Error) -> Result<String, Error> {
        let Some(Sender { name, rank }) = self.senders.last() else {
            return Err(error);
        };
        match (rank, error) {
            (Rank::Mirror { next, wrong }, _) if *next > self.place && wrong.load(Ordering::Acquire) => {
                self.place = *next;
                Ok(name.clone())
            }
            (rank, Error::DigestMismatch { expected, got, .. }) if Some(expected) == self.layer.digest => {
                if let Rank::Last(Some(stats)) = rank {
                    stats.sent_wrong();
                }
                let what = self.named();
                Err(Error::DigestMismatch { what, expected, got })
            }
            (_, error) => Err(error),
        }
    }

    /// The layer's name with the names of its senders.
    fn named(&self) -> String {
        let names: Vec<_> = self.senders.iter().map(|sender| sender.name.as_str()).collect();
        let names = match names.as_slice() {
            [others @ .., last] if !others.is_empty() => format!("{} and {last}", others.join(", ")),
            names => names.concat(),
        };
        format!("{} as {names} sent it", self.layer.name())
    }
}
