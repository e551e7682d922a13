use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

async fn ask(answers: &Answers, key: &str, request: &str, now: Instant) -> Result<Bytes, Refusal> {
    static MADE: AtomicUsize = AtomicUsize::new(0);
    let make = || async { Ok(MADE.fetch_add(1, Ordering::Relaxed).to_string().into()) };
    answers.once(&asked(0, key, request), now, make).await
}

fn asked(client: u64, key: &str, request: &str) -> Asked {
    Asked {
        client,
        share: client,
        key: key.into(),
        request: Hash::of(request.as_bytes()),
        ready_is_all: true,
    }
}

#[tokio::test]
async fn one_key_is_one_answer_until_it_expires() {
    let (answers, now) = (Answers::default(), Instant::now());
    let first = ask(&answers, "k", "r", now).await.unwrap();
    assert_eq!(ask(&answers, "k", "r", now).await.unwrap(), first);
    assert_ne!(ask(&answers, "other", "r", now).await.unwrap(), first);
    let reused = ask(&answers, "k", "another", now).await.unwrap_err();
    assert!(matches!(reused, Refusal::Api(ApiCode::KeyReused, _)));
    let almost = now + KEPT - Duration::from_secs(1);
    assert_eq!(ask(&answers, "k", "r", almost).await.unwrap(), first);
    assert_ne!(ask(&answers, "k", "another", now + KEPT).await.unwrap(), first);
    assert_eq!(answers.table().entries.len(), 1);
}

#[tokio::test]
async fn another_clients_key_is_another_key() {
    let (answers, now) = (Answers::default(), Instant::now());
    for client in [1, 2] {
        let make = || async move { Ok(client.to_string().into()) };
        let answer = answers.once(&asked(client, "k", "r"), now, make).await.unwrap();
        assert_eq!(answer, client.to_string());
    }
}

#[tokio::test]
async fn what_failed_or_was_given_up_is_not_remembered() {
    let (answers, now) = (Answers::default(), Instant::now());
    let (k, x) = (asked(0, "k", "r"), asked(0, "x", "r"));
    let fail = || async { Err(Refusal::new(ApiCode::Broken, "no")) };
    answers.once(&k, now, fail).await.unwrap_err();
    assert!(answers.table().entries.is_empty());

    let mut given_up = Box::pin(answers.once(&k, now, std::future::pending));
    assert!(futures_util::poll!(&mut given_up).is_pending());
    let mut waits = Box::pin(ask(&answers, "k", "r", now));
    assert!(
        futures_util::poll!(&mut waits).is_pending(),
        "it waits for who makes it"
    );
    drop(given_up);
    waits.await.unwrap();

    let mut given_up = Box::pin(answers.once(&x, now, std::future::pending));
    assert!(futures_util::poll!(&mut given_up).is_pending());
    drop(given_up);
    assert_eq!(answers.table().entries.len(), 1, "only what has an answer");
}

#[tokio::test]
async fn memory_is_bounded_by_keys_and_by_bytes() {
    let (answers, now) = (Answers::default(), Instant::now());
    for i in 0..MOST + 10 {
        ask(&answers, &i.to_string(), "r", now).await.unwrap();
    }
    assert_eq!(answers.table().entries.len(), MOST);
    let large = || async { Ok(vec![0; MOST_BYTES / 2].into()) };
    for i in 0..4 {
        let asked = asked(1, &i.to_string(), "r");
        answers.once(&asked, now, large).await.unwrap();
        let table = answers.table();
        assert!(
            table.held.values().sum::<usize>() <= MOST_BYTES && table.entries.len() == table.answered.len()
        );
    }
}

#[tokio::test]
async fn no_tenant_makes_anothers_keys_forgotten() {
    let (answers, now) = (Answers::default(), Instant::now());
    let first = ask(&answers, "k", "r", now).await.unwrap();
    for i in 0..MOST + 10 {
        let none = || async { Ok(Bytes::new()) };
        answers
            .once(&asked(1, &i.to_string(), "r"), now, none)
            .await
            .unwrap();
    }
    for i in 0..8 {
        let large = || async { Ok(vec![0; MOST_BYTES / 4 - 100].into()) };
        answers
            .once(&asked(2, &i.to_string(), "r"), now, large)
            .await
            .unwrap();
    }
    assert_eq!(ask(&answers, "k", "r", now).await.unwrap(), first);
    let table = answers.table();
    assert!(table.answered.len() <= MOST);
    let held: BTreeMap<_, _> = table.held.iter().collect();
    assert_eq!(held.keys().copied().collect::<Vec<_>>(), [&0, &1, &2], "{held:?}");
}

#[tokio::test]
async fn answer_of_an_earlier_thawd_is_repeated_until_it_expires() {
    let (answers, now) = (Answers::default(), Instant::now());
    answers.restore(&asked(0, "k", "r"), "first".into(), now);
    // A second clone of the same fork.
    answers.restore(&asked(0, "k", "r"), "second".into(), now);
    assert_eq!(ask(&answers, "k", "r", now).await.unwrap(), "first");
    let reused = ask(&answers, "k", "another", now).await.unwrap_err();
    assert!(matches!(reused, Refusal::Api(ApiCode::KeyReused, _)));
    assert_eq!(answers.table().answered.len(), 1);
    assert_ne!(ask(&answers, "k", "r", now + KEPT).await.unwrap(), "first");
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(noted(directory.path()), None);
    note(directory.path(), b"answer").unwrap();
    assert_eq!(noted(directory.path()).unwrap(), "answer");
}
