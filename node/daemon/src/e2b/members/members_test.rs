use std::io::Write;

use super::*;

fn key() -> tempfile::NamedTempFile {
    let mut key = tempfile::NamedTempFile::new().unwrap();
    key.write_all(&[b'k'; 32]).unwrap();
    key
}

/// Nodes on the loopback, at ports that count from 1.
fn config(key: &tempfile::NamedTempFile, own: &str, names: &[&str]) -> ClusterConfig {
    let urls = names.iter().zip(1..);
    ClusterConfig {
        node: Some(own.into()),
        key: key.path().to_owned(),
        nodes: urls
            .map(|(name, port)| ((*name).into(), format!("http://127.0.0.1:{port}")))
            .collect(),
        ..ClusterConfig::default()
    }
}

fn others(members: &Members) -> Vec<String> {
    members
        .others()
        .iter()
        .map(|member| member.name.clone())
        .collect()
}

#[test]
fn id_leads_to_its_node_while_that_is_a_member() {
    let key = key();
    let (members, _) = Members::open(&config(&key, "b", &["a", "b", "c"])).unwrap();
    assert_eq!(others(&members), ["a", "c"]);
    let owner = |name: &str| members.owner(Some(Tag::of(name)));
    assert!(matches!(members.owner(None), Owner::Here));
    assert!(matches!(owner("b"), Owner::Here));
    assert!(matches!(owner("c"), Owner::Other(member) if member.name == "c"));
    assert!(matches!(owner("d"), Owner::Gone));
    members.reload(&config(&key, "b", &["b", "d"])).unwrap();
    assert_eq!(others(&members), ["d"]);
    assert!(matches!(owner("c"), Owner::Gone));
    assert!(members.reload(&config(&key, "b", &["a"])).is_err());
    assert_eq!(others(&members), ["d"], "a wrong list changes nothing");
}

#[test]
fn node_has_sandboxes_of_members_only_if_they_are_copied() {
    let key = key();
    let mut config = config(&key, "a", &["a", "b", "c"]);
    for (is_copied, registry) in [(false, None), (true, Some("registry.example/paused"))] {
        config.paused_registry = registry.map(str::to_owned);
        let (members, _) = Members::open(&config).unwrap();
        let may_b_have = |home| members.may_have(Tag::of("b"), Tag::of(home));
        assert!(may_b_have("b") && may_b_have("gone"));
        for home in ["a", "c"] {
            assert_eq!(may_b_have(home), is_copied, "{home}");
        }
    }
}

#[test]
fn membership_lasts_while_a_node_keeps_its_address() {
    let key = key();
    let (members, _) = Members::open(&config(&key, "b", &["a", "b", "c"])).unwrap();
    let of_all = |members: &Members| -> Vec<_> {
        let others = members.others();
        others.iter().map(|member| member.destination().during).collect()
    };
    let before = of_all(&members);
    members.reload(&config(&key, "b", &["a", "b", "d"])).unwrap();
    let after = of_all(&members);
    assert!(before[0] == after[0] && !before[0].is_over());
    assert!(before[1].is_over() && !after[1].is_over());
    members.reload(&config(&key, "b", &["b", "a", "d"])).unwrap();
    assert!(after[0].is_over(), "its address is another");
}

#[test]
fn wrong_configuration_is_refused() {
    let (key, short) = (key(), tempfile::NamedTempFile::new().unwrap());
    let good = config(&key, "a", &["a", "b"]);
    let with = |change: &dyn Fn(&mut ClusterConfig)| {
        let mut config = good.clone();
        change(&mut config);
        config
    };
    let slices = thaw_sandbox::config::e2b::EndpointSlicesConfig {
        service: "thaw".into(),
        namespace: None,
        port: "e2b".into(),
        server_name: "node.example".into(),
    };
    let many = |config: &mut ClusterConfig| {
        let url = |n| (format!("n{n}"), "http://127.0.0.1:1".to_owned());
        config.nodes.extend((0..MOST).map(url));
    };
    for (config, word) in [
        (with(&|c| c.node = Some("c".into())), "\"c\""),
        (with(&|c| c.node = Some("a b".into())), "a b"),
        (with(&|c| c.nodes.clear()), "nodes"),
        (with(&many), "at most"),
        (
            with(&|c| drop(c.nodes.insert("b".into(), "https://b.example".into()))),
            "ca",
        ),
        (
            with(&|c| drop(c.nodes.insert("b".into(), "b.example".into()))),
            "b.example",
        ),
        (with(&|c| c.ca = Some("/nowhere.pem".into())), "/nowhere.pem"),
        (with(&|c| c.key = "/nowhere".into()), "/nowhere"),
        (with(&|c| c.key = short.path().to_owned()), "32"),
        (with(&|c| c.endpoint_slices = Some(slices.clone())), "both"),
        (
            with(&|c| {
                c.nodes.clear();
                c.endpoint_slices = Some(slices.clone());
            }),
            "ca",
        ),
        (
            with(&|c| c.paused_registry = Some("registry.example/p:tag".into())),
            "p:tag",
        ),
        (with(&|c| c.paused_registry = Some("paused".into())), "\"paused\""),
        (
            with(&|c| c.paused_registry = Some("oci:/paused/x".into())),
            "oci:",
        ),
    ] {
        let refused = Members::open(&config).err().unwrap();
        assert_eq!(refused.kind, ErrorKind::ConfigInvalid, "{word}");
        assert!(refused.to_string().contains(word), "{word}: {refused}");
    }
    assert!(Members::open(&good).is_ok());
}

#[test]
fn secret_is_the_same_on_all_nodes_and_proves_one() {
    let (key, mut other) = (key(), tempfile::NamedTempFile::new().unwrap());
    other.write_all(&[b'o'; 32]).unwrap();
    let open = |key, own| Members::open(&config(key, own, &["a", "b"])).unwrap();
    let ((a, of_a), (b, of_b)) = (open(&key, "a"), open(&key, "b"));
    let (stranger, of_stranger) = open(&other, "b");
    for step in [Step::First, Step::Last] {
        assert_eq!(b.step(a.proof.mark(step)), Some(step));
        assert_eq!(b.step(stranger.proof.mark(step)), None);
    }
    for wrong in ["", "x", &"0".repeat(64)] {
        assert_eq!(b.step(&HeaderValue::try_from(wrong).unwrap()), None, "{wrong}");
    }
    let token = of_a.access_token("0123456789ab");
    assert!(of_b.check("0123456789ab", &token) && !of_stranger.check("0123456789ab", &token));
}

#[test]
fn members_of_kubernetes_have_distinct_tags() {
    let endpoint = || Endpoint::parse("http://127.0.0.1:1", None).unwrap();
    let mut endpoints = BTreeMap::from([("own".to_owned(), endpoint()), ("a".to_owned(), endpoint())]);
    let twin = (0..)
        .map(|n| format!("t{n}"))
        .find(|name| Tag::of(name) == Tag::of("a"));
    endpoints.insert(twin.unwrap(), endpoint());
    let members = distinct(endpoints, "own");
    assert_eq!(
        members
            .iter()
            .map(|member| member.name.as_str())
            .collect::<Vec<_>>(),
        ["a"]
    );
    let many = (0..100).map(|n| (format!("n{n}"), endpoint())).collect();
    assert!(distinct(many, "own").len() < MOST);
}
