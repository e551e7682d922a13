//! Errors of documents that describe a layer: eStargz tables, SOCI indexes and ztocs.

use thaw_imagefs::digest::Digest;

use crate::layer::LayerError;
use crate::span::SpanError;

/// Why a SOCI index, a ztoc or an eStargz table of contents cannot be used. The whole layer can still be pulled.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    #[error("the {form} is malformed: {why}; the layer is read whole instead, have its index made again")]
    Malformed { form: &'static str, why: String },
    #[error("the {form} has digest {got} instead of {expected}: it was damaged or exchanged")]
    Digest {
        form: &'static str,
        expected: Digest,
        got: Digest,
    },
    #[error("the {form} uses {what}, which Thaw does not read in pieces: the layer is read whole instead")]
    Unsupported { form: &'static str, what: String },
    #[error("the {form} describes spans that cannot be: {source}")]
    Spans { form: &'static str, source: SpanError },
    #[error("the {form} describes a layer that is refused: {source}")]
    Layer { form: &'static str, source: LayerError },
}

impl IndexError {
    pub(crate) fn malformed(form: &'static str, why: impl Into<String>) -> IndexError {
        IndexError::Malformed {
            form,
            why: why.into(),
        }
    }

    pub(crate) fn unsupported(form: &'static str, what: impl Into<String>) -> IndexError {
        IndexError::Unsupported {
            form,
            what: what.into(),
        }
    }
}

/// Compares a document with its expected digest.
pub(crate) fn verify(form: &'static str, bytes: &[u8], expected: &Digest) -> Result<(), IndexError> {
    let got = Digest::of(bytes);
    if got == *expected {
        Ok(())
    } else {
        Err(IndexError::Digest {
            form,
            expected: *expected,
            got,
        })
    }
}
