//! PID 1 of the guest that measures its devices: the disk, a connection to a server outside, a volume, and vsock. It says on the console what it
//! measured, and then waits to be ended.

#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Instant;

use rustix::mount::{MountFlags, mount};
use thaw_bench::devices::{
    AREA_AT, AREA_BYTES, BLOCK, DISK, DISK_BOTH, DISK_READS, DISK_WRITES, END, NET_IN, NET_OUT, ORDER_AT,
    ORDER_BYTES, Order, RESULT, VOLUME, VOLUME_BYTES, VOLUME_FILE, VOLUME_WRITES, VSOCK_IN, VSOCK_OUT,
    transfer,
};
use thaw_protocol::handshake::HANDSHAKE_PORT;
use thaw_protocol::share::TAG;
use vsock::{VMADDR_CID_ANY, VsockAddr, VsockListener};

/// Reads and writes of each kind in a round.
const OPERATIONS: u64 = 500;
const MOUNTED: &str = "/tmp/shared";

fn main() {
    std::panic::set_hook(Box::new(|panic| println!("guest-devices: {panic}")));
    if std::panic::catch_unwind(measure).is_err() {
        power_off();
    }
    println!("{END}");
    loop {
        std::thread::park();
    }
}

fn measure() {
    prepare();
    let order = order();
    thaw_agent::network::configure(&order.network).unwrap();
    let mut connection = TcpStream::connect(order.server).unwrap();
    let listener = VsockListener::bind(&VsockAddr::new(VMADDR_CID_ANY, HANDSHAKE_PORT)).unwrap();
    let (mut host, _) = listener.accept().unwrap();
    transfer::wait_for_host(&mut host).unwrap();
    let disk = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(DISK)
        .unwrap();
    let volume = order.volume.then(open_volume);
    for round in 0..=order.rounds {
        let say = |what: &str, unit: &str, value: f64| {
            // The first warms up.
            if round > 0 {
                println!("{RESULT}{what}|{unit}|{value:.3}");
            }
        };
        let reads = timed(|| random(AREA_BYTES, |at, block| disk.read_exact_at(block, AREA_AT + at)));
        let writes = timed(|| random(AREA_BYTES, |at, block| disk.write_all_at(block, AREA_AT + at)));
        let rate = |operations: u64, seconds: f64| operations as f64 / seconds;
        say(DISK_READS, "op/s", rate(OPERATIONS, reads));
        say(DISK_WRITES, "op/s", rate(OPERATIONS, writes));
        say(DISK_BOTH, "op/s", rate(2 * OPERATIONS, reads + writes));
        if let Some(file) = &volume {
            let took = timed(|| random(VOLUME_BYTES, |at, block| file.write_all_at(block, at)));
            say(VOLUME_WRITES, "op/s", rate(OPERATIONS, took));
        }
        let to_server = [NET_OUT, NET_IN].into_iter().zip(exchange(&mut connection));
        let to_host = [VSOCK_OUT, VSOCK_IN].into_iter().zip(exchange(&mut host));
        to_server
            .chain(to_host)
            .for_each(|(what, rate)| say(what, "Mbit/s", rate));
    }
}

fn prepare() {
    // The kernel may have mounted it already.
    let _ = mount("devtmpfs", "/dev", "devtmpfs", MountFlags::empty(), None);
    mount("proc", "/proc", "proc", MountFlags::empty(), None).unwrap();
    mount("sysfs", "/sys", "sysfs", MountFlags::empty(), None).unwrap();
    mount("tmpfs", "/tmp", "tmpfs", MountFlags::empty(), None).unwrap();
    fs::create_dir(MOUNTED).unwrap();
}

/// From the disk.
fn order() -> Order {
    let mut bytes = vec![0; ORDER_BYTES];
    File::open(DISK)
        .unwrap()
        .read_exact_at(&mut bytes, ORDER_AT)
        .unwrap();
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(ORDER_BYTES);
    serde_json::from_slice(&bytes[..end]).unwrap()
}

fn open_volume() -> File {
    mount(TAG, MOUNTED, "virtiofs", MountFlags::empty(), None).unwrap();
    let path = Path::new(MOUNTED).join(VOLUME).join(VOLUME_FILE);
    File::options().write(true).open(path).unwrap()
}

/// Megabits a second, out and in.
fn exchange(connection: &mut (impl Read + Write)) -> [f64; 2] {
    let out = timed(|| transfer::outward(connection).unwrap());
    let back = timed(|| transfer::inward(connection).unwrap());
    [out, back].map(|seconds| 8.0 * transfer::BYTES as f64 / seconds / 1e6)
}

/// Seconds.
fn timed(action: impl FnOnce()) -> f64 {
    let began = Instant::now();
    action();
    began.elapsed().as_secs_f64()
}

/// A block at an address that direct reads and writes take.
#[repr(align(4096))]
struct Aligned([u8; BLOCK]);

/// Does something with each of [`OPERATIONS`] blocks of the first `length` bytes.
fn random(length: u64, mut action: impl FnMut(u64, &mut [u8]) -> std::io::Result<()>) {
    let mut block = Box::new(Aligned([1; BLOCK]));
    let mut state = 88_172_645_463_325_252u64;
    for _ in 0..OPERATIONS {
        // xorshift64
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        action(state % (length / BLOCK as u64) * BLOCK as u64, &mut block.0).unwrap();
    }
}

fn power_off() -> ! {
    let _ = std::io::stdout().flush();
    let _ = rustix::system::reboot(rustix::system::RebootCommand::PowerOff);
    loop {
        std::thread::park();
    }
}
