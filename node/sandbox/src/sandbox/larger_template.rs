//! Templates with more boot memory, made in the background for sandboxes of a size that is in demand. Until there is one, the template
//! of the common size serves them, and the rest of their memory is plugged in.
//!
//! Invariants: no creation waits for one. One is made at a time, and one that failed is not tried again by this process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use thaw_sys::lock::Lock;

use super::{Node, SandboxSpec};
use crate::template::Shape;

/// Creations of a size after which it is in demand.
const DEMAND: u32 = 3;

/// Counts the creations that a larger template would have served better.
#[derive(Debug, Default)]
pub struct LargerTemplates {
    /// Whether any are made.
    enabled: bool,
    wanted: Mutex<Wanted>,
}

#[derive(Debug, Default)]
struct Wanted {
    creations: HashMap<Shape, u32>,
    making: bool,
}

impl Wanted {
    /// Counts a creation. Returns whether the template is to be made now.
    fn is_due(&mut self, shape: Shape) -> bool {
        let creations = self.creations.entry(shape).or_default();
        *creations = creations.saturating_add(1);
        // One that has failed, or is being made, stays above it.
        let is_due = *creations == DEMAND && !self.making;
        if *creations == DEMAND && self.making {
            *creations -= 1;
        }
        self.making |= is_due;
        is_due
    }
}

impl LargerTemplates {
    /// Makes them from now on.
    pub(super) fn enabled() -> LargerTemplates {
        LargerTemplates {
            enabled: true,
            ..LargerTemplates::default()
        }
    }

    /// As these, but nothing is wanted yet.
    pub(super) fn others(&self) -> LargerTemplates {
        LargerTemplates {
            enabled: self.enabled,
            ..LargerTemplates::default()
        }
    }
}

impl Node {
    /// Notes that a sandbox is thawed from a template of the shape `used`. Begins to make a larger one if enough have wanted it.
    pub(super) fn note_template(&self, spec: &SandboxSpec, used: Shape) {
        let fitting = Shape::fitting(spec.vcpus, spec.memory_mib);
        if !self.larger.enabled || used.memory_mib >= fitting.memory_mib {
            return;
        }
        if self.larger.wanted.locked().is_due(fitting) {
            let node = self.clone();
            tokio::spawn(async move { node.make_template(fitting).await });
        }
    }

    async fn make_template(&self, shape: Shape) {
        let (cpus, memory_mib) = (shape.vcpus, shape.memory_mib);
        let made = self
            .templates
            .get(self, shape, None, &(Arc::new(|_| ()) as _))
            .await;
        self.larger.wanted.locked().making = false;
        match made {
            Ok(_) => tracing::info!(cpus, memory_mib, "a template with more boot memory is ready"),
            Err(e) => tracing::warn!(
                cpus,
                memory_mib,
                "sandboxes of this size go on with less boot memory: {e}"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_is_made_once_and_one_at_a_time() {
        let (mut wanted, small, large) = (Wanted::default(), Shape::fitting(1, 512), Shape::fitting(1, 1024));
        let due = |wanted: &mut Wanted, shape| (0..3).map(|_| wanted.is_due(shape)).collect::<Vec<_>>();
        assert_eq!(due(&mut wanted, small), [false, false, true]);
        assert_eq!(due(&mut wanted, large), [false; 3], "another is being made");
        wanted.making = false;
        assert!(wanted.is_due(large));
        wanted.making = false;
        assert_eq!(due(&mut wanted, small), [false; 3], "not again");
    }
}
