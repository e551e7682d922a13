//! The stream from and to the VMM, and the threads that serve it.
//!
//! Each thread takes one complete request, serves it and writes the complete reply. There is no queue, and memory
//! is limited to that of the threads. A file system that does not answer blocks one thread and not the others.
//! Taking and serving wait for the VMM to take replies only when every thread has one to write, and the VMM
//! always takes replies.
//!
//! What arrives wakes one thread ([`Arrivals`]). It wakes another only if more has come than its own request,
//! so requests that come one at a time are served by one thread, with four system calls each. What the guest opens
//! goes to the VMM ([`opened`]), which then sends no reads and writes of it but those that it cannot serve.

use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;

use rustix::thread::UnshareFlags;
use thaw_protocol::share::ReplyHeader;
use thaw_sys::lock::Lock;
use virtiofsd::filesystem::FileSystem;
use virtiofsd::server::Server;

use crate::arrivals::Arrivals;
use crate::end::End;
use crate::input::Input;
use crate::message::MessageBuffer;
use crate::opened;

/// Number of threads, and so of concurrent file operations.
pub const THREADS: usize = 4;

/// State that the threads share.
struct Shared<F: FileSystem + Sync> {
    server: Server<F>,
    arrivals: Arrivals,
    input: Mutex<Input>,
    output: Mutex<UnixStream>,
}

/// Starts the threads, for the stream whose arrivals these are. The first message received is the reason why
/// serving ended; the other threads then end after their present request.
///
/// # Errors
/// Threads or memory are not available.
pub fn start<F: FileSystem + Send + Sync + 'static>(
    relay: UnixStream,
    arrivals: Arrivals,
    file_system: F,
) -> io::Result<Receiver<End>> {
    let shared = Arc::new(Shared {
        server: Server::new(file_system),
        arrivals,
        input: Mutex::new(Input::new(relay.try_clone()?)),
        output: Mutex::new(relay),
    });
    let (ended, ends) = channel();
    for number in 0..THREADS {
        let mut buffer = MessageBuffer::new()?;
        let (shared, ended) = (shared.clone(), ended.clone());
        thread::Builder::new()
            .name(format!("serve-{number}"))
            .spawn(move || report_end(&shared, &ended, |shared| run(shared, &mut buffer, &ended)))?;
    }
    Ok(ends)
}

fn report_end<F: FileSystem + Sync>(
    shared: &Shared<F>,
    ended: &Sender<End>,
    run: impl FnOnce(&Shared<F>) -> End,
) {
    let end = run(shared);
    // Only the first message is received. It is sent before the other threads see the stream closed.
    let _ = ended.send(end);
    let _ = shared.output.locked().shutdown(Shutdown::Both);
    shared.arrivals.wake_another();
}

fn run<F: FileSystem + Sync>(shared: &Shared<F>, buffer: &mut MessageBuffer, ended: &Sender<End>) -> End {
    // virtiofsd changes the working directory and umask while it serves a message, so each thread needs its
    // own.
    if let Err(error) = thaw_sys::jail::unshare(UnshareFlags::FS) {
        return End::Io(error.into());
    }
    loop {
        if let Err(end) = serve_one(shared, buffer, ended) {
            return end;
        }
    }
}

fn serve_one<F: FileSystem + Sync>(
    shared: &Shared<F>,
    buffer: &mut MessageBuffer,
    ended: &Sender<End>,
) -> Result<(), End> {
    let is_closed = shared.arrivals.wait()?;
    let header = {
        let mut input = shared.input.locked();
        if is_closed {
            input.ends();
        }
        let taken = input.take(buffer).map_err(|end| {
            // Sent while the stream is locked: the next reader may see only that it is closed, which is not
            // the reason.
            let _ = ended.send(end);
            End::Closed
        });
        let Some(header) = taken? else { return Ok(()) };
        if input.may_have_more() {
            shared.arrivals.wake_another();
        }
        header
    };
    let length = buffer.serve(&shared.server, header.length, header.room)?;
    let opened = opened::take();
    if header.room == 0 {
        return Ok(());
    }
    let reply = ReplyHeader {
        id: header.id,
        length,
    };
    let mut output = shared.output.locked();
    match opened {
        Some(file) => buffer.write_with(&mut output, &reply.encode(), length, file.as_fd())?,
        None => buffer.write(&mut *output, &reply.encode(), length)?,
    }
    Ok(())
}

#[cfg(test)]
#[path = "relay_test.rs"]
mod tests;
