//! Serves a fake of the guest's agent behind a vsock socket, as the VMM does.

use std::collections::HashMap;
use std::path::Path;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use ttrpc::r#async::transport::Listener;
use ttrpc::r#async::{Server, Service};

/// Answers a connection as the VMM does, and passes it to the services.
pub(super) async fn serve(path: &Path, services: HashMap<String, Service>) -> Server {
    let listener = UnixListener::bind(path).unwrap();
    let (accepted, connections) = mpsc::channel::<std::io::Result<UnixStream>>(1);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut line = [0; 13];
            stream.read_exact(&mut line).await.unwrap();
            assert_eq!(&line, b"CONNECT 1024\n");
            stream.write_all(b"OK 5\n").await.unwrap();
            accepted.send(Ok(stream)).await.unwrap();
        }
    });
    let connections = futures_util::stream::unfold(connections, |mut connections| async move {
        Some((connections.recv().await?, connections))
    });
    let mut server = Server::new()
        .add_listener(Listener::new(connections))
        .register_service(services);
    server.start().await.unwrap();
    server
}
