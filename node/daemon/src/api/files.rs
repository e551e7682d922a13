//! The files of a container, which the guest's agent reads and writes.

use async_trait::async_trait;
use thaw_protocol::agent::files::{ReadFileRequest, WriteFileRequest};
use thaw_sandbox::agent_client::AgentClient;
use thaw_sandbox::error::{Error, ErrorKind};
use ttrpc::Code;

use super::problem::{ApiCode, Refusal};

/// Largest piece that the agent reads or writes at once, bytes.
pub const PIECE: usize = 256 << 10;

/// A piece of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Shorter than [`PIECE`] only at the end.
    pub data: Vec<u8>,
    /// 0 also for files without a size, such as those of /proc.
    pub size: u64,
    pub mode: u32,
    /// Identifies the file, so that a file that replaces it is noticed.
    pub identity: u64,
}

/// The file that is being written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upload {
    pub path: String,
    /// Different for each upload.
    pub name: String,
    /// The mode of a new file.
    pub mode: u32,
}

/// The files of one container.
#[async_trait]
pub trait Files: std::fmt::Debug + Send + Sync {
    /// Reads a piece at an offset. An identity other than 0 must be the file's.
    async fn read(&self, path: &str, offset: u64, identity: u64) -> Result<Piece, Refusal>;
    /// Writes a piece, in order. The file appears with the last.
    async fn write(&self, upload: &Upload, offset: u64, data: Vec<u8>, last: bool) -> Result<(), Refusal>;
    /// Discards an upload.
    async fn abandon(&self, upload: &Upload);
}

/// The files behind a guest's agent.
#[derive(Debug)]
pub struct GuestFiles {
    pub agent: AgentClient,
    pub container: String,
}

#[async_trait]
impl Files for GuestFiles {
    async fn read(&self, path: &str, offset: u64, identity: u64) -> Result<Piece, Refusal> {
        let request = ReadFileRequest {
            container_id: self.container.clone(),
            path: path.into(),
            offset,
            length: PIECE as u32,
            identity,
            ..Default::default()
        };
        let answer = self.agent.read_file(&request).await.map_err(refusal)?;
        Ok(Piece {
            data: answer.data,
            size: answer.size,
            mode: answer.mode,
            identity: answer.identity,
        })
    }

    async fn write(&self, upload: &Upload, offset: u64, data: Vec<u8>, last: bool) -> Result<(), Refusal> {
        let request = WriteFileRequest {
            container_id: self.container.clone(),
            path: upload.path.clone(),
            upload: upload.name.clone(),
            offset,
            data,
            last,
            mode: upload.mode,
            ..Default::default()
        };
        self.agent.write_file(&request).await.map_err(refusal)
    }

    async fn abandon(&self, upload: &Upload) {
        let request = WriteFileRequest {
            container_id: self.container.clone(),
            path: upload.path.clone(),
            upload: upload.name.clone(),
            abandon: true,
            ..Default::default()
        };
        if let Err(e) = self.agent.write_file(&request).await {
            tracing::debug!("an upload stays behind in its container: {e}");
        }
    }
}

/// The agent's status code tells whether the caller or the guest is at fault.
fn refusal(error: ttrpc::Error) -> Refusal {
    let ttrpc::Error::RpcStatus(status) = &error else {
        let what = format!("the guest's agent does not answer: {error}");
        return Error::new(ErrorKind::AgentFailed, what).into();
    };
    let code = match status.code() {
        Code::NOT_FOUND => ApiCode::NoFile,
        Code::INVALID_ARGUMENT => ApiCode::NotAFile,
        Code::FAILED_PRECONDITION => ApiCode::FileRefused,
        Code::RESOURCE_EXHAUSTED => ApiCode::NoRoom,
        _ => return Error::new(ErrorKind::AgentFailed, status.message()).into(),
    };
    Refusal::new(code, status.message())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agents_codes_say_whose_fault_it_is() {
        let code = |code: Code| match refusal(ttrpc::Error::RpcStatus(ttrpc::get_status(code, "x"))) {
            Refusal::Api(code, _) => Some(code),
            Refusal::Failure(_) => None,
        };
        assert_eq!(code(Code::NOT_FOUND), Some(ApiCode::NoFile));
        assert_eq!(code(Code::INVALID_ARGUMENT), Some(ApiCode::NotAFile));
        assert_eq!(code(Code::FAILED_PRECONDITION), Some(ApiCode::FileRefused));
        assert_eq!(code(Code::RESOURCE_EXHAUSTED), Some(ApiCode::NoRoom));
        assert_eq!(code(Code::INTERNAL), None);
        assert!(
            matches!(refusal(ttrpc::Error::LocalClosed), Refusal::Failure(f) if f.kind == ErrorKind::AgentFailed)
        );
    }
}
