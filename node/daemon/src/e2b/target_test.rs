use super::*;

const ID_OF_ONE: &str = "0123456789ab";

fn domain() -> Domain {
    Domain::parse("sandboxes.example:8443").unwrap()
}

fn of(uri: &str, headers: &[(&str, &str)]) -> Result<Option<Target>, String> {
    let mut request = Request::builder().uri(uri);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    target(&request.body(()).unwrap(), Some(&domain()))
}

fn one(port: u16) -> Result<Option<Target>, String> {
    Ok(Some(Target {
        id: ID_OF_ONE.into(),
        home: None,
        port,
    }))
}

#[test]
fn host_names_a_port_of_a_sandbox() {
    for (host, port) in [
        ("49983-0123456789ab.sandboxes.example", 49983),
        ("3000-0123456789ab.sandboxes.example:8443", 3000),
        ("1-0123456789AB.Sandboxes.EXAMPLE.", 1),
        ("65535-0123456789ab.sandboxes.example.:80", 65535),
    ] {
        assert_eq!(of("/", &[("host", host)]), one(port), "{host}");
        // A proxy's form of a request: its authority is the host.
        let uri = format!("http://{host}/x");
        assert_eq!(of(&uri, &[("host", "else.example")]), one(port), "{host}");
    }
}

#[test]
fn other_hosts_are_the_control_plane() {
    for host in [
        "",
        "localhost",
        "127.0.0.1:3000",
        "[::1]:3000",
        "api.sandboxes.example",
        "sandboxes.example",
        "a-0123456789ab.sandboxes.example",
        "3000-0123456789ab.x.sandboxes.example",
        "3000-0123456789ab.sandboxes.example.evil",
        "3000-0123456789ab.othersandboxes.example",
        "3000-0123456789absandboxes.example",
        "3000-0123456789ab.sandboxes.example..",
    ] {
        assert_eq!(of("/", &[("host", host)]), Ok(None), "{host}");
    }
}

#[test]
fn malformed_host_names_are_refused() {
    for label in [
        "0-0123456789ab",
        "080-0123456789ab",
        "65536-0123456789ab",
        "8x-0123456789ab",
        "80-",
        "80-0123456789abc",
        "80-0123456789ag",
        "80-0123456789ab-",
        "80-80-0123456789ab",
        "80--0123456789ab",
        "80-%30123456789ab",
    ] {
        let host = format!("{label}.sandboxes.example");
        assert!(of("/", &[("host", &host)]).is_err(), "{label}");
    }
    let host = "80-0123456789ab.sandboxes.example";
    assert!(of("/", &[("host", host), ("host", host)]).is_err());
}

#[test]
fn headers_name_a_port_of_a_sandbox() {
    let api = ("host", "api.sandboxes.example");
    let id = ("E2b-Sandbox-Id", ID_OF_ONE);
    assert_eq!(of("/", &[api, id]), one(ENVD_PORT));
    assert_eq!(of("/", &[api, id, ("E2b-Sandbox-Port", "80")]), one(80));
    for wrong in [
        vec![("e2b-sandbox-id", "web")],
        vec![("e2b-sandbox-id", "")],
        vec![("e2b-sandbox-id", "0123456789AB")],
        vec![id, id],
        vec![id, ("e2b-sandbox-port", "")],
        vec![id, ("e2b-sandbox-port", "+80")],
        vec![id, ("e2b-sandbox-port", "0")],
        vec![id, ("e2b-sandbox-port", "80 ")],
        vec![id, ("e2b-sandbox-port", "80"), ("e2b-sandbox-port", "80")],
    ] {
        assert!(of("/", &wrong).is_err(), "{wrong:?}");
    }
}

#[test]
fn host_and_headers_must_mean_the_same() {
    let host = ("host", "3000-0123456789ab.sandboxes.example");
    let id = ("e2b-sandbox-id", ID_OF_ONE);
    assert_eq!(of("/", &[host, id, ("e2b-sandbox-port", "3000")]), one(3000));
    for other in [
        vec![host, id],
        vec![host, id, ("e2b-sandbox-port", "3001")],
        vec![
            host,
            ("e2b-sandbox-id", "ba9876543210"),
            ("e2b-sandbox-port", "3000"),
        ],
    ] {
        assert!(of("/", &other).is_err(), "{other:?}");
    }
}

#[test]
fn without_a_domain_only_headers_count() {
    let request = Request::builder().header("host", "80-0123456789ab.sandboxes.example");
    assert_eq!(target(&request.body(()).unwrap(), None), Ok(None));
}

#[test]
fn domain_is_a_name_and_perhaps_a_port() {
    for good in ["localhost", "sandboxes.example", "a-b.c1:80"] {
        assert_eq!(Domain::parse(good).unwrap().as_str(), good);
    }
    let long = "a.".repeat(130) + "a";
    for bad in [
        "", ".", "a.", ".a", "A", "a_b", "a:0", "a:", "a:b", "-a", "a-", "a b", "*.a", &long,
    ] {
        assert!(Domain::parse(bad).is_err(), "{bad}");
    }
}

#[test]
fn whole_id_names_a_port_and_a_node() {
    let whole = WholeId::parse("0123456789ab00ff").unwrap();
    let target = Ok(Some(Target::new(whole, 3000)));
    let host = ("host", "3000-0123456789AB00FF.sandboxes.example");
    let id = ("e2b-sandbox-id", "0123456789ab00ff");
    let port = ("e2b-sandbox-port", "3000");
    assert_eq!(of("/", &[host]), target);
    assert_eq!(of("/", &[host, id, port]), target);
    assert!(of("/", &[host, ("e2b-sandbox-id", ID_OF_ONE), port]).is_err());
}
