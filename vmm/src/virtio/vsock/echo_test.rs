//! Both directions of a connection at once, behind the real event loop.

use super::*;
use crate::jail::threads::Thread;
use crate::virtio::testing::{Shared, open_gate};

/// A guest that sends back all bytes it gets, and closes when its peer ends, behind the real event loop. Tests edge-triggered waits, credit
/// and backpressure together: both directions are busy at once, and the client reads slowly.
#[test]
fn a_megabyte_goes_through_the_event_loop_and_back() {
    const BYTES: usize = 1 << 20;
    let mut event_loop = EventLoop::new().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vsock");
    let mut vsock = Vsock::new(event_loop.registrar(DeviceId::Vsock), EventSink::new().unwrap());
    vsock
        .attach(Backend::Vsock, vec![UnixListener::bind(&path).unwrap().into()])
        .unwrap();
    let shared = Shared::new(vsock);
    let device = shared.device.clone();
    let mut rig = Rig::idle(shared);
    event_loop
        .serve(DeviceId::Vsock, device, rig.interrupt.clone(), rig.kicks())
        .unwrap();
    let _running = event_loop.start("devices", Thread::Devices, open_gate()).unwrap();
    rig.activate(0);

    let client = std::thread::spawn(move || {
        let mut client = UnixStream::connect(path).unwrap();
        client.write_all(b"CONNECT 1024\n").unwrap();
        let mut writer = client.try_clone().unwrap();
        let (piled_up, start_reading) = std::sync::mpsc::channel();
        let writer = std::thread::spawn(move || {
            let content: Vec<u8> = (0..BYTES).map(|i| (i % 251) as u8).collect();
            let (first, rest) = content.split_at(400 << 10);
            writer.write_all(first).unwrap();
            piled_up.send(()).unwrap();
            writer.write_all(rest).unwrap();
            writer.shutdown(std::net::Shutdown::Write).unwrap();
        });
        // Until then the guest's bytes accumulate, more than the client's socket holds.
        start_reading.recv().unwrap();
        let mut all = Vec::new();
        client.read_to_end(&mut all).unwrap();
        writer.join().unwrap();
        all
    });

    let mut guest = Echo::new(&mut rig);
    while !guest.closed {
        rig.wait();
        guest.run(&mut rig);
    }
    let all = client.join().unwrap();
    let end = all.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    assert!(all.starts_with(b"OK "));
    assert_eq!(all.len() - end, BYTES);
    assert!(
        all[end..]
            .iter()
            .enumerate()
            .all(|(i, byte)| *byte == (i % 251) as u8)
    );
}

/// The guest of the test above. It holds the bytes that it may not send yet.
struct Echo {
    lent: std::collections::HashMap<u16, [Buf; 2]>,
    send_buffer: Buf,
    held: std::collections::VecDeque<u8>,
    host_port: u32,
    taken: u32,
    sent: u32,
    host_forwarded: u32,
    peer_ended: bool,
    closed: bool,
}

impl Echo {
    const BUFFER: u32 = 64 * 1024;

    fn new(rig: &mut Rig<Shared<Vsock>>) -> Echo {
        let mut lent = std::collections::HashMap::new();
        for _ in 0..32 {
            let buffers = [rig.writable(Header::SIZE as u32), rig.writable(4096)];
            lent.insert(rig.submit(RX, &buffers), buffers);
        }
        rig.notify(RX);
        let send_buffer = rig.readable(&[0; Header::SIZE + 4096]);
        Echo {
            lent,
            send_buffer,
            held: Default::default(),
            host_port: 0,
            taken: 0,
            sent: 0,
            host_forwarded: 0,
            peer_ended: false,
            closed: false,
        }
    }

    fn run(&mut self, rig: &mut Rig<Shared<Vsock>>) {
        for (head, used) in rig.used(RX) {
            let buffers = self.lent.remove(&head).unwrap();
            let header: [u8; Header::SIZE] = rig.bytes(buffers[0]).try_into().unwrap();
            let data = rig.bytes(buffers[1])[..used as usize - Header::SIZE].to_vec();
            self.take(rig, &Header::from_bytes(&header), &data);
            self.lent.insert(rig.submit(RX, &buffers), buffers);
            rig.notify(RX);
        }
        self.send_held(rig);
    }

    fn take(&mut self, rig: &mut Rig<Shared<Vsock>>, header: &Header, data: &[u8]) {
        if header.op != Some(Op::Reset) {
            self.host_forwarded = header.forwarded;
        }
        match header.op.unwrap() {
            Op::Request => {
                self.host_port = header.source_port;
                self.send(rig, Op::Response, 0, &[]);
            }
            Op::Data => self.held.extend(data),
            Op::Shutdown => self.peer_ended = true,
            Op::CreditRequest => self.send(rig, Op::CreditUpdate, 0, &[]),
            Op::CreditUpdate => {}
            Op::Reset => self.closed = true,
            other => panic!("{other:?}"),
        }
        assert!(
            self.held.len() <= Echo::BUFFER as usize,
            "the host sent more than this guest can hold"
        );
    }

    fn send_held(&mut self, rig: &mut Rig<Shared<Vsock>>) {
        loop {
            let credit = credit::BUFFER - (self.sent - self.host_forwarded);
            let n = self.held.len().min(4096).min(credit as usize);
            if n == 0 {
                break;
            }
            let chunk: Vec<u8> = self.held.drain(..n).collect();
            self.taken += n as u32;
            self.sent += n as u32;
            self.send(rig, Op::Data, 0, &chunk);
        }
        if self.peer_ended && self.held.is_empty() {
            self.peer_ended = false;
            self.send(rig, Op::Shutdown, 3, &[]);
        }
    }

    /// Sends one packet and waits until its buffer is used.
    fn send(&mut self, rig: &mut Rig<Shared<Vsock>>, op: Op, flags: u32, payload: &[u8]) {
        let mut bytes = guest_packet(op, 1024, self.host_port, payload);
        bytes[32..36].copy_from_slice(&flags.to_le_bytes());
        bytes[36..40].copy_from_slice(&Echo::BUFFER.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.taken.to_le_bytes());
        rig.rewrite(self.send_buffer, &bytes);
        rig.submit(
            TX,
            &[Buf {
                length: bytes.len() as u32,
                ..self.send_buffer
            }],
        );
        rig.notify(TX);
        while rig.used(TX).is_empty() {
            rig.wait();
        }
        // The interrupt may also have been for a received packet.
        rig.interrupt.line().write(1).unwrap();
    }
}
