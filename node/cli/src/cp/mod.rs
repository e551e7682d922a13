//! `thaw cp`: copies files and directories between this host and a sandbox, over the sandbox's vsock socket.
//!
//! Invariants: what a guest sends is unpacked only below the destination, and under the name that was asked for; a guest makes no devices
//! and no set-user-ID files on this host.

mod guest;
mod plan;

use std::ffi::OsString;
use std::fs::File;
use std::io::{IsTerminal, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use clap::Args;
use thaw_archive::{Feed, Links, PIECE, Part, Root, Sink, Unpacking};
use thaw_sandbox::error::{Error, ErrorKind, is_full};
use tokio::sync::mpsc;

use guest::Guest;
use plan::{End, Source, plan};

/// Pieces of the archive between the agent and the file system.
const PARTS: usize = 4;

const EXAMPLES: &str = "\
Examples:
  thaw cp ./site web:/srv                 the directory, as /srv/site
  thaw cp ./site/. web:/srv               what is in it
  thaw cp web:/var/log/app.log .
  thaw cp web:/etc - | tar -t             as a tar stream
  tar -c site | thaw cp - web:/srv        DST must be a directory

Names are as for `docker cp`. Copying into a sandbox makes files of root, copying out of it makes files of yours, unless
--archive keeps the numbers of their owners. Sockets are left out. Out of a sandbox, devices are refused and set-user-ID
bits are cleared.";

#[derive(Debug, Args)]
#[command(
    after_help = EXAMPLES,
    override_usage = "thaw cp [OPTIONS] SANDBOX:PATH DST|-\n       thaw cp [OPTIONS] SRC|- SANDBOX:PATH"
)]
pub struct CopyArguments {
    /// Keep the numbers of owners and groups
    #[arg(short, long)]
    pub archive: bool,
    /// If SRC is a link, copy what it leads to
    #[arg(short = 'L', long)]
    pub follow_link: bool,
    /// SANDBOX:PATH, a path of this host, or `-` for a tar stream on stdin
    #[arg(value_name = "SRC")]
    pub source: OsString,
    /// SANDBOX:PATH, a path of this host, or `-` for a tar stream on stdout
    #[arg(value_name = "DST")]
    pub destination: OsString,
}

/// `thaw cp`.
pub(super) async fn copy(arguments: &CopyArguments) -> Result<u8, Error> {
    let source = End::parse(&arguments.source).map_err(wrong)?;
    let destination = End::parse(&arguments.destination).map_err(wrong)?;
    match (source, destination) {
        (End::Sandbox { .. }, End::Sandbox { .. }) => {
            Err(wrong("nothing is copied from one sandbox to another directly")
                .remedy("pass it on: thaw cp A:PATH - | thaw cp - B:PATH"))
        }
        (End::Sandbox { sandbox, path }, destination) => {
            let guest = Guest::find(&sandbox).await?;
            copy_out(&guest, &path, destination, arguments).await?;
            Ok(0)
        }
        (source, End::Sandbox { sandbox, path }) => {
            let guest = Guest::find(&sandbox).await?;
            copy_in(&guest, source, &path, arguments).await?;
            Ok(0)
        }
        _ => Err(wrong("neither SRC nor DST is in a sandbox").remedy("write SANDBOX:PATH for one of them")),
    }
}

/// From a sandbox to this host.
async fn copy_out(guest: &Guest, path: &Path, to: End, arguments: &CopyArguments) -> Result<(), Error> {
    let found = match guest.look(path, arguments.follow_link).await? {
        Some(found) => found,
        None => return Err(missing(guest, path).await?),
    };
    let name = path.file_name().unwrap_or(".".as_ref()).to_owned();
    let source = Source {
        path,
        name,
        is_directory: found.is_directory,
    };
    let End::Host(destination) = to else {
        let here = Path::new("/");
        let name = plan(&source, here, Some(true)).map_err(wrong)?.name;
        return write_stream(guest, path, name, arguments.follow_link).await;
    };
    // Where it leads, if it is a link: the file there is replaced, not the link.
    let destination = match std::fs::canonicalize(&destination) {
        Ok(real) if !plan::asserts_directory(&destination) => real,
        _ => destination,
    };
    let there = std::fs::metadata(&destination).ok().map(|m| m.is_dir());
    let plan = plan(&source, &destination, there).map_err(wrong)?;
    let directory = open_path(&plan.directory, libc::O_DIRECTORY)?;
    let how = Unpacking {
        keep_owner: arguments.archive,
        trusted: false,
        only: (plan.name != ".").then(|| plan.name.clone()),
    };
    let (parts, receiver) = mpsc::channel(PARTS);
    let unpacking = tokio::task::spawn_blocking(move || {
        let root = Root::new(directory.as_fd(), Links::Refused);
        thaw_archive::unpack(root, Path::new(""), Feed::new(receiver), &how)
    });
    let sent = guest
        .pack(path, &plan.name, arguments.follow_link, async |part| {
            parts.send(part).await.is_ok()
        })
        .await;
    drop(parts);
    let unpacked = unpacking.await.map_err(|e| wrong(e.to_string()))?;
    // An error of the guest says why the archive broke off.
    sent?;
    unpacked.map_err(|e| failed(e, &plan.directory))
}

