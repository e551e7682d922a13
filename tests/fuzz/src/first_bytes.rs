//! What a guest sends first over a connection that its network policy allows by name.

use thaw_sandbox::relay::first_bytes::{MOST, Opening, read};

/// The first byte says whether the port is one of HTTP or HTTPS, and the second where the connection pauses.
pub fn run(input: &[u8]) {
    let Some((&[is_web, pause], bytes)) = input.split_first_chunk() else {
        return;
    };
    let is_web = is_web & 1 == 1;
    let Ok(Some(whole)) = read(bytes, is_web) else {
        return;
    };
    check(&whole, is_web);
    if let Ok(Some(part)) = read(&bytes[..bytes.len().min(pause.into())], is_web) {
        assert_eq!(part.name, whole.name, "a part has the name of the whole");
    }
    if bytes.len() < MOST
        && let Ok(Some(again)) = read(&whole.bytes, is_web)
    {
        assert_eq!(again.name, whole.name, "the server reads another name");
    }
}

fn check(opening: &Opening, is_web: bool) {
    match &opening.name {
        None => assert!(!is_web),
        Some(name) => {
            let is_plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_.".contains(&b);
            assert!(!name.is_empty() && name.bytes().all(is_plain), "{name:?}");
        }
    }
}
