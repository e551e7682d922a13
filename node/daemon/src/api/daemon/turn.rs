//! Turns: operations that change a sandbox are done one at a time.

use std::sync::Arc;

use thaw_sandbox::error::{Error, ErrorKind};

use super::{Body, Daemon};
use crate::api::machine::Machine;
use crate::api::scope::Wanted;

/// The right to change a sandbox.
pub(super) struct Turn {
    pub(super) id: String,
    pub(super) machine: Arc<dyn Machine>,
    alone: Alone,
}

/// Held by the operation that has its turn.
pub(super) type Alone = tokio::sync::OwnedMutexGuard<()>;

impl Turn {
    pub(super) fn new(id: String, machine: Arc<dyn Machine>, alone: Alone) -> Turn {
        Turn { id, machine, alone }
    }

    pub(super) fn into_parts(self) -> (Arc<dyn Machine>, Alone) {
        (self.machine, self.alone)
    }
}

impl Daemon {
    /// Waits until no other operation changes the sandbox, which has a machine then.
    pub(super) async fn turn(&self, wanted: &Wanted) -> Result<Turn, Error> {
        let (id, body, alone) = self.turn_of(wanted).await?;
        self.count_request(&id);
        match body {
            Body::Machine(machine) => Ok(Turn::new(id, machine, alone)),
            Body::Paused(_) => Err(memory_released(&id)),
        }
    }

    /// The same for any sandbox.
    pub(super) async fn turn_of(&self, wanted: &Wanted) -> Result<(String, Body, Alone), Error> {
        let id = self.id(wanted)?;
        let alone = self.held(&id)?.1.lock_owned().await;
        // As the operation before has left it.
        let (body, _) = self.held(&id)?;
        Ok((id, body, alone))
    }
}

/// The error for an operation that needs the machine of such a sandbox.
pub(super) fn memory_released(id: &str) -> Error {
    let what = format!("sandbox {id} is paused, and its memory is released");
    Error::new(ErrorKind::MemoryReleased, what)
}