/// The error for a path that is not in the sandbox, or not as a directory.
async fn missing(guest: &Guest, path: &Path) -> Result<Error, Error> {
    // Without a slash at the end.
    let file: PathBuf = path.components().collect();
    let what = match guest.look(&file, false).await? {
        Some(_) => format!("{} is not a directory", file.display()),
        None => format!("there is no {} in the sandbox", path.display()),
    };
    Ok(wrong(what).remedy("check the path in the sandbox"))
}

/// From a sandbox to stdout.
async fn write_stream(guest: &Guest, path: &Path, name: OsString, follow: bool) -> Result<(), Error> {
    if std::io::stdout().is_terminal() {
        return Err(wrong("an archive is not written to a terminal")
            .remedy("redirect it to a file, or pipe it to tar"));
    }
    let (parts, mut receiver) = mpsc::channel(PARTS);
    let writing = tokio::task::spawn_blocking(move || {
        let mut out = std::io::stdout().lock();
        while let Some(Part::Data(data)) = receiver.blocking_recv() {
            out.write_all(&data)?;
        }
        out.flush()
    });
    let sent = guest
        .pack(path, &name, follow, async |part| parts.send(part).await.is_ok())
        .await;
    drop(parts);
    let written = writing.await.map_err(|e| wrong(e.to_string()))?;
    sent?;
    written.map_err(|e| Error::system("cannot write the archive to stdout", &e))
}

/// From this host into a sandbox.
async fn copy_in(guest: &Guest, from: End, path: &Path, arguments: &CopyArguments) -> Result<(), Error> {
    let End::Host(source) = from else {
        let there = guest.look(path, true).await?;
        if !there.is_some_and(|found| found.is_directory) {
            let what = format!("{} is not a directory in the sandbox", path.display());
            return Err(wrong(what).remedy("name one that exists: the archive is unpacked in it"));
        }
        return send(guest, path, arguments.archive, read_stream).await;
    };
    let no_follow = match arguments.follow_link {
        true => 0,
        false => libc::O_NOFOLLOW,
    };
    let top = open_path(&source, no_follow)?;
    let stat = rustix::fs::fstat(&top).map_err(|e| cannot_open(&source, &e.into()))?;
    let is_directory = rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::Directory;
    let described = Source {
        path: &source,
        name: own_name(&source)?,
        is_directory,
    };
    let (destination, there) = guest.real(path).await?;
    let plan = plan(&described, &destination, there).map_err(wrong)?;
    let name = plan.name.clone();
    send(guest, &plan.directory, arguments.archive, move |sink| {
        thaw_archive::pack(top, Path::new(&name), sink)
    })
    .await
}

/// Sends what a thread writes.
async fn send(
    guest: &Guest,
    directory: &Path,
    keep_owner: bool,
    write: impl FnOnce(&mut Sink) -> Result<(), thaw_archive::Error> + Send + 'static,
) -> Result<(), Error> {
    let (parts, receiver) = mpsc::channel(PARTS);
    let packing = std::thread::spawn(move || {
        let mut sink = Sink::new(parts);
        let result = write(&mut sink);
        sink.finish(result);
    });
    // If the guest refuses, the thread may still wait for stdin, and ends with this process.
    guest.unpack(directory, keep_owner, receiver).await?;
    packing
        .join()
        .map_err(|_| wrong("the thread that reads the files has ended"))
}

/// Passes stdin on.
fn read_stream(sink: &mut Sink) -> Result<(), thaw_archive::Error> {
    let mut buffer = vec![0; PIECE];
    let mut stdin = std::io::stdin().lock();
    loop {
        let read = stdin.read(&mut buffer);
        let copied = read.and_then(|read| sink.write_all(&buffer[..read]).map(|()| read));
        match copied {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(e) => return Err(thaw_archive::Error::Refused(format!("cannot read stdin: {e}"))),
        }
    }
}

/// The name of a path of this host, also of `.` and `dir/..`.
fn own_name(path: &Path) -> Result<OsString, Error> {
    match path.file_name() {
        Some(name) => Ok(name.to_owned()),
        None => {
            let real = std::fs::canonicalize(path).map_err(|e| cannot_open(path, &e))?;
            Ok(real.file_name().unwrap_or(".".as_ref()).to_owned())
        }
    }
}

/// Opens a path of this host without reading it.
fn open_path(path: &Path, flags: i32) -> Result<OwnedFd, Error> {
    let mut options = File::options();
    options.read(true).custom_flags(libc::O_PATH | flags);
    let opened = options.open(path).map_err(|e| cannot_open(path, &e))?;
    Ok(opened.into())
}

fn cannot_open(path: &Path, error: &std::io::Error) -> Error {
    wrong(format!("cannot open {}: {error}", path.display())).remedy("check the path on this host")
}

/// An error while files were read or written here.
fn failed(error: thaw_archive::Error, directory: &Path) -> Error {
    match &error {
        thaw_archive::Error::File { source, .. } if is_full(source) => {
            Error::new(ErrorKind::DiskFull, error.to_string())
        }
        thaw_archive::Error::File { .. } => {
            wrong(error.to_string()).remedy(format!("check what is in {}", directory.display()))
        }
        thaw_archive::Error::Refused(_) => {
            wrong(error.to_string()).remedy("to see what the archive has: thaw cp SANDBOX:PATH - | tar -tv")
        }
    }
}

fn wrong(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::Runtime, what).remedy("see `thaw cp --help`")
}
