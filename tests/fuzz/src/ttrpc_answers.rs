//! What a guest's agent that was taken over answers the host's calls: frames of any stream, type and body, and bytes that are none.
//! Every call ends.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use thaw_protocol::agent::agent::{GetOOMEventRequest, ReadStreamRequest, WaitProcessRequest};
use thaw_protocol::agent::agent_ttrpc::AgentServiceClient;
use thaw_protocol::agent::answers::Answers;
use thaw_protocol::agent::files::{ListRequest, NextEventsRequest, NextPieceRequest, ReadFileRequest};
use thaw_protocol::agent::files_ttrpc::FilesClient;
use thaw_protocol::agent::processes::{ListProcessesRequest, ProcessOutputRequest};
use thaw_protocol::agent::processes_ttrpc::ProcessesClient;
use ttrpc::context::Context;
use ttrpc::r#async::Client;
use ttrpc::r#async::transport::Socket;

use crate::runtime::block_on;
use crate::script::Script;

const ANSWER: u8 = 2;
/// What a call may take that nothing holds up.
const PATIENCE: Duration = Duration::from_secs(20);

/// A byte says what follows: bytes as they are, or a frame: its stream, type, flags, and body with its length.
pub fn run(input: &[u8]) {
    let mut script = Script::new(input);
    let mut bytes = Vec::new();
    while !script.is_empty() {
        match script.byte() % 4 {
            0 => bytes.extend_from_slice(script.run()),
            kind => {
                let stream = u32::from(script.byte() % 18);
                let kind = if kind == 1 { script.byte() } else { ANSWER };
                let flags = script.byte();
                let length = script.word().into();
                let body = script.bytes(length);
                bytes.extend_from_slice(&(body.len() as u32).to_be_bytes());
                bytes.extend_from_slice(&stream.to_be_bytes());
                bytes.extend_from_slice(&[kind, flags]);
                bytes.extend_from_slice(body);
            }
        }
    }
    let called = async {
        let ended = tokio::time::timeout(PATIENCE, call(&bytes)).await;
        ended.expect("calls end where the agent has hung up");
    };
    block_on(called);
}

async fn call(bytes: &[u8]) {
    let (ours, mut theirs) = UnixStream::pair().expect("sockets");
    for socket in [&ours, &theirs] {
        socket.set_nonblocking(true).expect("a socket");
    }
    let stream = tokio::net::UnixStream::from_std(ours).expect("a socket");
    let client = Client::new(Socket::new(Answers::over(stream)));
    let (agent, files) = (AgentServiceClient::new(client.clone()), FilesClient::new(client.clone()));
    let processes = ProcessesClient::new(client);
    let context = Context::default;
    let (read, wait) = (ReadStreamRequest::default(), WaitProcessRequest::default());
    let (event, file) = (GetOOMEventRequest::default(), ReadFileRequest::default());
    let (list, piece) = (ListRequest::default(), NextPieceRequest::default());
    let events = NextEventsRequest::default();
    let (running, output) = (ListProcessesRequest::default(), ProcessOutputRequest::default());
    let answer = async {
        // The calls are sent first: an answer before its call would answer none.
        tokio::task::yield_now().await;
        // As much as a socket holds, and then the end.
        let _ = theirs.write(bytes);
        let _ = theirs.shutdown(Shutdown::Write);
    };
    let _ = tokio::join!(
        agent.read_stdout(context(), &read),
        agent.wait_process(context(), &wait),
        agent.get_oom_event(context(), &event),
        files.read(context(), &file),
        files.list(context(), &list),
        files.next_piece(context(), &piece),
        files.next_events(context(), &events),
        processes.list(context(), &running),
        processes.output(context(), &output),
        answer,
    );
}
