//! Fake files: they need no guest.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Mutex;

use async_trait::async_trait;
use tokio::sync::watch;

use thaw_protocol::agent::files::file_event::Kind;
use thaw_protocol::agent::files::{FileEvent, FileInfo, ListResponse, NextEventsResponse};

use crate::api::files::{DirectoryWatch, Download, Files, PIECE, Piece, Upload};
use crate::api::problem::{ApiCode, Refusal};

/// The files of a container, and those that are being written.
#[derive(Debug, Default)]
pub struct FakeFiles {
    whole: Mutex<BTreeMap<String, Vec<u8>>>,
    parts: watch::Sender<BTreeMap<String, Vec<u8>>>,
    downloads: Mutex<BTreeMap<String, VecDeque<Vec<u8>>>>,
    /// The open watches, and how many answers of a watch were read.
    watches: watch::Sender<BTreeSet<String>>,
    answers: Mutex<usize>,
}

#[async_trait]
impl Files for FakeFiles {
    async fn read(&self, path: &str, offset: u64, identity: u64) -> Result<Piece, Refusal> {
        assert_eq!(identity, if offset == 0 { 0 } else { 7 });
        let whole = self.whole.lock().unwrap();
        let file = whole
            .get(path)
            .ok_or_else(|| Refusal::new(ApiCode::NoFile, path))?;
        let from = file.len().min(offset as usize);
        Ok(Piece {
            data: file[from..file.len().min(from + PIECE)].to_vec(),
            // Files in /proc have no size.
            size: if path.starts_with("/proc") {
                0
            } else {
                file.len() as u64
            },
            mode: 0o640,
            identity: 7,
        })
    }

    async fn stat(&self, path: &str, _: bool) -> Result<FileInfo, Refusal> {
        let whole = self.whole.lock().unwrap();
        let file = whole
            .get(path)
            .ok_or_else(|| Refusal::new(ApiCode::NoFile, path))?;
        Ok(info(path, file))
    }

    /// Every file, as if all were in one directory.
    async fn list(&self, path: &str, after: Vec<u8>, limit: u16) -> Result<ListResponse, Refusal> {
        let whole = self.whole.lock().unwrap();
        if path != "/" {
            return Err(Refusal::new(ApiCode::NoFile, path));
        }
        let mut entries: Vec<_> = whole.iter().map(|(path, file)| info(path, file)).collect();
        entries.retain(|entry| entry.name > after);
        let more = entries.len() > limit.into();
        entries.truncate(limit.into());
        Ok(ListResponse {
            entries,
            more,
            ..Default::default()
        })
    }

    async fn make_directory(&self, path: &str, _: u32, _: bool) -> Result<(), Refusal> {
        let mut whole = self.whole.lock().unwrap();
        whole.insert(path.into(), Vec::new());
        Ok(())
    }

    async fn rename(&self, from: &str, to: &str, _: bool) -> Result<(), Refusal> {
        let mut whole = self.whole.lock().unwrap();
        let file = whole
            .remove(from)
            .ok_or_else(|| Refusal::new(ApiCode::NoFile, from))?;
        whole.insert(to.into(), file);
        Ok(())
    }

    async fn remove(&self, path: &str, _: bool) -> Result<(), Refusal> {
        let removed = self.whole.lock().unwrap().remove(path);
        removed
            .map(drop)
            .ok_or_else(|| Refusal::new(ApiCode::NoFile, path))
    }

    async fn pack(&self, download: &Download) -> Result<(), Refusal> {
        let whole = self.whole.lock().unwrap();
        let archive = whole.get(&download.path);
        let archive = archive.ok_or_else(|| Refusal::new(ApiCode::NoFile, &download.path))?;
        let pieces = archive.chunks(PIECE).map(<[u8]>::to_vec).collect();
        let mut downloads = self.downloads.lock().unwrap();
        downloads.insert(download.name.clone(), pieces);
        Ok(())
    }

    async fn next_piece(&self, download: &Download) -> Result<Vec<u8>, Refusal> {
        if download.path == "/broken" {
            return Err(Refusal::new(ApiCode::FileRefused, "broken"));
        }
        let mut downloads = self.downloads.lock().unwrap();
        let pieces = downloads.get_mut(&download.name).unwrap();
        let Some(piece) = pieces.pop_front() else {
            downloads.remove(&download.name);
            return Ok(Vec::new());
        };
        Ok(piece)
    }

    async fn abandon_download(&self, download: &Download) {
        self.downloads.lock().unwrap().remove(&download.name);
    }

    async fn write(&self, upload: &Upload, offset: u64, data: Vec<u8>, last: bool) -> Result<(), Refusal> {
        if upload.path.starts_with("/full") && offset > 0 {
            return Err(Refusal::new(ApiCode::NoRoom, "no room"));
        }
        let mut file = Vec::new();
        self.parts.send_modify(|parts| {
            file = parts.remove(&upload.name).unwrap_or_default();
            assert_eq!(file.len() as u64, offset);
            file.extend(data);
            if !last {
                parts.insert(upload.name.clone(), std::mem::take(&mut file));
            }
        });
        if last {
            self.whole.lock().unwrap().insert(upload.path.clone(), file);
        }
        Ok(())
    }

    async fn abandon(&self, upload: &Upload) {
        self.parts.send_modify(|parts| drop(parts.remove(&upload.name)));
    }

    async fn watch(&self, watch: &DirectoryWatch) -> Result<(), Refusal> {
        if watch.path == "/none" {
            return Err(Refusal::new(ApiCode::NoFile, &watch.path));
        }
        self.watches
            .send_if_modified(|open| open.insert(watch.name.clone()));
        Ok(())
    }

    /// Of `/`: three events, then none, then the end.
    async fn next_events(&self, watch: &DirectoryWatch) -> Result<NextEventsResponse, Refusal> {
        match watch.path.as_str() {
            "/quiet" => return std::future::pending().await,
            "/broken" => return Err(Refusal::new(ApiCode::FileRefused, "broken")),
            _ => assert!(watch.recursive),
        }
        let mut answers = self.answers.lock().unwrap();
        *answers += 1;
        let mut answer = NextEventsResponse::default();
        match *answers {
            1 => {
                let events = [
                    (Kind::CREATE, &b"a/b"[..]),
                    (Kind::UNKNOWN, b"x"),
                    (Kind::RENAME, b"\xff"),
                    (Kind::OVERFLOW, b""),
                ];
                answer.events = events.map(|(kind, name)| event(kind, name)).into();
            }
            2 => {}
            _ => answer.ended = "the directory was removed".into(),
        }
        Ok(answer)
    }

    async fn abandon_watch(&self, watch: &DirectoryWatch) {
        self.watches.send_if_modified(|open| open.remove(&watch.name));
    }
}

fn info(path: &str, file: &[u8]) -> FileInfo {
    FileInfo {
        name: path.trim_start_matches('/').into(),
        mode: 0o100_640,
        size: file.len() as u64,
        ..Default::default()
    }
}

fn event(kind: Kind, name: &[u8]) -> FileEvent {
    FileEvent {
        kind: kind.into(),
        name: name.to_vec(),
        ..Default::default()
    }
}

impl FakeFiles {
    /// The names of the open watches.
    pub fn open_watches(&self) -> watch::Receiver<BTreeSet<String>> {
        self.watches.subscribe()
    }

    /// The uploads in progress, with the bytes written so far.
    pub fn uploads(&self) -> watch::Receiver<BTreeMap<String, Vec<u8>>> {
        self.parts.subscribe()
    }
}
