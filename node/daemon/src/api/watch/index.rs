//! Ids by label, so that a list by label visits only sandboxes with that label.
//!
//! Invariant: an id is under a name and value exactly while its sandbox has that label.

use std::collections::{BTreeMap, BTreeSet};

use thaw_protocol::api::Sandbox;

use super::selector::{Requirement, Selector};

type Ids = BTreeSet<String>;

/// Ids by label name, by its value.
#[derive(Debug, Default)]
pub struct Index(BTreeMap<String, BTreeMap<String, Ids>>);

impl Index {
    /// Adds a sandbox's labels.
    pub fn add(&mut self, sandbox: &Sandbox) {
        for (name, value) in &sandbox.labels {
            let values = self.0.entry(name.clone()).or_default();
            values
                .entry(value.clone())
                .or_default()
                .insert(sandbox.id.clone());
        }
    }

    /// Removes a sandbox's labels.
    pub fn remove(&mut self, sandbox: &Sandbox) {
        for (name, value) in &sandbox.labels {
            let Some(values) = self.0.get_mut(name) else {
                continue;
            };
            if let Some(ids) = values.get_mut(value) {
                ids.remove(&sandbox.id);
                if ids.is_empty() {
                    values.remove(value);
                }
            }
            if values.is_empty() {
                self.0.remove(name);
            }
        }
    }

    /// The ids that can match, each once, from the requirement with the fewest ids; `None` if any sandbox can match.
    pub fn candidates(&self, selector: &Selector) -> Option<Vec<&Ids>> {
        let sets = selector.labels.iter().filter_map(|r| self.of(r));
        sets.min_by_key(|sets| sets.iter().map(|ids| ids.len()).sum::<usize>())
    }

    fn of(&self, requirement: &Requirement) -> Option<Vec<&Ids>> {
        let values = |name| self.0.get(name).into_iter().flat_map(|values| values.iter());
        match requirement {
            Requirement::In(name, wanted) => {
                let values = self.0.get(name);
                Some(wanted.iter().filter_map(|v| values?.get(v)).collect())
            }
            Requirement::Exists(name) => Some(values(name).map(|(_, ids)| ids).collect()),
            Requirement::NotIn(..) | Requirement::Absent(_) => None,
        }
    }
}
