use std::sync::Arc;

use thaw_sandbox::state::Behalf;

use super::*;
use crate::api::fake::{Fake, request};
use crate::api::scope::Wanted;

/// A daemon with a sandbox.
async fn with_sandbox() -> (Arc<Fake>, Arc<Daemon>, Wanted) {
    let (fake, daemon) = Fake::daemon(true);
    let made = daemon.create(request("x"), Behalf::default()).await.unwrap();
    let wanted = Wanted::on_node(&made.sandbox.id);
    (fake, daemon, wanted)
}

#[tokio::test]
async fn pause_interrupts_a_sandbox() {
    let (_fake, daemon, wanted) = with_sandbox().await;
    let now = || daemon.uninterrupted(&wanted.text);
    let running = now().unwrap();
    assert!(!running.is_over() && now() == Some(running.clone()));
    daemon.pause(&wanted).await.unwrap();
    assert!(running.is_over());
    daemon.resume(&wanted).await.unwrap();
    assert!(now().is_some_and(|again| again != running && !again.is_over()));
}

#[tokio::test]
async fn release_of_memory_and_end_interrupt_a_sandbox() {
    let (_fake, daemon, wanted) = with_sandbox().await;
    let now = || daemon.uninterrupted(&wanted.text);
    let first = now().unwrap();
    daemon.release_memory(&wanted).await.unwrap();
    assert!(first.is_over() && now().is_none());
    daemon.resume(&wanted).await.unwrap();
    let second = now().unwrap();
    assert!(!second.is_over());
    daemon.delete(&wanted).await.unwrap();
    assert!(second.is_over() && now().is_none());
}
