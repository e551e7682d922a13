//! The files of a [`LocalGuest`](super::local_guest::LocalGuest): those below a directory of this host.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use thaw_protocol::agent::files::file_event::Kind;
use thaw_protocol::agent::files::{FileEvent, FileInfo, ListResponse, NextEventsResponse};

use crate::api::files::{DirectoryWatch, Download, Files, PIECE, Piece, Upload, UploadKind};
use crate::api::problem::{ApiCode, Refusal};

/// What a watch saw last: names, with sizes and times.
type Seen = BTreeMap<Vec<u8>, (u64, i64)>;

/// The watches of all tests, by their names.
static WATCHES: LazyLock<Mutex<BTreeMap<String, Arc<Mutex<Seen>>>>> = LazyLock::new(Mutex::default);

#[derive(Debug)]
pub struct LocalFiles(PathBuf);

impl LocalFiles {
    pub fn below(root: &Path) -> LocalFiles {
        LocalFiles(root.to_owned())
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }

    fn seen(&self, path: &str) -> Result<Seen, Refusal> {
        let mut seen = Seen::new();
        for entry in std::fs::read_dir(self.at(path)).map_err(refused)? {
            let entry = entry.map_err(refused)?;
            if let Ok(metadata) = entry.metadata() {
                let state = (metadata.size(), metadata.mtime_nsec());
                seen.insert(entry.file_name().into_vec(), state);
            }
        }
        Ok(seen)
    }
}

fn refused(e: io::Error) -> Refusal {
    let code = match e.kind() {
        ErrorKind::NotFound => ApiCode::NoFile,
        ErrorKind::NotADirectory | ErrorKind::IsADirectory => ApiCode::NotAFile,
        _ => ApiCode::FileRefused,
    };
    Refusal::new(code, e)
}

/// Unpacks an archive, and removes it.
fn unpack(archive: &Path, into: &Path) -> Result<(), Refusal> {
    let mut tar = std::process::Command::new("tar");
    let unpacked = tar
        .arg("-xf")
        .arg(archive)
        .arg("-C")
        .arg(into)
        .status()
        .map_err(refused)?;
    std::fs::remove_file(archive).map_err(refused)?;
    match unpacked.success() {
        true => Ok(()),
        false => Err(Refusal::new(ApiCode::FileRefused, "no archive")),
    }
}

fn info(path: &Path, metadata: &std::fs::Metadata) -> FileInfo {
    FileInfo {
        name: path.file_name().unwrap_or_default().to_owned().into_vec(),
        mode: metadata.mode(),
        size: metadata.size(),
        uid: metadata.uid(),
        gid: metadata.gid(),
        modified_s: metadata.mtime(),
        modified_ns: metadata.mtime_nsec() as u32,
        target: std::fs::read_link(path)
            .unwrap_or_default()
            .into_os_string()
            .into_vec(),
        ..Default::default()
    }
}

#[async_trait]
impl Files for LocalFiles {
    async fn read(&self, path: &str, offset: u64, _: u64) -> Result<Piece, Refusal> {
        let file = std::fs::File::open(self.at(path)).map_err(refused)?;
        let metadata = file.metadata().map_err(refused)?;
        let mut data = vec![0; PIECE];
        let read = file.read_at(&mut data, offset).map_err(refused)?;
        data.truncate(read);
        Ok(Piece {
            data,
            size: metadata.size(),
            mode: metadata.mode() & 0o7777,
            identity: metadata.ino(),
        })
    }

    async fn stat(&self, path: &str, follow: bool) -> Result<FileInfo, Refusal> {
        let path = self.at(path);
        let metadata = match follow {
            true => path.metadata(),
            false => path.symlink_metadata(),
        };
        Ok(info(&path, &metadata.map_err(refused)?))
    }

