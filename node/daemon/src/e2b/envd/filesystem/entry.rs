//! What is said of a file.

use std::sync::Arc;

use prost_types::Timestamp;
use thaw_protocol::agent::files::FileInfo;
use thaw_protocol::e2b::filesystem::{EntryInfo, FileType};

use super::super::accounts::Accounts;
use super::super::failure::Failure;
use super::super::paths;
use crate::api::files::Files;

/// The files of a container, with the names of its users.
#[derive(Debug)]
pub struct Looker {
    pub files: Arc<dyn Files>,
    accounts: Accounts,
}

impl Looker {
    pub async fn new(files: Arc<dyn Files>) -> Looker {
        let accounts = Accounts::read(&files).await;
        Looker { files, accounts }
    }

    /// Looks at a file, not at what a link leads to.
    ///
    /// # Errors
    /// It is not there.
    pub async fn look(&self, path: &str) -> Result<EntryInfo, Failure> {
        let info = self.files.stat(path, false).await?;
        Ok(self.entry(path.to_owned(), info).await)
    }

    /// What is said of a file that the guest described. Of a link, also what it leads to.
    pub async fn entry(&self, path: String, info: FileInfo) -> EntryInfo {
        let is_symlink = info.mode & libc::S_IFMT == libc::S_IFLNK;
        let kind = match is_symlink {
            false => file_type(info.mode),
            true => match self.files.stat(&path, true).await {
                Ok(target) => file_type(target.mode),
                // It leads nowhere.
                Err(_) => FileType::Symlink,
            },
        };
        EntryInfo {
            name: paths::name(&path).to_owned(),
            r#type: kind.into(),
            path,
            size: i64::try_from(info.size).unwrap_or(i64::MAX),
            mode: info.mode & 0o777,
            permissions: permissions(info.mode),
            owner: self.accounts.user(info.uid),
            group: self.accounts.group(info.gid),
            modified_time: modified(info.modified_s, info.modified_ns),
            symlink_target: is_symlink.then(|| String::from_utf8_lossy(&info.target).into_owned()),
            metadata: Default::default(),
            is_symlink,
        }
    }
}

fn file_type(mode: u32) -> FileType {
    match mode & libc::S_IFMT {
        libc::S_IFREG => FileType::File,
        libc::S_IFDIR => FileType::Directory,
        libc::S_IFLNK => FileType::Symlink,
        _ => FileType::Unspecified,
    }
}

/// The type of a file and its permissions, as Go writes them, which envd is written in.
fn permissions(mode: u32) -> String {
    let kind = match mode & libc::S_IFMT {
        libc::S_IFDIR => "d",
        libc::S_IFLNK => "L",
        libc::S_IFIFO => "p",
        libc::S_IFSOCK => "S",
        libc::S_IFCHR => "Dc",
        libc::S_IFBLK => "D",
        _ => "-",
    };
    let bits = (0..9).map(|bit| match mode & (0o400_u32 >> bit) {
        0 => '-',
        _ => ['r', 'w', 'x'][bit % 3],
    });
    kind.chars().chain(bits).collect()
}

/// A time that JSON can express: of the years 1 to 9999. A guest says any.
fn modified(seconds: i64, nanoseconds: u32) -> Option<Timestamp> {
    const YEARS: std::ops::RangeInclusive<i64> = -62_135_596_800..=253_402_300_799;
    let nanos = i32::try_from(nanoseconds)
        .ok()
        .filter(|nanos| *nanos < 1_000_000_000);
    YEARS.contains(&seconds).then(|| Timestamp {
        seconds,
        nanos: nanos.unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permissions_are_written_as_go_does() {
        for (mode, text) in [
            (0o100_644, "-rw-r--r--"),
            (0o040_755, "drwxr-xr-x"),
            (0o120_777, "Lrwxrwxrwx"),
            (0o020_600, "Dcrw-------"),
        ] {
            assert_eq!(permissions(mode), text);
        }
    }

    #[test]
    fn times_that_json_cannot_express_are_left_out() {
        assert!(modified(0, 999_999_999).is_some_and(|time| time.nanos == 999_999_999));
        assert!(modified(0, u32::MAX).is_some_and(|time| time.nanos == 0));
        assert!(modified(i64::MAX, 0).is_none() && modified(i64::MIN, 0).is_none());
    }
}
