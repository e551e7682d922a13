//! A vsock device between a driver that sends any packets and clients that connect, say anything and go.

use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use thaw_protocol::control::{Backend, DeviceId};
use thaw_vmm::events::EventSink;
use thaw_vmm::virtio::VirtioDevice;
use thaw_vmm::virtio::event_loop::EventLoop;
use thaw_vmm::virtio::vsock::Vsock;

use crate::guest::{self, World};
use crate::script::Script;

/// Clients at once.
const CLIENTS: usize = 8;

struct Clients {
    device: Option<Arc<Mutex<Vsock>>>,
    address: Option<SocketAddr>,
    clients: Vec<UnixStream>,
}

/// A listening socket without a file.
fn listener() -> (UnixListener, SocketAddr) {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("thaw-fuzz-{}-{number}", std::process::id());
    let address = SocketAddr::from_abstract_name(name).expect("a short name");
    (UnixListener::bind_addr(&address).expect("a new name"), address)
}

impl World for Clients {
    const ID: DeviceId = DeviceId::Vsock;

    fn device(&mut self, event_loop: &EventLoop) -> Arc<Mutex<dyn VirtioDevice>> {
        let events = EventSink::new().expect("an eventfd");
        let device = Vsock::new(event_loop.registrar(DeviceId::Vsock), events);
        let device = Arc::new(Mutex::new(device));
        self.device = Some(device.clone());
        device
    }

    fn attach(&mut self) {
        let (listener, address) = listener();
        if let Some(device) = &self.device {
            let mut device = device.lock().expect("nobody panicked");
            device
                .attach(Backend::Vsock, vec![listener.into()])
                .expect("a socket that listens");
        }
        self.address = Some(address);
    }

    fn act(&mut self, script: &mut Script<'_>) {
        let (what, which) = (script.byte(), usize::from(script.byte()));
        let count = self.clients.len().max(1);
        let client = self.clients.get_mut(which % count);
        match (what % 6, client) {
            (0, _) => self.dial(&format!("CONNECT {}\n", script.word())),
            (1, _) => self.dial(&String::from_utf8_lossy(script.run())),
            (2, Some(client)) => drop(client.write(script.run())),
            (3, Some(client)) => drop(client.read(&mut [0; 4096])),
            (4, Some(client)) => drop(client.shutdown(std::net::Shutdown::Write)),
            (_, Some(_)) => drop(self.clients.swap_remove(which % count)),
            _ => {}
        }
    }
}

impl Clients {
    fn dial(&mut self, line: &str) {
        let Some(address) = &self.address else { return };
        if self.clients.len() < CLIENTS
            && let Ok(mut client) = UnixStream::connect_addr(address)
        {
            client.set_nonblocking(true).expect("a socket");
            let _ = client.write(line.as_bytes());
            self.clients.push(client);
        }
    }
}

/// See [`guest`].
pub fn run(input: &[u8]) {
    let clients = Clients {
        device: None,
        address: None,
        clients: Vec::new(),
    };
    guest::run(clients, input);
}
