//! Adopts the sandboxes that an earlier thawd left running.
//!
//! Invariant: a sandbox that was created with an idempotency key is adopted if its creation was complete, and is then the answer to that
//! key. Otherwise no caller ever got an answer, and it is ended, so that a retry creates another. A sandbox that was created without a key
//! is always adopted. If a sandbox whose VMM lives cannot be adopted, it runs on without an owner: the log has its id and the reason, a
//! deletion ends it, and the next thawd tries again.

use std::collections::HashMap;
use std::sync::Arc;

use axum::body::Bytes;
use thaw_failpoint::{Failpoint, reach};
use thaw_pools::cgroup::Hierarchy;
use thaw_protocol::api::{Account, CreatedSandbox, Readiness};
use thaw_sandbox::blocking::blocking;
use thaw_sandbox::state::{Asked, Paused, Record, RunDirectory, SandboxDirectory};
use thaw_sandbox::{Node, NotAdopted, Sandbox, Tenants};

use super::paused::keep_later;
use super::{Daemon, Described, Microvm};
use crate::api::idempotency;
use crate::api::machine::Machine;

/// A sandbox without an owner.
struct Orphan {
    record: Record,
    directory: SandboxDirectory,
    /// The answer to its creation, sent or about to be sent.
    answer: Option<Bytes>,
    /// Whether its creation was complete. For a clone: whether all clones of the fork were created.
    is_whole: bool,
}

impl Daemon {
    /// Adopts every sandbox that an earlier thawd left running, and ends those whose creation was incomplete.
    /// Of those that are also `paused`, the later stays.
    pub(super) async fn adopt(self: &Arc<Daemon>, tenants: &Tenants, paused: &mut Vec<Paused>) {
        let node = tenants.shared();
        for orphan in orphans(&node.run, &node.cgroups) {
            let id = orphan.record.id.clone();
            reach(Failpoint::AdoptOwned);
            let asked = orphan.record.terms.asked.clone();
            let later = keep_later(node, paused, &orphan.record, orphan.directory).await;
            let Some(directory) = later else { continue };
            match adopt(tenants, orphan.record, directory).await {
                Ok((node, sandbox)) if orphan.is_whole => {
                    tracing::info!(sandbox = id, "adopted");
                    let image_config = serde_json::to_string(&sandbox.config).unwrap_or_default();
                    let machine = Arc::new(Microvm::adopted(node, sandbox));
                    if machine.readiness() == Some(Readiness::Waiting) {
                        tracing::warn!(sandbox = id, "removed: nobody was told that it is ready");
                        machine.destroy().await;
                        continue;
                    }
                    let condition = machine.condition().await;
                    let sandbox = Described::clone(&self.insert(machine, condition, None));
                    if let Some(asked) = asked {
                        let answer = CreatedSandbox {
                            sandbox,
                            image_config,
                            // The thawd that measured the start has ended.
                            account: Account::default(),
                        };
                        self.answer_again(&asked, orphan.answer, &answer);
                    }
                    reach(Failpoint::AdoptShown);
                }
                Ok((_, unfinished)) => {
                    Arc::new(unfinished).destroy().await;
                    tracing::info!(sandbox = id, "removed: whoever asked for it was not answered");
                }
                Err(NotAdopted::Ended(e)) => tracing::error!(sandbox = id, "removed: {e}"),
                Err(NotAdopted::Left(e)) if orphan.is_whole => tracing::error!(
                    sandbox = id,
                    "not adopted: {e}. It runs on without an owner: `thaw rm {id}` ends it, and the next start of thawd tries \
                     again"
                ),
                Err(NotAdopted::Left(e)) => {
                    let (run, cgroups, unwanted) = (node.run.clone(), node.cgroups.clone(), id.clone());
                    let _ = blocking(move || Ok(run.end(&unwanted, &cgroups))).await;
                    tracing::info!(
                        sandbox = id,
                        "removed: whoever asked for it was not answered ({e})"
                    );
                }
            }
        }
    }

    /// Restores the answer to a key: the one of the earlier thawd, or else one with the sandbox it created.
    fn answer_again(&self, asked: &Asked, noted: Option<Bytes>, made: &CreatedSandbox) {
        let when = idempotency::when(made.sandbox.created);
        let answer = match noted {
            Some(noted) => noted,
            None => {
                let Ok(answer) = serde_json::to_vec(made) else {
                    return;
                };
                self.note_answer(&made.sandbox.id, &answer);
                answer.into()
            }
        };
        self.answers.restore(asked, answer, when);
    }
}

/// Adopts a sandbox with the images it was created from, which the configuration may no longer name.
async fn adopt(
    tenants: &Tenants,
    record: Record,
    mut directory: SandboxDirectory,
) -> Result<(Node, Sandbox), NotAdopted> {
    let node = match tenants.with_stock(record.stock.as_ref()).await {
        Ok(node) => node,
        Err(e) => {
            directory.keep();
            return Err(NotAdopted::Left(e));
        }
    };
    let sandbox = Sandbox::adopt(&node, record, directory).await?;
    Ok((node, sandbox))
}

/// The sandboxes without an owner in a run directory, now owned by this process; oldest first.
fn orphans(run: &RunDirectory, cgroups: &Hierarchy) -> Vec<Orphan> {
    let mut adopted = run.adopt(cgroups);
    adopted.sort_by_key(|(record, _)| record.created);
    let mut all: Vec<Orphan> = adopted
        .into_iter()
        .map(|(record, directory)| Orphan {
            answer: idempotency::noted(directory.path()),
            is_whole: true,
            record,
            directory,
        })
        .collect();
    // The clones of a fork share one answer, which is written once all of them exist.
    let answered: HashMap<(u64, String), Bytes> = all
        .iter()
        .filter_map(|orphan| Some((key(orphan.record.terms.asked.as_ref()?), orphan.answer.clone()?)))
        .collect();
    for orphan in &mut all {
        if let Some(asked) = &orphan.record.terms.asked {
            orphan.answer = answered.get(&key(asked)).cloned();
            orphan.is_whole = asked.ready_is_all || orphan.answer.is_some();
        }
    }
    all
}

fn key(asked: &Asked) -> (u64, String) {
    (asked.client, asked.key.clone())
}
