use super::*;
use crate::container::sessions::IDLE;
use std::fs::{self, File};
use std::io::Read;
use std::time::Duration;

fn root(directory: &Path) -> OwnedFd {
    OwnedFd::from(File::open(directory).unwrap())
}

fn pack_request(path: &str, transfer: &str) -> PackRequest {
    PackRequest {
        path: path.into(),
        name: b"top".to_vec(),
        transfer: transfer.into(),
        ..Default::default()
    }
}

/// Packs `/` of a directory.
async fn packed(transfers: &Transfers, directory: &Path) -> Vec<u8> {
    transfers
        .pack(root(directory), &pack_request("/", "down"))
        .unwrap();
    let mut whole = Vec::new();
    loop {
        let piece = transfers.next_piece("down").await.unwrap();
        if piece.is_empty() {
            return whole;
        }
        whole.extend(piece);
    }
}

fn piece(offset: usize, data: &[u8], last: bool) -> UnpackRequest {
    UnpackRequest {
        path: "/".into(),
        transfer: "up".into(),
        offset: offset as u64,
        data: data.to_vec(),
        last,
        ..Default::default()
    }
}

#[tokio::test]
async fn directory_goes_out_and_in_again_in_pieces() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let large: Vec<u8> = (0..700_000_u32).map(|n| (n / 3) as u8 | 1).collect();
    fs::create_dir(from.path().join("sub")).unwrap();
    fs::write(from.path().join("sub/large"), &large).unwrap();
    let transfers = Transfers::default();
    let archive = packed(&transfers, from.path()).await;
    let mut at = 0;
    for chunk in archive.chunks(100_000) {
        let last = at + chunk.len() == archive.len();
        let taken = transfers.unpack(|| Ok(root(to.path())), piece(at, chunk, last));
        taken.await.unwrap();
        at += chunk.len();
    }
    let mut there = Vec::new();
    File::open(to.path().join("top/sub/large"))
        .unwrap()
        .read_to_end(&mut there)
        .unwrap();
    assert!(there == large);
    assert!(transfers.0.is_empty());
}

#[tokio::test]
async fn wrong_requests_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let transfers = Transfers::default();
    for (path, name, transfer) in [
        ("x", "top", "t"),
        ("/x/..", "top", "t"),
        ("/missing", "top", "t"),
        ("/", "a/b", "t"),
        ("/", "..", "t"),
        ("/", "", "t"),
        ("/", "top", "T"),
        ("/", "top", ""),
    ] {
        let request = PackRequest {
            name: name.into(),
            ..pack_request(path, transfer)
        };
        assert!(
            transfers.pack(root(dir.path()), &request).is_err(),
            "{path} {name}"
        );
    }
    assert!(transfers.next_piece("t").await.is_err());
    let early = transfers.unpack(|| Ok(root(dir.path())), piece(7, b"x", true));
    assert!(early.await.is_err());
    let noise = transfers.unpack(|| Ok(root(dir.path())), piece(0, &[7; 2000], true));
    assert!(matches!(noise.await, Err(Error::State(_))));
    assert!(transfers.0.is_empty());
}

#[tokio::test(start_paused = true)]
async fn transfers_are_few_and_end_when_they_are_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("f"), vec![1; 4 << 20]).unwrap();
    let transfers = Transfers::default();
    for n in 0..MAX_TRANSFERS {
        let request = pack_request("/", &format!("t{n}"));
        transfers.pack(root(dir.path()), &request).unwrap();
    }
    let more = transfers.pack(root(dir.path()), &pack_request("/", "more"));
    assert!(matches!(more, Err(Error::State(_))));
    transfers.abandon("t0");
    transfers
        .pack(root(dir.path()), &pack_request("/", "more"))
        .unwrap();
    tokio::time::sleep(2 * IDLE + Duration::from_secs(1)).await;
    assert!(transfers.0.is_empty());
}

#[tokio::test]
async fn archive_that_breaks_off_is_an_error() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(from.path().join("f"), vec![1; 100_000]).unwrap();
    let transfers = Transfers::default();
    let archive = packed(&transfers, from.path()).await;
    let cut = &archive[..50_000];
    let taken = transfers.unpack(|| Ok(root(to.path())), piece(0, cut, true));
    assert!(matches!(taken.await, Err(Error::State(_))));
    assert!(!to.path().join("top/f").exists());
}
