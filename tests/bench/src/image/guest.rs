//! File systems as a guest sees them: an image over virtio-fs, without and with DAX, and as EROFS from a disk, beside the
//! same tree as ext4 on a disk of the same kind.
//!
//! The guest is Thaw's kernel with `bench-guest-files` as PID 1 in place of the agent, and says on its console what it
//! measured.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use thaw_images::store::Image;
use thaw_protocol::control::{Backend, BlobRange, Command, DeviceId, ImageSpec};

use crate::Report;
use crate::vmm::{Vmm, open_kvm};

/// What the guest writes before each measurement: `SUBJECT|WHAT|MILLISECONDS` follows.
pub const RESULT: &str = "result ";
/// The image's directory under the virtio-fs root.
pub const SLOT: &str = "tree";
/// The virtio-fs tag.
pub const TAG: &str = "thaw";
pub const DISK_EXT4: &str = "/dev/vda";
pub const DISK_EROFS: &str = "/dev/vdb";
/// The file that is read in parts.
pub const LARGE: &str = "large";
/// The word of the kernel's command line that says how often to measure.
pub const ROUNDS_WORD: &str = "guest_files_rounds=";
/// Enough for the tree in the page cache.
const MEMORY_MIB: u32 = 768;

/// A file system under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    Ext4,
    VirtioFs,
    VirtioFsDax,
    Erofs,
}

impl Subject {
    /// In the order of a round.
    pub const ALL: [Subject; 4] = [
        Subject::Ext4,
        Subject::VirtioFs,
        Subject::VirtioFsDax,
        Subject::Erofs,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Subject::Ext4 => "ext4 on virtio-blk",
            Subject::VirtioFs => "virtio-fs",
            Subject::VirtioFsDax => "virtio-fs with DAX",
            Subject::Erofs => "EROFS on virtio-blk",
        }
    }
}

/// What a run needs.
pub struct Setting<'a> {
    pub kernel: &'a Path,
    /// `bench-guest-files`.
    pub program: &'a Path,
    /// The tree's image, all of it in the store.
    pub image: &'a Image,
    /// The tree as ext4.
    pub ext4: &'a Path,
    /// For sockets and logs.
    pub directory: &'a Path,
}

/// Boots the guest, waits for its end, adds what it measured to the report.
///
/// # Errors
/// Also when the guest ended without having measured.
pub fn measure(setting: &Setting<'_>, rounds: usize, report: &mut Report) -> io::Result<()> {
    let guest_image = setting.directory.join("guest-files.erofs");
    thaw_images::guest_image::build(setting.program, &guest_image).map_err(io::Error::other)?;
    let (console, said) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let log: OwnedFd = File::create(setting.directory.join("guest-files.vmm"))?.into();
    let (kvm, kernel) = (open_kvm()?, File::open(setting.kernel)?);
    let mut vmm = Vmm::spawn(setting.directory, &log)?;
    vmm.create(&kvm, 1, MEMORY_MIB)?;
    vmm.attach(DeviceId::Console, Backend::Console, said.as_fd())?;
    drop(said);
    vmm.attach(DeviceId::Pmem0, Backend::Pmem, File::open(guest_image)?.as_fd())?;
    let disk = Backend::Disk { read_only: true };
    vmm.attach(DeviceId::Blk0, disk, File::open(setting.ext4)?.as_fd())?;
    // Everything is there: nobody answers misses.
    let (_nobody, misses) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let (blobs, mut descriptors) = export(setting.image)?;
    let image = ImageSpec {
        name: SLOT.into(),
        blobs: blobs.clone(),
    };
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    vmm.ask(Command::AddImage { slot: 1, image }, &borrowed)?;
    descriptors.push(misses);
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let attach = Command::Attach {
        device: DeviceId::Blk1,
        backend: Backend::Image { blobs },
    };
    vmm.ask(attach, &borrowed)?;
    vmm.settle()?;
    let cmdline = format!(
        "{} {ROUNDS_WORD}{rounds}",
        crate::boot::cmdline("root=/dev/pmem0 rootflags=dax")
    );
    vmm.call(Command::Boot { cmdline }, &[kernel.as_fd()])?;
    // Read to its end, which comes when the VMM ends.
    let listener = std::thread::spawn(move || listen(console));
    let ended = vmm.wait_for_end();
    drop(vmm);
    let said = listener
        .join()
        .map_err(|_| io::Error::other("reading the guest's console"))?;
    ended?;
    let mut results = 0;
    for line in said.iter().filter_map(|line| line.strip_prefix(RESULT)) {
        let mut fields = line.trim().split('|');
        let (Some(subject), Some(what), Some(ms)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        if let (Ok(ms), false) = (ms.parse(), what == "absent") {
            report.sample(&format!("{subject}: {what}"), "ms", ms);
            results += 1;
        }
    }
    match results {
        0 => Err(io::Error::other(format!(
            "the guest measured nothing: {}",
            said.join("\n")
        ))),
        _ => Ok(()),
    }
}

/// What the guest writes on its console, line by line; what it measures is shown as it comes.
fn listen(console: OwnedFd) -> Vec<String> {
    let mut said = Vec::new();
    for line in BufReader::new(File::from(console)).lines() {
        let Ok(line) = line else { break };
        eprintln!("guest: {}", line.trim_end());
        said.push(line);
    }
    said
}

/// An image's ranges, and the descriptors that go with them: metadata, then data and ready bitmap of each.
fn export(image: &Image) -> io::Result<(Vec<BlobRange>, Vec<OwnedFd>)> {
    let mut descriptors = vec![File::open(&image.metadata)?.into()];
    let mut ranges = Vec::new();
    for blob in &image.blobs {
        descriptors.push(File::open(&blob.data)?.into());
        descriptors.push(File::open(&blob.ready)?.into());
        ranges.push(BlobRange {
            address: blob.address,
            length: blob.length,
            digest: *blob.id.bytes(),
        });
    }
    Ok((ranges, descriptors))
}

/// The ratios of the report: how fast each is beside ext4, which is 1.
///
/// # Errors
/// Names the samples that are missing.
pub fn ratios(report: &mut Report) -> Result<(), String> {
    let mut ratio = |name: &str, what: &str, subject: Subject| {
        let row = |subject: Subject| format!("{}: {what}", subject.name());
        report.ratio(name, &row(Subject::Ext4), &row(subject))
    };
    ratio("metadata_cold_vs_ext4", "find, cold", Subject::VirtioFs)?;
    ratio("metadata_warm_vs_ext4", "find, warm", Subject::VirtioFs)?;
    ratio("metadata_erofs_vs_ext4", "find, cold", Subject::Erofs)?;
    ratio("seq_warm_vs_ext4", "sequential 128 KiB, warm", Subject::VirtioFs)?;
    // Not promised, so not missed.
    let _ = ratio(
        "seq_warm_dax_vs_ext4",
        "sequential 128 KiB, warm",
        Subject::VirtioFsDax,
    );
    let _ = ratio("tar_cold_vs_ext4", "tar, cold", Subject::VirtioFs);
    let _ = ratio("tar_erofs_vs_ext4", "tar, cold", Subject::Erofs);
    Ok(())
}
