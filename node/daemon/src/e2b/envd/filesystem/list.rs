//! Looking at a file, and listing directories.

use thaw_protocol::api::FILES_PAGE;
use thaw_protocol::connect::Code;
use thaw_protocol::e2b::filesystem::{
    EntryInfo, FileType, ListDirRequest, ListDirResponse, StatRequest, StatResponse,
};

use super::super::call::Call;
use super::super::failure::Failure;
use super::super::paths;
use super::entry::Looker;

/// Most entries of a list.
const MOST_ENTRIES: usize = 20_000;

/// Looks at a file.
pub async fn stat(call: Call, request: StatRequest) -> Result<StatResponse, Failure> {
    let files = call.files().await?;
    let path = paths::absolute(&files, call.user.as_deref(), &request.path).await?;
    let entry = Looker::new(files).await.look(&path).await?;
    Ok(StatResponse { entry: Some(entry) })
}

/// Lists a directory, and those below it to the depth that the caller wants. Links are not followed.
pub async fn list(call: Call, request: ListDirRequest) -> Result<ListDirResponse, Failure> {
    let files = call.files().await?;
    let path = paths::absolute(&files, call.user.as_deref(), &request.path).await?;
    let looker = Looker::new(files).await;
    let mut entries = Vec::new();
    // The directories to list, the next last, with how deep to go.
    let mut open = vec![(path, request.depth.max(1))];
    let mut is_first = true;
    while let Some((directory, depth)) = open.pop() {
        let from = entries.len();
        match list_one(&looker, &directory, &mut entries).await {
            // One below that was removed meanwhile.
            Err(failure) if failure.code == Code::NotFound && !is_first => {}
            listed => listed?,
        }
        is_first = false;
        if depth > 1 {
            let listed = entries[from..].iter().rev();
            let below = listed.filter(|entry| entry.r#type() == FileType::Directory && !entry.is_symlink);
            open.extend(below.map(|entry| (entry.path.clone(), depth - 1)));
        }
    }
    Ok(ListDirResponse { entries })
}

/// Adds the entries of one directory, page by page.
async fn list_one(looker: &Looker, directory: &str, entries: &mut Vec<EntryInfo>) -> Result<(), Failure> {
    let mut after = Vec::new();
    loop {
        let page = looker.files.list(directory, after, FILES_PAGE).await?;
        if entries.len() + page.entries.len() > MOST_ENTRIES {
            let what =
                format!("the list has more than {MOST_ENTRIES} entries; list with less depth, or run find");
            return Err(Failure::new(Code::OutOfRange, what));
        }
        let last = page.entries.last().map(|entry| entry.name.clone());
        for info in page.entries {
            let path = paths::join(directory, &String::from_utf8_lossy(&info.name));
            entries.push(looker.entry(path, info).await);
        }
        match last {
            Some(last) if page.more => after = last,
            _ => return Ok(()),
        }
    }
}
