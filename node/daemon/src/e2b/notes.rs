//! What E2B's API knows of a sandbox and thawd's does not: kept as an annotation in the sandbox's record, so that it survives a restart of
//! thawd and has every text exactly.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use thaw_sandbox::state::Terms;

use super::context::{self, Context};
use super::failure::Failure;
use super::whole_id::Tag;

/// The name of the annotation.
const ANNOTATION: &str = "e2b";
/// The name of the annotation of a sandbox with private ports. One of its own: each request to a port asks for it, and does not read the notes.
const PRIVATE: &str = "e2b-private";
/// Most metadata and environment variables together, bytes: they are in memory as long as the sandbox is.
pub const MAX_BYTES: usize = 64 << 10;

/// What a sandbox was created with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Notes {
    /// The template's id.
    pub template: String,
    /// The template's name, if it has one.
    pub alias: Option<String>,
    /// The size of its disk in MiB, if it is known.
    pub disk_mib: Option<u32>,
    pub metadata: BTreeMap<String, String>,
    /// The environment of every process that is run in it, over that of its template.
    pub env: BTreeMap<String, String>,
    /// What its template says of processes.
    #[serde(skip_serializing_if = "Context::is_default")]
    pub context: Context,
    /// Its caller chose whether it may connect to the internet.
    pub allow_internet_access: Option<bool>,
    /// The node that made it, if that answers as one with others. It is in the sandbox's id, also after another node has taken it over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub home: Option<Tag>,
    /// It is paused, not deleted, when its timeout is over.
    pub auto_pause: bool,
    /// A request for one of its ports resumes it if it is paused.
    pub auto_resume: bool,
    /// Its ports are open only to requests with its traffic token.
    #[serde(skip)]
    pub is_private: bool,
}

impl Notes {
    /// The notes of a sandbox that E2B's API created, or a clone of one; `None` for others.
    pub fn of(terms: &Terms) -> Option<Notes> {
        let notes: Notes = serde_json::from_str(terms.annotations.get(ANNOTATION)?).ok()?;
        Some(Notes {
            is_private: Notes::are_private(terms),
            ..notes
        })
    }

    /// Whether a sandbox's ports are private, without reading its notes.
    pub fn are_private(terms: &Terms) -> bool {
        terms.annotations.contains_key(PRIVATE)
    }

    /// Whether a sandbox has notes, without reading them.
    pub fn are_in(terms: &Terms) -> bool {
        terms.annotations.contains_key(ANNOTATION)
    }

    /// The annotations that keep them.
    ///
    /// # Errors
    /// They are too large.
    pub fn annotations(&self) -> Result<BTreeMap<String, String>, Failure> {
        if context::size(&self.metadata) + context::size(&self.env) > MAX_BYTES {
            let why = format!("metadata and envVars have more than {MAX_BYTES} bytes together: give less");
            return Err(Failure::Bad(why));
        }
        let text = serde_json::to_string(self).map_err(|e| Failure::Bad(e.to_string()))?;
        let private = self.is_private.then(|| (PRIVATE.to_owned(), String::new()));
        Ok([(ANNOTATION.to_owned(), text)]
            .into_iter()
            .chain(private)
            .collect())
    }

    /// Its environment as `NAME=VALUE`.
    pub fn environment(&self) -> Vec<String> {
        context::assignments(&self.env)
    }

    /// Whether its metadata has all these entries.
    pub fn has(&self, wanted: &[(String, String)]) -> bool {
        wanted
            .iter()
            .all(|(key, value)| self.metadata.get(key) == Some(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_survives_the_record() {
        let odd = "a b=\"c\"&\u{0}\n\u{1f9ca}%20+,;";
        let notes = Notes {
            template: "base".into(),
            metadata: [(odd.to_owned(), odd.to_owned()), (String::new(), String::new())].into(),
            env: [("A".to_owned(), odd.to_owned())].into(),
            is_private: true,
            ..Notes::default()
        };
        let terms = Terms {
            annotations: notes.annotations().unwrap(),
            ..Terms::default()
        };
        let read: Terms = serde_json::from_str(&serde_json::to_string(&terms).unwrap()).unwrap();
        assert_eq!(Notes::of(&read), Some(notes.clone()));
        assert!(Notes::are_in(&read) && !Notes::are_in(&Terms::default()));
        assert!(Notes::are_private(&read) && !Notes::are_private(&Terms::default()));
        assert_eq!(notes.environment(), [format!("A={odd}")]);
        assert!(
            notes.has(&[(odd.to_owned(), odd.to_owned())]) && !notes.has(&[("A".to_owned(), odd.to_owned())])
        );
        assert_eq!(Notes::of(&Terms::default()), None);
    }

    #[test]
    fn too_many_bytes_are_refused() {
        let notes = Notes {
            metadata: [("k".to_owned(), "v".repeat(MAX_BYTES))].into(),
            ..Notes::default()
        };
        assert!(matches!(notes.annotations(), Err(Failure::Bad(_))));
    }
}
