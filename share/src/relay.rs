//! The stream from and to the VMM, and the threads that serve it.
//!
//! Each thread in turn reads one request whole, lets the next one read, serves it and writes its reply whole: there is no queue, and no
//! more memory than the threads have. A file system that does not answer holds up one thread, not the others. Reading and serving never
//! wait for the VMM to take a reply, unless all threads have one in hand; the VMM always takes replies.

use std::io::{self, Read};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;

use rustix::thread::UnshareFlags;
use thaw_protocol::share::{HeaderError, ReplyHeader, RequestHeader};
use thaw_sys::lock::Lock;
use virtiofsd::filesystem::FileSystem;
use virtiofsd::server::Server;

use crate::message::Slate;

/// Threads: as many file operations go on at a time.
pub const THREADS: usize = 4;

/// Why serving ended.
#[derive(Debug, thiserror::Error)]
pub enum End {
    /// As it should.
    #[error("the VMM has ended")]
    Closed,
    #[error("the VMM sent {0}")]
    Header(#[from] HeaderError),
    #[error("the relay: {0}")]
    Io(io::Error),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> End {
        match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                End::Closed
            }
            _ => End::Io(error),
        }
    }
}

/// What the threads share.
struct Shared<F: FileSystem + Sync> {
    server: Server<F>,
    input: Mutex<UnixStream>,
    output: Mutex<UnixStream>,
}

/// Starts the threads. The first word that comes is why serving ended; the others of them then end too, when what they are at
/// is done.
///
/// # Errors
/// Where threads or memory cannot be had.
pub fn start<F: FileSystem + Send + Sync + 'static>(
    relay: UnixStream,
    file_system: F,
) -> io::Result<Receiver<End>> {
    let shared = Arc::new(Shared {
        server: Server::new(file_system),
        input: Mutex::new(relay.try_clone()?),
        output: Mutex::new(relay),
    });
    let (ended, ends) = channel();
    for number in 0..THREADS {
        let mut slate = Slate::new()?;
        let (shared, ended) = (shared.clone(), ended.clone());
        thread::Builder::new()
            .name(format!("serve-{number}"))
            .spawn(move || tell_end(&shared, &ended, |shared| run(shared, &mut slate, &ended)))?;
    }
    Ok(ends)
}

fn tell_end<F: FileSystem + Sync>(
    shared: &Shared<F>,
    ended: &Sender<End>,
    run: impl FnOnce(&Shared<F>) -> End,
) {
    let end = run(shared);
    // Nobody listens any more after the first; told before the other threads find the stream closed.
    let _ = ended.send(end);
    let _ = shared.output.locked().shutdown(Shutdown::Both);
}

fn run<F: FileSystem + Sync>(shared: &Shared<F>, slate: &mut Slate, ended: &Sender<End>) -> End {
    // virtiofsd changes directory and file mode mask while it serves a message: they are each thread's own.
    if let Err(error) = thaw_sys::jail::unshare(UnshareFlags::FS) {
        return End::Io(error.into());
    }
    loop {
        if let Err(end) = serve_one(shared, slate, ended) {
            return end;
        }
    }
}

fn serve_one<F: FileSystem + Sync>(
    shared: &Shared<F>,
    slate: &mut Slate,
    ended: &Sender<End>,
) -> Result<(), End> {
    let header = {
        let mut input = shared.input.locked();
        let mut header = [0; RequestHeader::BYTES];
        input.read_exact(&mut header)?;
        let header = match RequestHeader::decode(&header) {
            Ok(header) => header,
            Err(e) => {
                // Told while the stream is held: whoever reads it next may find its end, which is no reason.
                let _ = ended.send(e.into());
                return Err(End::Closed);
            }
        };
        slate.read(&mut *input, header.length)?;
        header
    };
    let length = slate.serve(&shared.server, header.length, header.room)?;
    if header.room == 0 {
        return Ok(());
    }
    let reply = ReplyHeader {
        id: header.id,
        length,
    };
    slate.write(&mut *shared.output.locked(), &reply.encode(), length)?;
    Ok(())
}