    async fn list(&self, path: &str, after: Vec<u8>, limit: u16) -> Result<ListResponse, Refusal> {
        let mut entries = Vec::new();
        for entry in std::fs::read_dir(self.at(path)).map_err(refused)? {
            let path = entry.map_err(refused)?.path();
            entries.push(info(&path, &path.symlink_metadata().map_err(refused)?));
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        entries.retain(|entry| entry.name > after);
        // Small pages, so that lists have several.
        let most = usize::from(limit).min(3);
        let more = entries.len() > most;
        entries.truncate(most);
        Ok(ListResponse {
            entries,
            more,
            ..Default::default()
        })
    }

    async fn make_directory(&self, path: &str, _: u32, _: bool) -> Result<(), Refusal> {
        std::fs::create_dir_all(self.at(path)).map_err(refused)
    }

    async fn rename(&self, from: &str, to: &str, _: bool) -> Result<(), Refusal> {
        std::fs::rename(self.at(from), self.at(to)).map_err(refused)
    }

    async fn remove(&self, path: &str, _: bool) -> Result<(), Refusal> {
        let path = self.at(path);
        let metadata = path.symlink_metadata().map_err(refused)?;
        match metadata.is_dir() {
            true => std::fs::remove_dir_all(path).map_err(refused),
            false => std::fs::remove_file(path).map_err(refused),
        }
    }

    async fn pack(&self, _: &Download) -> Result<(), Refusal> {
        Err(Refusal::new(ApiCode::FileRefused, "no archives"))
    }

    async fn next_piece(&self, _: &Download) -> Result<Vec<u8>, Refusal> {
        Err(Refusal::new(ApiCode::FileRefused, "no archives"))
    }

    async fn abandon_download(&self, _: &Download) {}

    async fn write(&self, upload: &Upload, offset: u64, data: Vec<u8>, last: bool) -> Result<(), Refusal> {
        let part = self.at(&format!("{}.{}", upload.path, upload.name));
        let mut options = std::fs::File::options();
        let file = options.create(true).write(true).truncate(false).open(&part);
        file.and_then(|file| file.write_all_at(&data, offset))
            .map_err(refused)?;
        match (last, upload.kind) {
            (false, _) => Ok(()),
            (true, UploadKind::File { .. }) => std::fs::rename(part, self.at(&upload.path)).map_err(refused),
            (true, UploadKind::Archive { .. }) => unpack(&part, &self.at(&upload.path)),
        }
    }

    async fn abandon(&self, upload: &Upload) {
        let _ = std::fs::remove_file(self.at(&format!("{}.{}", upload.path, upload.name)));
    }

    async fn watch(&self, watch: &DirectoryWatch) -> Result<(), Refusal> {
        let seen = Arc::new(Mutex::new(self.seen(&watch.path)?));
        WATCHES.lock().unwrap().insert(watch.name.clone(), seen);
        Ok(())
    }

    /// Looks at the directory until something is different.
    async fn next_events(&self, watch: &DirectoryWatch) -> Result<NextEventsResponse, Refusal> {
        let seen = WATCHES.lock().unwrap()[&watch.name].clone();
        loop {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let mut answer = NextEventsResponse::default();
            let Ok(now) = self.seen(&watch.path) else {
                answer.ended = "the directory was removed".into();
                return Ok(answer);
            };
            let before = std::mem::replace(&mut *seen.lock().unwrap(), now.clone());
            let made = now.iter().filter_map(|(name, state)| match before.get(name) {
                None => Some((name, Kind::CREATE)),
                Some(old) if old != state => Some((name, Kind::WRITE)),
                Some(_) => None,
            });
            let gone = before.keys().filter(|name| !now.contains_key(*name));
            let events = made.chain(gone.map(|name| (name, Kind::REMOVE)));
            answer.events = events
                .map(|(name, kind)| FileEvent {
                    kind: kind.into(),
                    name: name.clone(),
                    ..Default::default()
                })
                .collect();
            if !answer.events.is_empty() {
                return Ok(answer);
            }
        }
    }

    async fn abandon_watch(&self, watch: &DirectoryWatch) {
        WATCHES.lock().unwrap().remove(&watch.name);
    }
}
