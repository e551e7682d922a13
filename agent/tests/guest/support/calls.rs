//! The host's calls of the agent API.

use std::time::Duration;

use thaw_protocol::agent::agent::*;
use thaw_protocol::agent::{MessageField, oci, types};
use ttrpc::context::Context;

use super::Guest;
use super::spec::process;

/// A call without an answer within this time counts as hung.
pub fn context() -> Context {
    ttrpc::context::with_duration(Duration::from_secs(60))
}

pub fn code_of(e: &ttrpc::Error) -> ttrpc::Code {
    match e {
        ttrpc::Error::RpcStatus(status) => status.code(),
        other => panic!("not a status: {other}"),
    }
}

impl Guest {
    pub async fn create(&self, id: &str, spec: oci::Spec) -> ttrpc::Result<()> {
        self.create_with(id, spec, Vec::new()).await
    }

    pub async fn create_with(
        &self,
        id: &str,
        mut spec: oci::Spec,
        storages: Vec<Storage>,
    ) -> ttrpc::Result<()> {
        spec.Linux.as_mut().unwrap().CgroupsPath = self.cgroup_path(id);
        let request = CreateContainerRequest {
            container_id: id.into(),
            exec_id: id.into(),
            storages,
            OCI: MessageField::some(spec),
            ..Default::default()
        };
        self.client.create_container(context(), &request).await.map(drop)
    }

    /// Creates a container that shares the sandbox's PID namespace.
    pub async fn create_sharing(&self, id: &str, mut spec: oci::Spec) -> ttrpc::Result<()> {
        spec.Linux.as_mut().unwrap().CgroupsPath = format!("/{}/{id}", self.cgroup);
        let request = CreateContainerRequest {
            container_id: id.into(),
            exec_id: id.into(),
            OCI: MessageField::some(spec),
            sandbox_pidns: true,
            ..Default::default()
        };
        self.client.create_container(context(), &request).await.map(drop)
    }

    pub async fn destroy(&self) {
        let request = DestroySandboxRequest::new();
        self.client.destroy_sandbox(context(), &request).await.unwrap();
    }

    pub async fn start(&self, id: &str) -> ttrpc::Result<()> {
        let request = StartContainerRequest {
            container_id: id.into(),
            ..Default::default()
        };
        self.client.start_container(context(), &request).await.map(drop)
    }

    pub async fn exec(&self, id: &str, exec: &str, args: &[&str], terminal: bool) -> ttrpc::Result<()> {
        let mut request = exec_request(id, exec, args);
        request.process.mut_or_insert_default().Terminal = terminal;
        self.client.exec_process(context(), &request).await.map(drop)
    }

    pub async fn exec_refused_without_terminal(&self, id: &str) {
        assert!(
            self.exec(id, "late", &["true"], true).await.is_err(),
            "the container has ended"
        );
    }

    pub async fn call_unknown(&self, id: &str) -> ttrpc::Result<()> {
        self.signal(id, "", 9).await
    }

    pub async fn wait(&self, id: &str, exec: &str) -> i32 {
        let request = WaitProcessRequest {
            container_id: id.into(),
            exec_id: exec.into(),
            ..Default::default()
        };
        self.client
            .wait_process(context(), &request)
            .await
            .unwrap()
            .status
    }

    pub async fn signal(&self, id: &str, exec: &str, signal: u32) -> ttrpc::Result<()> {
        let request = SignalProcessRequest {
            container_id: id.into(),
            exec_id: exec.into(),
            signal,
            ..Default::default()
        };
        self.client.signal_process(context(), &request).await.map(drop)
    }

    pub async fn remove(&self, id: &str) -> ttrpc::Result<()> {
        let request = RemoveContainerRequest {
            container_id: id.into(),
            timeout: 10,
            ..Default::default()
        };
        self.client.remove_container(context(), &request).await.map(drop)
    }

    pub async fn write(&self, id: &str, exec: &str, data: &[u8]) -> ttrpc::Result<u32> {
        let mut request = write_request(id, data);
        request.exec_id = exec.into();
        self.client.write_stdin(context(), &request).await.map(|r| r.len)
    }

