use futures_util::poll;

use super::*;

fn bounds(running: usize, of_one: usize, waiting: usize) -> Bounds {
    let share = Share {
        running,
        of_one,
        waiting,
    };
    Bounds {
        running: 2 * running,
        create: share,
        read: share,
        change: share,
        watch: Share { waiting: 0, ..share },
        exec: Share { waiting: 0, ..share },
    }
}

fn is_full(entered: Result<Permit, Refusal>) -> bool {
    matches!(entered, Err(Refusal::Api(ApiCode::TooMany, _)))
}

#[tokio::test]
async fn clients_are_served_in_turn_however_much_one_asks() {
    let gate = Gate::new(bounds(1, 1, 10));
    let running = gate.enter(0, Verb::Read).await.unwrap();
    let mut greedy: Vec<_> = (0..10).map(|_| Box::pin(gate.enter(1, Verb::Read))).collect();
    for waits in &mut greedy {
        assert!(poll!(waits).is_pending());
    }
    let mut modest = Box::pin(gate.enter(2, Verb::Read));
    assert!(poll!(&mut modest).is_pending());
    assert!(is_full(gate.enter(1, Verb::Read).await));
    drop(running);
    let Poll::Ready(first) = poll!(&mut greedy[0]) else {
        panic!("the first in line")
    };
    assert!(poll!(&mut modest).is_pending());
    drop(first);
    assert!(poll!(&mut greedy[1]).is_pending(), "it had its turn");
    assert!(modest.await.is_ok());
}

#[tokio::test]
async fn one_client_leaves_room_for_another() {
    let gate = Gate::new(bounds(3, 2, 1));
    let _running = [
        gate.enter(1, Verb::Create).await.unwrap(),
        gate.enter(1, Verb::Create).await.unwrap(),
    ];
    let mut third = Box::pin(gate.enter(1, Verb::Create));
    assert!(poll!(&mut third).is_pending());
    assert!(gate.enter(2, Verb::Create).await.is_ok());
}

#[tokio::test]
async fn requests_are_bounded_in_total_and_watches_separately() {
    let gate = Gate::new(bounds(2, 2, 0));
    let mut running = Vec::new();
    for verb in [Verb::Create, Verb::Create, Verb::Read, Verb::Read] {
        running.push(gate.enter(1, verb).await.unwrap());
    }
    assert!(is_full(gate.enter(1, Verb::Change).await));
    let watch = gate.enter(1, Verb::Watch).await.unwrap();
    let _other = gate.enter(1, Verb::Watch).await.unwrap();
    assert!(is_full(gate.enter(1, Verb::Watch).await));
    drop(watch);
    assert!(gate.enter(1, Verb::Watch).await.is_ok());
    running.clear();
    assert!(gate.enter(1, Verb::Change).await.is_ok());
}

#[tokio::test]
async fn who_gives_up_neither_holds_a_place_nor_is_remembered() {
    let gate = Gate::new(bounds(1, 1, 2));
    let running = gate.enter(1, Verb::Read).await.unwrap();
    for _ in 0..10 {
        let mut gives_up = Box::pin(gate.enter(1, Verb::Read));
        assert!(poll!(&mut gives_up).is_pending());
    }
    let mut stays = Box::pin(gate.enter(1, Verb::Read));
    assert!(poll!(&mut stays).is_pending());
    drop(running);
    // The permit was granted, but its caller left before it took it.
    drop(stays);
    assert!(gate.enter(2, Verb::Read).await.is_ok());
    let lanes = gate.lanes();
    assert_eq!(lanes.running, 0);
    assert!(
        lanes
            .lanes
            .iter()
            .all(|l| l.clients.is_empty() && l.turns.is_empty() && l.running == 0)
    );
}

#[tokio::test]
async fn whatever_is_asked_in_whatever_order_ends() {
    let gate = Gate::new(bounds(3, 2, 50));
    let mut asking = tokio::task::JoinSet::new();
    for i in 0..300u32 {
        let gate = gate.clone();
        asking.spawn(async move {
            let permit = gate.enter((i % 6).into(), VERBS[i as usize % 3]).await?;
            tokio::task::yield_now().await;
            drop(permit);
            Ok::<_, Refusal>(())
        });
    }
    while let Some(ended) = asking.join_next().await {
        ended.unwrap().unwrap();
    }
    assert_eq!(gate.lanes().running, 0);
}

#[test]
fn each_request_has_its_lane() {
    for (method, path, lane) in [
        ("POST", "/v1/sandboxes", Verb::Create),
        ("POST", "/v1/thaws", Verb::Create),
        ("POST", "/v1/sandboxes/x/fork", Verb::Create),
        ("POST", "/v1/sandboxes/x/exec", Verb::Exec),
        ("GET", "/v1/sandboxes/x/exec", Verb::Exec),
        ("GET", "/v1/sandboxes/x/files?path=/a", Verb::Exec),
        ("GET", "/v1/sandboxes/x/logs", Verb::Read),
        ("GET", "/v1/sandboxes/x/logs?tail=1&follow=1", Verb::Watch),
        ("GET", "/v1/sandboxes?watch=true", Verb::Watch),
        ("GET", "/v1/sandboxes?wa%74ch=%31", Verb::Watch),
        ("GET", "/v1/sandboxes?labelSelector=watch%3D1", Verb::Read),
        ("GET", "/v1/sandboxes/x/logs?tail=1&follow=tru%65", Verb::Watch),
        ("GET", "/v1/sandboxes", Verb::Read),
        ("GET", "/v1/sandboxes/x/files/watch?path=/", Verb::Watch),
        ("GET", "/v1/sandboxes/x/exit", Verb::Watch),
        ("POST", "/v1/sandboxes/x/restart", Verb::Exec),
        ("DELETE", "/v1/images/exec", Verb::Change),
        ("POST", "/v1/images", Verb::Change),
    ] {
        let request = Request::builder().method(method).uri(path);
        assert_eq!(
            verb(&request.body(Body::empty()).unwrap()),
            lane,
            "{method} {path}"
        );
    }
}
