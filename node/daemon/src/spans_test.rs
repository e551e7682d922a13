use std::io::{Read, Write};
use std::net::TcpListener;

use thaw_protocol::api::{Reason, Stage};

use super::*;

/// Accepts one request, and returns its head and its body.
fn collect(listener: &TcpListener, answer: &str) -> (String, serde_json::Value) {
    let (mut stream, _) = listener.accept().unwrap();
    let mut request = Vec::new();
    let (head, length) = loop {
        let mut some = [0; 4096];
        let read = stream.read(&mut some).unwrap();
        assert!(read > 0, "the request broke off");
        request.extend_from_slice(&some[..read]);
        let Some(end) = request.windows(4).position(|w| w == b"\r\n\r\n") else {
            continue;
        };
        let head = String::from_utf8(request[..end].to_vec()).unwrap().to_lowercase();
        let length = head.lines().find_map(|l| l.strip_prefix("content-length: "));
        break (head.clone(), end + 4 + length.unwrap().parse::<usize>().unwrap());
    };
    while request.len() < length {
        let mut some = [0; 4096];
        let read = stream.read(&mut some).unwrap();
        assert!(read > 0, "the body broke off");
        request.extend_from_slice(&some[..read]);
    }
    let body = &request[head.len() + 4..];
    let text = format!("HTTP/1.1 {answer}\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}");
    stream.write_all(text.as_bytes()).unwrap();
    (head, serde_json::from_slice(body).unwrap())
}

fn creation(parent: Option<&str>) -> Creation {
    let mut headers = HeaderMap::new();
    if let Some(parent) = parent {
        headers.insert("traceparent", parent.parse().unwrap());
    }
    let account = Account {
        stages: vec![Stage {
            name: "thaw".into(),
            start_ns: 1_000_000,
            duration_ns: 2_000_000,
        }],
        reasons: vec![Reason {
            code: "no-shell".into(),
            text: String::new(),
        }],
        ..Account::default()
    };
    Creation {
        what: "create",
        parent: super::parent(&headers),
        began: SystemTime::UNIX_EPOCH + Duration::from_secs(1),
        took: Duration::from_millis(5),
        outcome: Ok(Told {
            id: Some("abc".into()),
            account,
            clones: Vec::new(),
        }),
    }
}

fn counted(spans: &Spans, name: &str) -> Option<f64> {
    let mut families = Families::default();
    spans.count(&mut families);
    crate::metrics::grammar::read(&families.text()).unwrap()[name].value(&[])
}

fn started(listener: &TcpListener) -> Spans {
    let otlp = format!("http://{}", listener.local_addr().unwrap());
    let config = TracingConfig { otlp: Some(otlp) };
    Spans::start(&config).unwrap().unwrap()
}

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

#[tokio::test(flavor = "multi_thread")]
async fn creation_is_a_span_of_its_callers_trace_with_its_stages() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let spans = started(&listener);
    spans.send(creation(Some(PARENT)));
    let (head, body) = tokio::task::spawn_blocking(move || collect(&listener, "200 OK"))
        .await
        .unwrap();
    assert!(head.starts_with("post /v1/traces "), "{head}");
    let resource = &body["resourceSpans"][0];
    let attributes = resource["resource"]["attributes"].to_string();
    assert!(attributes.contains("thawd"), "{attributes}");
    let all = resource["scopeSpans"][0]["spans"].as_array().unwrap();
    assert_eq!(all.len(), 2);
    let (whole, stage) = (&all[0], &all[1]);
    for span in all {
        assert_eq!(span["traceId"], "0af7651916cd43dd8448eb211c80319c");
    }
    assert_eq!(whole["name"], "sandbox create");
    assert_eq!(whole["parentSpanId"], "b7ad6b7169203331");
    assert_eq!(whole["startTimeUnixNano"], "1000000000");
    assert_eq!(whole["endTimeUnixNano"], "1005000000");
    let attributes = whole["attributes"].to_string();
    assert!(
        attributes.contains("abc") && attributes.contains("no-shell"),
        "{attributes}"
    );
    assert_eq!(stage["name"], "thaw");
    assert_eq!(stage["parentSpanId"], whole["spanId"]);
    assert_eq!(stage["startTimeUnixNano"], "1001000000");
    assert_eq!(stage["endTimeUnixNano"], "1003000000");
    while counted(&spans, "thaw_spans_sent_total") != Some(1.0) {
        tokio::task::yield_now().await;
    }
    spans.close().await;
}

