//! The shim process: serves containerd until it is shut down.

use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use thaw_protocol::shim::sandbox_ttrpc::create_sandbox;
use thaw_protocol::shim::task_ttrpc::create_task;
use tokio::sync::watch;
use ttrpc::r#async::Server;
use ttrpc::r#async::transport::Listener;

use crate::arguments::Arguments;
use crate::error::{Error, Result, WithContext};
use crate::events::Publisher;
use crate::pod::Pod;
use crate::service::Service;
use crate::thawd::Thawd;
use crate::{info, log};

/// Limit for containerd to receive the last events.
const FLUSH_LIMIT: Duration = Duration::from_secs(5);
/// Number of times to yield so that ttrpc's tasks can write the last answer, with some margin.
const ANSWERED: usize = 32;
/// Environment variable with the address at which containerd takes events.
const EVENTS: &str = "TTRPC_ADDRESS";

/// Serves on the listening socket that is standard input.
pub fn run(arguments: &Arguments) -> Result<()> {
    log::to_fifo(&arguments.bundle);
    let listener = take_listener()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .with_context(|| "start the runtime".into())?;
    let events = std::env::var(EVENTS).unwrap_or_else(|_| format!("{}.ttrpc", arguments.address));
    let served = runtime.block_on(async {
        let publisher = Publisher::new(&arguments.namespace, events);
        let pod = Pod::new(&arguments.namespace, Thawd::from_env(), publisher);
        serve(listener, pod).await
    });
    // Do not wait for threads that are blocked on a fifo without a reader.
    runtime.shutdown_background();
    served
}

/// Serves a pod on a socket until it is shut down.
pub async fn serve(listener: UnixListener, pod: Arc<Pod>) -> Result<()> {
    let (stop, mut stopped) = watch::channel(false);
    let socket = listener.local_addr().with_context(|| "listen".into())?;
    let service = Arc::new(Service {
        pod: pod.clone(),
        stop,
        socket: socket.as_pathname().map(Path::to_owned),
    });
    let failed = |e: ttrpc::Error| Error::Thawd(format!("ttrpc: {e}"));
    let listener = Listener::try_from(listener).with_context(|| "listen".into())?;
    let mut server = Server::new()
        .add_listener(listener)
        .register_service(create_task(service.clone()))
        .register_service(create_sandbox(service));
    server.start().await.map_err(failed)?;
    info!("serving");
    let _ = stopped.wait_for(|stopped| *stopped).await;
    server.stop_listen().await;
    pod.ended().await;
    // Meanwhile pending answers are written; other clients see the connection close.
    pod.events.flush(FLUSH_LIMIT).await;
    // Also write the answer to the shutdown itself: without it containerd reports that a sandbox could not be
    // removed.
    for _ in 0..ANSWERED {
        tokio::task::yield_now().await;
    }
    Ok(())
}

/// Takes the socket from standard input, so that no later child inherits it.
fn take_listener() -> Result<UnixListener> {
    let what = || "take the listening socket".into();
    let fd = rustix::io::fcntl_dupfd_cloexec(std::io::stdin().as_fd(), 3).with_context(what)?;
    let null = std::fs::File::open(Path::new("/dev/null")).with_context(what)?;
    rustix::stdio::dup2_stdin(null.as_fd()).with_context(what)?;
    Ok(UnixListener::from(fd))
}