    pub async fn close_stdin(&self, id: &str, exec: &str) -> ttrpc::Result<()> {
        let request = CloseStdinRequest {
            container_id: id.into(),
            exec_id: exec.into(),
            ..Default::default()
        };
        self.client.close_stdin(context(), &request).await.map(drop)
    }

    pub async fn resize(&self, id: &str, exec: &str, row: u32, column: u32) -> ttrpc::Result<()> {
        let request = TtyWinResizeRequest {
            container_id: id.into(),
            exec_id: exec.into(),
            row,
            column,
            ..Default::default()
        };
        self.client.tty_win_resize(context(), &request).await.map(drop)
    }

    pub async fn read(&self, id: &str, exec: &str, len: u32) -> ttrpc::Result<Vec<u8>> {
        let request = ReadStreamRequest {
            container_id: id.into(),
            exec_id: exec.into(),
            len,
            ..Default::default()
        };
        self.client.read_stdout(context(), &request).await.map(|r| r.data)
    }

    /// Reads stdout or stderr to the end.
    pub async fn read_all(&self, id: &str, exec: &str, stderr: bool) -> Vec<u8> {
        let request = ReadStreamRequest {
            container_id: id.into(),
            exec_id: exec.into(),
            len: 32768,
            ..Default::default()
        };
        let mut all = Vec::new();
        loop {
            let read = if stderr {
                self.client.read_stderr(context(), &request).await
            } else {
                self.client.read_stdout(context(), &request).await
            };
            match read {
                Ok(r) => {
                    assert!(!r.data.is_empty());
                    all.extend(r.data);
                }
                Err(e) if code_of(&e) == ttrpc::Code::OUT_OF_RANGE => return all,
                Err(e) => panic!("{e}"),
            }
        }
    }

    /// Reads stdout until it contains `text`.
    pub async fn read_until(&self, id: &str, exec: &str, text: &str) {
        let mut said = String::new();
        while !said.contains(text) {
            let more = tokio::time::timeout(Duration::from_secs(10), self.read(id, exec, 4096)).await;
            let more = more.unwrap_or_else(|_| panic!("waited for {text:?}, read {said:?}"));
            said.push_str(&String::from_utf8_lossy(
                &more.unwrap_or_else(|e| panic!("{e} after {said:?}")),
            ));
        }
    }

    pub async fn pause(&self, id: &str) -> ttrpc::Result<()> {
        let request = PauseContainerRequest {
            container_id: id.into(),
            ..Default::default()
        };
        self.client.pause_container(context(), &request).await.map(drop)
    }

    pub async fn resume(&self, id: &str) -> ttrpc::Result<()> {
        let request = ResumeContainerRequest {
            container_id: id.into(),
            ..Default::default()
        };
        self.client.resume_container(context(), &request).await.map(drop)
    }

    pub async fn stats(&self, id: &str) -> StatsContainerResponse {
        let request = StatsContainerRequest {
            container_id: id.into(),
            ..Default::default()
        };
        self.client.stats_container(context(), &request).await.unwrap()
    }

    pub async fn interfaces(&self) -> Vec<types::Interface> {
        self.client
            .list_interfaces(context(), &ListInterfacesRequest::new())
            .await
            .unwrap()
            .Interfaces
    }

    pub async fn routes(&self) -> Vec<types::Route> {
        self.client
            .list_routes(context(), &ListRoutesRequest::new())
            .await
            .unwrap()
            .Routes
    }
}

/// Asserts that the API answers, and that the container is gone.
pub async fn wait_gone(g: &Guest) {
    assert!(g.start("a").await.is_err());
}

pub fn exec_request(id: &str, exec: &str, args: &[&str]) -> ExecProcessRequest {
    ExecProcessRequest {
        container_id: id.into(),
        exec_id: exec.into(),
        process: MessageField::some(process(args)),
        ..Default::default()
    }
}

/// A write to the container's first process.
pub fn write_request(id: &str, data: &[u8]) -> WriteStreamRequest {
    WriteStreamRequest {
        container_id: id.into(),
        exec_id: id.into(),
        data: data.to_vec(),
        ..Default::default()
    }
}