#[test]
fn clones_are_below_their_fork_and_what_was_claimed_is_told() {
    let stage = |name: &str, start_ns| Stage {
        name: name.into(),
        start_ns,
        duration_ns: 1_000,
    };
    let clone = |id: &str, began| Sibling {
        id: id.into(),
        began: Duration::from_millis(began),
        took: Duration::from_millis(1),
        account: Account {
            stages: vec![stage("claim", 2_000_000)],
            notes: [("claim".to_owned(), "a machine was parked".to_owned())].into(),
            counts: [("populated_pages".to_owned(), 7)].into(),
            ..Account::default()
        },
    };
    let creation = Creation {
        what: "fork",
        outcome: Ok(Told {
            id: None,
            account: Account {
                stages: vec![stage("freeze", 0)],
                ..Account::default()
            },
            clones: vec![clone("one", 3), clone("two", 4)],
        }),
        ..creation(Some(PARENT))
    };
    let scope = InstrumentationScope::builder("thawd").build();
    let began = creation.began;
    let all = spans(creation, &RandomIdGenerator::default(), &scope);
    let names: Vec<&str> = all.iter().map(|span| span.name.as_ref()).collect();
    assert_eq!(
        names,
        [
            "sandbox fork",
            "freeze",
            "sandbox thaw",
            "claim",
            "sandbox thaw",
            "claim"
        ]
    );
    let id = |at: usize| all[at].span_context.span_id();
    let parents: Vec<SpanId> = all[1..].iter().map(|span| span.parent_span_id).collect();
    assert_eq!(parents, [id(0), id(0), id(2), id(0), id(4)]);
    assert_eq!(all[3].start_time, began + Duration::from_millis(5));
    assert!(format!("{:?}", all[3].attributes).contains("a machine was parked"));
    assert!(format!("{:?}", all[4].attributes).contains("populated_pages"));
    assert!(format!("{:?}", all[4].attributes).contains("two"));
}

#[tokio::test(flavor = "multi_thread")]
async fn unsampled_traces_are_not_sent_and_refused_spans_are_lost() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let spans = started(&listener);
    spans.send(creation(Some(&PARENT.replace("-01", "-00"))));
    let failed = Creation {
        outcome: Err("image-not-found"),
        ..creation(None)
    };
    spans.send(failed);
    let (_, body) = tokio::task::spawn_blocking(move || collect(&listener, "400 Bad Request"))
        .await
        .unwrap();
    let all = body["resourceSpans"][0]["scopeSpans"][0]["spans"].clone();
    let all = all.as_array().unwrap();
    assert_eq!(all.len(), 1, "one creation without stages");
    assert!(all[0]["status"].to_string().contains("image-not-found"));
    assert_ne!(all[0]["traceId"], "0af7651916cd43dd8448eb211c80319c");
    while counted(&spans, "thaw_spans_dropped_total") != Some(1.0) {
        tokio::task::yield_now().await;
    }
    assert_eq!(counted(&spans, "thaw_spans_sent_total"), Some(0.0));
}

#[tokio::test]
async fn what_waits_for_a_collector_is_bounded() {
    // The collector never answers, because nothing accepts the connection.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let spans = started(&listener);
    for _ in 0..2 * WAITING {
        spans.send(creation(None));
    }
    // The sending task has not run yet: the runtime has only this thread.
    assert_eq!(counted(&spans, "thaw_spans_dropped_total"), Some(WAITING as f64));
}

#[test]
fn what_is_no_traceparent_is_none() {
    for bad in [
        "",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-xyz-b7ad6b7169203331-01",
    ] {
        assert!(creation(Some(bad)).parent.is_none(), "{bad}");
    }
    assert!(creation(Some(PARENT)).parent.is_some());
}

#[test]
fn a_collector_without_a_path_has_the_usual_one() {
    assert_eq!(endpoint("http://a:4318"), "http://a:4318/v1/traces");
    assert_eq!(endpoint("http://a:4318/"), "http://a:4318/v1/traces");
    assert_eq!(endpoint("https://a/otlp/v1/traces"), "https://a/otlp/v1/traces");
}
