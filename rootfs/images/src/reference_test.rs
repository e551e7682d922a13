use proptest::prelude::*;

use super::*;

const HEX: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

#[test]
fn short_names_mean_docker_hub() {
    for (text, canonical) in [
        ("busybox", "docker.io/library/busybox:latest"),
        ("busybox:1.36", "docker.io/library/busybox:1.36"),
        ("grafana/grafana", "docker.io/grafana/grafana:latest"),
        ("index.docker.io/busybox", "docker.io/library/busybox:latest"),
        ("docker.io/busybox", "docker.io/library/busybox:latest"),
        ("host:5000/name:tag", "host:5000/name:tag"),
        ("localhost/a/b", "localhost/a/b:latest"),
        ("127.0.0.1:5000/x", "127.0.0.1:5000/x:latest"),
        ("[::1]:5000/x:y", "[::1]:5000/x:y"),
        ("ghcr.io/a/b__c.d-e--f:V1_2", "ghcr.io/a/b__c.d-e--f:V1_2"),
        ("oci:/images/busybox", "oci:/images/busybox"),
        ("oci:rel/dir:v1", "oci:rel/dir:v1"),
        (
            "docker-archive:/x.tar:busybox:latest",
            "docker-archive:/x.tar:busybox:latest",
        ),
    ] {
        assert_eq!(text.parse::<ImageRef>().unwrap().to_string(), canonical);
    }
}

#[test]
fn a_digest_needs_no_tag_and_wins_over_one() {
    let ImageRef::Registry(plain) = format!("busybox@sha256:{HEX}").parse().unwrap() else {
        panic!()
    };
    assert_eq!(
        (plain.tag.as_deref(), plain.version()),
        (None, format!("sha256:{HEX}"))
    );
    let ImageRef::Registry(both) = format!("busybox:1@sha256:{HEX}").parse().unwrap() else {
        panic!()
    };
    assert_eq!(
        (both.tag.as_deref(), both.version()),
        (Some("1"), format!("sha256:{HEX}"))
    );
}

#[test]
fn what_is_no_reference_is_refused_with_the_reason() {
    for (text, reason) in [
        ("", "empty"),
        ("oci:", "path is empty"),
        ("oci:dir:", "tag is empty"),
        ("docker-archive::tag", "path is empty"),
        ("Busybox", "lower-case"),
        ("a//b", "parts joined"),
        ("busybox:", "a tag has"),
        ("busybox:-x", "a tag has"),
        ("busybox@sha256:12", "64 lower-case"),
        ("host:99999/x", "port"),
        ("host:0/x", "port"),
        ("-host.x/y", "host name"),
        ("[::g]:1/x", "host name"),
        ("../etc/passwd", "host name"),
        ("a\nb", "control"),
        ("a___b", "parts joined"),
        ("https://docker.io/busybox", "port"),
    ] {
        let error = text.parse::<ImageRef>().unwrap_err();
        assert_eq!(error.code(), "bad_reference");
        assert!(error.to_string().contains(reason), "{text:?}: {error}");
    }
}

proptest! {
    /// The text form parses back to the same reference.
    #[test]
    fn display_round_trips(
        registry in prop_oneof![Just(""), Just("docker.io/"), Just("localhost:5000/"), Just("a-b.example.org/"), Just("[::1]:80/")],
        path in "[a-z0-9]{1,8}([._-][a-z0-9]{1,4}){0,2}(/[a-z0-9]{1,8}(__|-{1,3})[a-z0-9]{1,3}){0,3}",
        tag in proptest::option::of("[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}"),
        digest in proptest::option::of(any::<[u8; 32]>()),
    ) {
        // Else the first component is a registry.
        prop_assume!(!registry.is_empty() || !path.split_once('/').is_some_and(|(first, _)| first.contains('.')));
        let tag = tag.map(|tag| format!(":{tag}")).unwrap_or_default();
        let digest = digest.map(|digest| format!("@{}", Digest::from(digest))).unwrap_or_default();
        let reference: ImageRef = format!("{registry}{path}{tag}{digest}").parse().unwrap();
        prop_assert_eq!(reference.to_string().parse::<ImageRef>().unwrap(), reference);
    }

    #[test]
    fn local_forms_round_trip(kind in "oci|docker-archive", path in "[^:\\p{C}]{1,40}", tag in proptest::option::of("[^\\s\\p{C}]{1,20}")) {
        let tag = tag.map(|tag| format!(":{tag}")).unwrap_or_default();
        let reference: ImageRef = format!("{kind}:{path}{tag}").parse().unwrap();
        prop_assert_eq!(reference.to_string().parse::<ImageRef>().unwrap(), reference);
    }

    /// Any text is a reference or an error, and every reference round-trips.
    #[test]
    fn any_text_is_survived(text in ".{0,60}") {
        if let Ok(reference) = text.parse::<ImageRef>() {
            prop_assert_eq!(reference.to_string().parse::<ImageRef>().unwrap(), reference);
        }
    }
}

#[test]
fn loopback_hosts_are_known() {
    for host in [
        "localhost",
        "localhost:5000",
        "127.0.0.1",
        "127.1.2.3:80",
        "[::1]:5000",
    ] {
        assert!(is_loopback(host), "{host}");
    }
    for host in [
        "localhost.example",
        "10.0.0.1",
        "[2001:db8::1]:5000",
        "registry-1.docker.io",
    ] {
        assert!(!is_loopback(host), "{host}");
    }
}
