use super::*;

/// A template without builds.
fn template() -> Template {
    Template {
        id: "0123456789abcdef0123".into(),
        tenant: Some("acme".parse().unwrap()),
        name: "web".into(),
        public: false,
        created: 1,
        updated: 1,
        tags: BTreeMap::new(),
        builds: Vec::new(),
    }
}

fn build(id: &str, tags: &[&str]) -> Build {
    Build {
        id: id.into(),
        status: Status::Waiting,
        tags: tags.iter().map(|tag| (*tag).to_owned()).collect(),
        machine: Shape::default(),
        created: 1,
        updated: 1,
        finished: None,
        snapshot: None,
        key: None,
        context: Context::default(),
        reason: None,
    }
}

fn built(snapshot: &str) -> Built {
    Built {
        snapshot: snapshot.into(),
        key: Some("k".into()),
        machine: Shape::default(),
        context: Context::default(),
    }
}

#[test]
fn tag_moves_to_the_build_that_is_ready_last() {
    let mut template = template();
    template.builds = vec![build("a", &["default", "v1"]), build("b", &["default"])];
    template.complete("a", built("s1"), 5);
    assert_eq!(template.tagged("default").unwrap().id, "a");
    template.complete("b", built("s2"), 6);
    assert_eq!(template.tagged("default").unwrap().id, "b");
    assert_eq!(
        (
            template.tagged("v1").unwrap().id.as_str(),
            template.snapshots().count()
        ),
        ("a", 2)
    );
    // Without a tag no sandbox can be made from it.
    template.tags.remove("v1");
    template.tidy();
    assert_eq!(template.snapshots().collect::<Vec<_>>(), ["s2"]);
    assert_eq!(template.build("a").unwrap().status, Status::Ready);
    assert_eq!(
        (template.newest().unwrap().id.as_str(), template.updated),
        ("b", 6)
    );
}

#[test]
fn surplus_builds_go_but_not_those_in_use() {
    let mut template = template();
    template.builds = (0..MAX_BUILDS + 5)
        .map(|n| build(&n.to_string(), &["default"]))
        .collect();
    template.complete("0", built("s"), 2);
    for n in 2..5 {
        template.build_mut(&n.to_string()).unwrap().status = Status::Error;
    }
    template.tidy();
    let left: Vec<_> = template.builds.iter().map(|build| build.id.as_str()).collect();
    assert_eq!((left.len(), &left[..3]), (MAX_BUILDS + 2, &["0", "1", "5"][..]));
}

#[test]
fn template_exists_for_its_tenant_and_administrators() {
    let mut template = template();
    let viewer = |tenant: Option<&str>, is_node| Viewer {
        tenant: tenant.map(|tenant| tenant.parse().unwrap()),
        is_node,
    };
    assert!(template.exists_for(&viewer(Some("acme"), false)));
    assert!(template.exists_for(&Viewer::node()));
    assert!(!template.exists_for(&viewer(Some("other"), false)));
    assert_eq!(template.owner(), viewer(Some("acme"), false));
    template.tenant = None;
    assert!(!template.exists_for(&viewer(None, false)));
    assert!(template.owner().is_node);
}
