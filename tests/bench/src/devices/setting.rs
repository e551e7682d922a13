//! What the guests of both VMMs use: files, network slots, and a server outside.

use std::fs::{self, File};
use std::io::{self, Write};
use std::net::{SocketAddrV4, TcpListener};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use thaw_network::{NetworkSlot, Networks, Setup};
use thaw_pools::resource::Kind;

use super::{AREA_AT, AREA_BYTES, ORDER_AT, ORDER_BYTES, Order, VOLUME, VOLUME_BYTES, VOLUME_FILE, transfer};
use crate::network::place::{OUTSIDE, Place};

/// Memory of each guest, in MiB.
pub const MEMORY_MIB: u32 = 512;
const PORT: u16 = 5201;

/// See the module.
pub struct Setting {
    pub kernel: PathBuf,
    /// For sockets, logs and the files below.
    pub directory: PathBuf,
    pub guest_image: PathBuf,
    pub disk: PathBuf,
    /// The directory that has the volume's as its only entry.
    pub shared: PathBuf,
    /// Each VMM has a tap of its own, because QEMU changes the settings of a tap that it is given.
    pub thaw: NetworkSlot,
    pub qemu: NetworkSlot,
    networks: Networks,
    _place: Place,
}

impl Setting {
    /// Makes it all in `directory`, whose file system must have room for the disk. `program` is `bench-guest-devices`. Moves the calling
    /// thread to a host of its own.
    pub fn make(kernel: &Path, program: &Path, directory: &Path) -> Result<Setting, String> {
        let place = Place::enter()?;
        serve(place.listener(PORT)?).map_err(|e| format!("a server: {e}"))?;
        let networks = Networks::new(Setup::default());
        let slot = || networks.make(&()).map_err(|e| format!("a slot: {e}"));
        let (thaw, qemu) = (slot()?, slot()?);
        let guest_image = directory.join("guest-devices.erofs");
        thaw_images::guest_image::build(program, &guest_image).map_err(|e| e.to_string())?;
        let (disk, shared) = (directory.join("disk"), directory.join("shared"));
        make_disk(&disk, &guest_image).map_err(|e| format!("{}: {e}", disk.display()))?;
        make_volume(&shared).map_err(|e| format!("{}: {e}", shared.display()))?;
        Ok(Setting {
            kernel: kernel.into(),
            directory: directory.into(),
            guest_image,
            disk,
            shared,
            thaw,
            qemu,
            networks,
            _place: place,
        })
    }

    /// Writes onto the disk what the next guest is to do.
    pub fn order(&self, rounds: usize, volume: bool) -> io::Result<()> {
        let order = Order {
            rounds,
            network: self.thaw.config.clone(),
            server: SocketAddrV4::new(OUTSIDE, PORT),
            volume,
        };
        let mut bytes = serde_json::to_vec(&order)?;
        bytes.resize(ORDER_BYTES, 0);
        let disk = File::options().write(true).open(&self.disk)?;
        disk.write_all_at(&bytes, ORDER_AT)
    }

    /// Removes the networks.
    pub fn end(self) {
        self.networks.destroy(self.thaw);
        self.networks.destroy(self.qemu);
    }
}

/// Answers guests as long as this process lives. A guest that was killed does not end its connection.
fn serve(listener: TcpListener) -> io::Result<()> {
    let serving = move || {
        for mut connection in listener.incoming().flatten() {
            std::thread::spawn(move || transfer::serve(&mut connection));
        }
    };
    std::thread::Builder::new()
        .name("server".into())
        .spawn(serving)
        .map(drop)
}

/// A disk that begins with the guest's root and whose area has no hole.
fn make_disk(disk: &Path, guest_image: &Path) -> io::Result<()> {
    fs::copy(guest_image, disk)?;
    let file = File::options().write(true).open(disk)?;
    file.set_len(AREA_AT + AREA_BYTES)?;
    let bytes = vec![1; 1 << 20];
    for at in (0..AREA_BYTES).step_by(bytes.len()) {
        file.write_all_at(&bytes, AREA_AT + at)?;
    }
    file.sync_all()
}

fn make_volume(shared: &Path) -> io::Result<()> {
    let volume = shared.join(VOLUME);
    fs::create_dir_all(&volume)?;
    let mut file = File::create(volume.join(VOLUME_FILE))?;
    let bytes = vec![1; 1 << 20];
    for _ in (0..VOLUME_BYTES).step_by(bytes.len()) {
        file.write_all(&bytes)?;
    }
    file.sync_all()
}
