use serde_json::json;

use super::*;
use crate::api::fake::copies::Trouble;
use crate::api::test_client::until;
use crate::e2b::cluster::test_nodes::nodes;
use crate::e2b::whole_id::WholeId;

#[test]
fn failed_copy_is_tried_again_ever_later() {
    let (mut tries, mut now) = (Tries::default(), Instant::now());
    for minutes in [1, 2, 4, 8, 16, 32, 60, 60] {
        assert!(tries.is_due("a", now));
        tries.begin("a", 1);
        assert!(!tries.is_due("a", now), "it is running");
        tries.end("a", Ended::Failed, now);
        let pause = Duration::from_secs(60 * minutes);
        assert!(!tries.is_due("a", now + pause - Duration::from_secs(1)));
        now += pause;
    }
    tries.retain(&[("a", 1)].into());
    assert_eq!(tries.0["a"].failures, 8);
    tries.retain(&[("a", 2)].into());
    assert!(tries.0.is_empty(), "it has changed");
}

#[test]
fn copy_that_ended_is_made_again_of_a_changed_sandbox() {
    let (mut tries, now) = (Tries::default(), Instant::now());
    let later = now + Duration::from_secs(1 << 20);
    for ended in [Ended::Made, Ended::Refused] {
        tries.begin("a", 1);
        tries.retain(&[("a", 2)].into());
        assert!(!tries.is_due("a", later), "it is running");
        tries.end("a", ended, now);
        tries.retain(&[("a", 1)].into());
        assert!(!tries.is_due("a", later), "{ended:?}");
        tries.retain(&[("a", 2)].into());
        assert!(tries.is_due("a", now), "{ended:?}");
    }
}

#[tokio::test]
async fn copy_that_hangs_or_is_refused_holds_up_no_other() {
    let nodes = nodes(&[8, 8]).await;
    let copies = nodes[1].api.fake.copies.lock().unwrap().clone();
    let mut made = Vec::new();
    for _ in 0..5 {
        let id = nodes[1].make_here().await;
        let pause = format!("/sandboxes/{id}/pause");
        nodes[1].ask("POST", &pause, json!({})).await.ok(204);
        made.push(id);
    }
    let short = |id: &str| WholeId::parse(id).unwrap().id;
    copies.trouble(&short(&made[0]), Trouble::Hangs);
    copies.trouble(&short(&made[1]), Trouble::Refused);
    let copying = tokio::spawn(keep_copied(nodes[1].api.service.clone()));
    let are_copied = || {
        let mut others = made[2..].iter();
        others.all(|id| copies.has(&format!("registry.example/paused:{id}")))
    };
    until(are_copied).await;
    assert_eq!(copies.tries(&short(&made[1])), 1);
    copying.abort();
}
