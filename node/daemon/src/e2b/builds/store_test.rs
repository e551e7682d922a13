use super::*;

fn tenant() -> Option<Tenant> {
    Some("acme".parse().unwrap())
}

fn default() -> Vec<String> {
    vec!["default".into()]
}

#[tokio::test]
async fn templates_survive_thawd_and_open_builds_fail() {
    let data = tempfile::tempdir().unwrap();
    let root = data.path().join("templates");
    let store = TemplateStore::open(root.clone()).unwrap();
    let (template, build) = store
        .request(tenant(), "web", default(), Shape::default())
        .await
        .unwrap();
    let (same, other) = store
        .request(tenant(), "web", default(), Shape::default())
        .await
        .unwrap();
    assert_eq!((&same.id, same.builds.len()), (&template.id, 2));
    assert!(
        build != other && build.len() == 36 && build.as_bytes()[14] == b'4',
        "{build}"
    );
    let built = super::super::record::Built {
        snapshot: "s".into(),
        key: None,
        machine: Shape::default(),
        context: Default::default(),
    };
    let complete = |template: &mut Template| {
        template.complete(&build, built, 7);
        Ok(())
    };
    store.change(&template.id, complete).await.unwrap();
    assert!(store.needs("s", None) && !store.needs("t", None) && store.needs("t", Some(&other)));
    fs::create_dir(root.join("left")).unwrap();
    let again = TemplateStore::open(root.clone()).unwrap();
    assert!(again.is_whole());
    let found = again.find("web", &template.owner()).unwrap();
    assert_eq!(
        found.build(&build),
        store.find("web", &template.owner()).unwrap().build(&build)
    );
    let failed = found.build(&other).unwrap();
    assert_eq!((failed.status, failed.reason.is_some()), (Status::Error, true));
    assert!(!root.join("left").exists());
    again.remove(&template.id).await.unwrap();
    assert_eq!(fs::read_dir(&root).unwrap().count(), 0);
    assert!(again.change(&template.id, |_| Ok(())).await.is_err());
}

#[tokio::test]
async fn change_that_fails_changes_nothing() {
    let data = tempfile::tempdir().unwrap();
    let store = TemplateStore::open(data.path().to_owned()).unwrap();
    let (template, _) = store
        .request(tenant(), "web", default(), Shape::default())
        .await
        .unwrap();
    let edit = |template: &mut Template| {
        template.public = true;
        Err::<(), _>(Failure::Bad("no".into()))
    };
    assert!(store.change(&template.id, edit).await.is_err());
    assert!(!store.find(&template.id, &template.owner()).unwrap().public);
}

#[tokio::test]
async fn templates_and_open_builds_are_bounded() {
    let data = tempfile::tempdir().unwrap();
    let store = TemplateStore::open(data.path().to_owned()).unwrap();
    for n in 0..MAX_TEMPLATES {
        store
            .request(tenant(), &n.to_string(), default(), Shape::default())
            .await
            .unwrap();
    }
    let more = store.request(tenant(), "more", default(), Shape::default()).await;
    assert!(matches!(more, Err(Failure::Conflict(_))), "{more:?}");
    store
        .request(None, "more", default(), Shape::default())
        .await
        .unwrap();
    for _ in 1..MAX_BUILDS / 2 {
        store
            .request(tenant(), "0", default(), Shape::default())
            .await
            .unwrap();
    }
    let more = store.request(tenant(), "0", default(), Shape::default()).await;
    assert!(matches!(more, Err(Failure::Conflict(_))), "{more:?}");
}

#[tokio::test]
async fn build_that_is_not_started_in_time_fails() {
    let data = tempfile::tempdir().unwrap();
    let store = TemplateStore::open(data.path().to_owned()).unwrap();
    let request = || store.request(tenant(), "web", default(), Shape::default());
    let (template, old) = request().await.unwrap();
    let age = |template: &mut Template| {
        template.builds[0].created -= 2 * MAX_WAIT_S;
        Ok(())
    };
    store.change(&template.id, age).await.unwrap();
    let (_, new) = request().await.unwrap();
    let (template, _) = request().await.unwrap();
    let status = |build: &str| template.build(build).unwrap().status;
    assert_eq!((status(&old), status(&new)), (Status::Error, Status::Waiting));
}

#[test]
fn record_that_cannot_be_read_is_kept() {
    let data = tempfile::tempdir().unwrap();
    let record = data.path().join("0123456789abcdef0123").join(RECORD);
    fs::create_dir(record.parent().unwrap()).unwrap();
    fs::write(&record, "{").unwrap();
    fs::write(data.path().join("stray"), "").unwrap();
    let store = TemplateStore::open(data.path().to_owned()).unwrap();
    assert!(store.all().is_empty() && !store.is_whole() && record.exists());
}

#[tokio::test]
async fn log_goes_with_its_build() {
    let data = tempfile::tempdir().unwrap();
    let store = TemplateStore::open(data.path().to_owned()).unwrap();
    let (template, build) = store
        .request(tenant(), "web", default(), Shape::default())
        .await
        .unwrap();
    let entry = Entry {
        timestamp: "t".into(),
        message: "m".into(),
        level: super::super::log::Level::Info,
        step: "base".into(),
    };
    store.keep_log(&template.id, &build, vec![entry.clone()]).await;
    assert_eq!(store.log(&template.id, &build).await, [entry]);
    fs::write(log_file(&data.path().join(&template.id), "gone"), "x").unwrap();
    store.keep_log(&template.id, &build, Vec::new()).await;
    assert!(store.log(&template.id, &build).await.is_empty());
    assert!(!log_file(&data.path().join(&template.id), "gone").exists());
    store.keep_log("gone", &build, Vec::new()).await;
    assert!(!data.path().join("gone").exists());
}
