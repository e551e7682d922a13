use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use thaw_protocol::e2b::process::{ListRequest, SendInputRequest};

use super::*;
use crate::e2b::envd::connect::codec::Codec;

fn form(codec: Codec, is_stream: bool, is_gzip: bool) -> Form {
    Form {
        codec,
        is_stream,
        is_gzip,
        timeout: None,
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// A frame with these flags.
fn frame(flags: u8, data: &[u8]) -> Vec<u8> {
    let mut frame = Envelope::encode(false, data).unwrap();
    frame[0] = flags;
    frame
}

async fn unary(form: Form, body: impl Into<Body>) -> Result<SendInputRequest, Code> {
    message(form, body.into()).await.map_err(|failure| failure.code)
}

async fn stream(form: Form, body: impl Into<Body>) -> Result<ListRequest, Code> {
    only_message(form, body.into())
        .await
        .map_err(|failure| failure.code)
}

#[tokio::test]
async fn unary_messages_are_read_in_both_codecs() {
    let json = br#"{"process":{"pid":7},"input":{"stdin":"YQ=="}}"#;
    let read = unary(form(Codec::Json, false, false), &json[..]).await.unwrap();
    let proto = prost::Message::encode_to_vec(&read);
    assert_eq!(
        unary(form(Codec::Proto, false, false), proto.clone())
            .await
            .unwrap(),
        read
    );
    assert_eq!(
        unary(form(Codec::Proto, false, true), gzip(&proto))
            .await
            .unwrap(),
        read
    );
    assert_eq!(
        unary(form(Codec::Json, false, true), gzip(json)).await.unwrap(),
        read
    );
    for bad in ["", "x", "{", "[]", r#"{"process":{"pid":-1}}"#] {
        let refused = unary(form(Codec::Json, false, false), bad).await;
        assert_eq!(refused, Err(Code::InvalidArgument), "{bad}");
    }
    let refused = unary(form(Codec::Proto, false, false), &b"\xff"[..]).await;
    assert_eq!(refused, Err(Code::InvalidArgument));
}

#[tokio::test]
async fn messages_that_are_too_large_are_refused() {
    let large = vec![b' '; MAX_MESSAGE + 1];
    let plain = form(Codec::Json, false, false);
    assert_eq!(unary(plain, large.clone()).await, Err(Code::OutOfRange));
    // A message that is small until it is expanded.
    let bomb = gzip(&vec![b' '; 200 << 20]);
    assert!(bomb.len() < MAX_MESSAGE);
    let compressed = form(Codec::Json, false, true);
    assert_eq!(unary(compressed, bomb.clone()).await, Err(Code::OutOfRange));
    let compressed = form(Codec::Json, true, true);
    assert_eq!(stream(compressed, frame(1, &bomb)).await, Err(Code::OutOfRange));
    // One that is only announced.
    let header = [&[0][..], &(MAX_MESSAGE as u32 + 1).to_be_bytes()].concat();
    assert_eq!(
        stream(form(Codec::Json, true, false), header).await,
        Err(Code::OutOfRange)
    );
}

#[tokio::test]
async fn streams_are_checked_frame_by_frame() {
    let plain = form(Codec::Json, true, false);
    let gzipped = form(Codec::Json, true, true);
    assert!(stream(plain, frame(0, b"{}")).await.is_ok());
    assert!(stream(gzipped, frame(0, b"{}")).await.is_ok());
    assert!(stream(gzipped, frame(1, &gzip(b"{}"))).await.is_ok());
    for (form, bytes) in [
        (plain, Vec::new()),
        (plain, frame(0, b"{}")[..6].to_vec()),
        (plain, frame(0, b"{}")[..3].to_vec()),
        (plain, frame(2, b"{}")),
        (plain, frame(0x80, b"{}")),
        (plain, frame(1, &gzip(b"{}"))),
        (gzipped, frame(1, b"{}")),
        (gzipped, frame(1, &gzip(b"{}")[..8])),
        (plain, [frame(0, b"{}"), frame(0, b"{}")].concat()),
    ] {
        assert_eq!(
            stream(form, bytes.clone()).await,
            Err(Code::InvalidArgument),
            "{bytes:?}"
        );
    }
    let broken = futures_util::stream::iter([Ok(frame(0, b"{}")), Err(std::io::Error::other("gone"))]);
    assert_eq!(
        stream(plain, Body::from_stream(broken)).await,
        Err(Code::Canceled)
    );
}

#[tokio::test(start_paused = true)]
async fn body_that_stops_coming_is_given_up() {
    let silent = || Body::from_stream(futures_util::stream::pending::<std::io::Result<Bytes>>());
    let slow = Err(Code::DeadlineExceeded);
    assert_eq!(
        unary(form(Codec::Json, false, false), silent()).await.map(drop),
        slow
    );
    assert_eq!(
        stream(form(Codec::Json, true, false), silent()).await.map(drop),
        slow
    );
}
