use axum::body::Body;

use super::*;

fn tenant(name: &str) -> Tenant {
    name.parse().unwrap()
}

fn hash(digit: char) -> String {
    digit.to_string().repeat(64)
}

fn body(text: &'static str) -> BodyDataStream {
    Body::from(text).into_data_stream()
}

fn files(root: &Path) -> usize {
    let tenants = fs::read_dir(root).unwrap().flatten();
    tenants
        .map(|tenant| fs::read_dir(tenant.path()).unwrap().count())
        .sum()
}

#[tokio::test]
async fn archive_is_of_one_tenant() {
    let data = tempfile::tempdir().unwrap();
    let uploads = Uploads::open(data.path().join("uploads")).unwrap();
    let (acme, other) = (tenant("acme"), tenant("other"));
    assert!(uploads.find(Some(&acme), &hash('a')).await.is_none());
    uploads
        .receive(Some(&acme), &hash('a'), 3, body("one"))
        .await
        .unwrap();
    uploads
        .receive(Some(&acme), &hash('a'), 3, body("two"))
        .await
        .unwrap();
    let found = uploads.find(Some(&acme), &hash('a')).await.unwrap();
    assert_eq!(fs::read(found).unwrap(), b"two");
    assert!(uploads.find(Some(&other), &hash('a')).await.is_none());
    assert!(uploads.find(None, &hash('a')).await.is_none());
    assert!(uploads.find(Some(&acme), "../acme").await.is_none());
}

#[tokio::test]
async fn upload_that_breaks_off_leaves_nothing() {
    let data = tempfile::tempdir().unwrap();
    let uploads = Uploads::open(data.path().join("uploads")).unwrap();
    for (length, text) in [(4, "one"), (2, "one"), (MAX_ARCHIVE + 1, "one")] {
        let received = uploads.receive(None, &hash('a'), length, body(text)).await;
        assert!(received.is_err(), "{length}");
    }
    let broken = Body::from_stream(futures_util::stream::iter([Err::<&[u8], _>(io::Error::other(
        "gone",
    ))]));
    let received = uploads
        .receive(None, &hash('a'), 1, broken.into_data_stream())
        .await;
    assert!(received.is_err());
    assert!(uploads.receive(None, "x", 1, body("x")).await.is_err());
    assert_eq!(files(&uploads.root), 0);
    assert!(uploads.receiving.lock().unwrap().is_empty());
}

#[tokio::test]
async fn uploads_of_a_tenant_are_bounded() {
    let data = tempfile::tempdir().unwrap();
    let uploads = Uploads::open(data.path().join("uploads")).unwrap();
    let directory = uploads.directory(None);
    let places: Vec<_> = (0..MOST_AT_ONCE)
        .map(|_| uploads.enter(&directory, 1).unwrap())
        .collect();
    let refused = uploads.receive(None, &hash('a'), 1, body("x")).await.unwrap_err();
    assert!(matches!(
        refused,
        Failure::Refused(Refusal::Api(ApiCode::TooMany, _))
    ));
    let other = tenant("other");
    uploads
        .receive(Some(&other), &hash('a'), 1, body("x"))
        .await
        .unwrap();
    drop(places);
    let file = uploads.directory(Some(&other)).join(hash('b'));
    File::create(&file).unwrap().set_len(MAX_OF_TENANT).unwrap();
    let refused = uploads.receive(Some(&other), &hash('c'), 1, body("x")).await;
    assert!(matches!(refused, Err(Failure::Conflict(_))), "{refused:?}");
}

#[tokio::test]
async fn old_archives_and_parts_of_a_dead_thawd_go() {
    let data = tempfile::tempdir().unwrap();
    let root = data.path().join("uploads");
    let uploads = Uploads::open(root.clone()).unwrap();
    for digit in ['a', 'b'] {
        uploads.receive(None, &hash(digit), 1, body("x")).await.unwrap();
    }
    let part = uploads.directory(None).join("part-0123456789ab");
    fs::write(&part, "x").unwrap();
    let old = File::options()
        .append(true)
        .open(uploads.directory(None).join(hash('a')));
    old.unwrap().set_modified(SystemTime::now() - 2 * KEPT).unwrap();
    uploads.expire().await;
    assert_eq!(files(&root), 2, "a part may be in use");
    assert!(uploads.find(None, &hash('b')).await.is_some());
    Uploads::open(root.clone()).unwrap();
    assert_eq!((files(&root), part.exists()), (1, false));
}
