//! Who has a layer, asked in turn: what one sent and is not the layer is read again from the next.
//!
//! Invariants: the places are asked in their order, each at most once, so that a reading ends; the last of them is where the
//! image is from, and what it sends is the answer, good or bad.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::Error;
use crate::registry::stats::EndpointStats;

use super::{LayerBody, LayerSource, Source};

/// Who sends a layer.
#[derive(Clone)]
pub struct Sender {
    /// As messages name it.
    pub(super) name: String,
    pub(super) rank: Rank,
}

#[derive(Clone)]
pub(super) enum Rank {
    /// Another can be asked: from this place on, if what came was `wrong`.
    Mirror { next: usize, wrong: Arc<AtomicBool> },
    /// Where the image is from; counted, where anything is.
    Last(Option<Arc<EndpointStats>>),
}

impl Sender {
    /// Of a place that is alone.
    pub(super) fn only(name: String) -> Self {
        Self {
            name,
            rank: Rank::Last(None),
        }
    }
}

/// One reading of one layer.
pub struct Turns<'a> {
    source: &'a dyn Source,
    layer: &'a LayerSource,
    place: usize,
    senders: Vec<Sender>,
}

impl<'a> Turns<'a> {
    pub fn new(source: &'a dyn Source, layer: &'a LayerSource) -> Self {
        Self {
            source,
            layer,
            place: 0,
            senders: Vec::new(),
        }
    }

    /// The layer, from the first place that has it and was not yet asked.
    ///
    /// # Errors
    /// What the last of them says.
    pub async fn open(&mut self) -> Result<LayerBody, Error> {
        let body = self.source.open(self.layer, self.place).await?;
        self.senders.push(body.sender.clone());
        Ok(body)
    }

    /// Reading what [`Self::open`] had to the end failed so. Returns who sent something else than the layer, where another
    /// is to be asked now.
    ///
    /// # Errors
    /// `error`, where nobody is; with the names of all who sent something else, if that is what is wrong.
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

    /// The layer, and who sent it.
    fn named(&self) -> String {
        let names: Vec<_> = self.senders.iter().map(|sender| sender.name.as_str()).collect();
        let names = match names.as_slice() {
            [others @ .., last] if !others.is_empty() => format!("{} and {last}", others.join(", ")),
            names => names.concat(),
        };
        format!("{} as {names} sent it", self.layer.name())
    }
}
