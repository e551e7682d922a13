//! Sources whose chunks are not on this host yet.

use super::*;

/// A source whose chunks come only when they are sent.
struct Late {
    file: FileSource,
    event: OwnedFd,
    asked: mpsc::Sender<u64>,
    sent: mpsc::Receiver<(u64, Result<(), String>)>,
    here: Vec<u64>,
}

/// The other side of a [`Late`] source.
struct Sending {
    event: OwnedFd,
    asked: mpsc::Receiver<u64>,
    sent: mpsc::Sender<(u64, Result<(), String>)>,
}

impl Sending {
    fn send(&self, number: u64, result: Result<(), String>) {
        self.sent.send((number, result)).unwrap();
        rustix::io::write(&self.event, &1u64.to_ne_bytes()).unwrap();
    }
}

impl PageSource for Late {
    fn read(&mut self, number: u64, buffer: &mut [u8]) -> io::Result<bool> {
        if self.here.contains(&number) {
            return self.file.read(number, buffer);
        }
        self.asked.send(number).unwrap();
        Ok(false)
    }

    fn arrived(&mut self) -> Vec<(u64, Result<(), String>)> {
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        let arrived: Vec<_> = self.sent.try_iter().collect();
        self.here.extend(arrived.iter().map(|(number, _)| *number));
        arrived
    }

    fn wakes(&self) -> Option<BorrowedFd<'_>> {
        Some(self.event.as_fd())
    }

    fn bytes(&self) -> u64 {
        self.file.bytes()
    }

    fn hash(&self, number: u64) -> Option<Hash> {
        self.file.hash(number)
    }
}

/// A machine whose chunks come only when they are sent.
struct LateMachine {
    watched: Arc<Watched>,
    /// Another descriptor of its userfaultfd.
    kept: OwnedFd,
    server: PageServer,
    sending: Sending,
    broken: mpsc::Receiver<String>,
}

impl LateMachine {
    fn new() -> Option<LateMachine> {
        let (watched, fd) = Watched::new(REGIONS.iter().sum())?;
        let (file, expected) = memory();
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let (asks, asked) = mpsc::channel();
        let (sender, sent) = mpsc::channel();
        let sending = Sending {
            event: event.try_clone().unwrap(),
            asked,
            sent: sender,
        };
        let source = Late {
            file: FileSource::new(file, &expected),
            event,
            asked: asks,
            sent,
            here: Vec::new(),
        };
        let (breaks, broken) = mpsc::channel();
        let told = move |reason| breaks.send(reason).unwrap();
        Some(LateMachine {
            kept: fd.try_clone().unwrap(),
            server: PageServer::start(fd, &regions(&watched), source, told).unwrap(),
            watched: Arc::new(watched),
            sending,
            broken,
        })
    }

    /// Reads a byte on another thread.
    fn read_beside(&self, offset: u64) -> std::thread::JoinHandle<u8> {
        let watched = self.watched.clone();
        std::thread::spawn(move || watched.read(offset))
    }

    /// The next chunk that is asked for.
    fn asked(&self) -> u64 {
        self.sending.asked.recv_timeout(LIMIT).unwrap()
    }
}

#[test]
fn chunk_that_comes_later_delays_only_who_touches_it() {
    let Some(machine) = LateMachine::new() else { return };
    let low = REGIONS[1];
    let data = machine.read_beside(low + 5 * PAGE);
    assert_eq!(machine.asked(), 0);
    let zero = machine.read_beside(low + 9 * PAGE);
    let other = machine.read_beside(low + CHUNK + PAGE);
    assert_eq!(machine.asked(), 1, "each is asked for once");
    machine.sending.send(1, Ok(()));
    assert_eq!(other.join().unwrap(), 8);
    assert!(!data.is_finished() && !zero.is_finished());
    machine.sending.send(0, Ok(()));
    assert_eq!((data.join().unwrap(), zero.join().unwrap()), (7, 0));
    assert_eq!(machine.watched.read(low + 5 * PAGE + 9), 7);
    assert!(machine.sending.asked.try_recv().is_err() && machine.broken.try_recv().is_err());
}

#[test]
fn chunk_that_cannot_be_had_is_named() {
    let Some(machine) = LateMachine::new() else { return };
    touch_for_ever(&machine.watched, REGIONS[1] + CHUNK + PAGE);
    assert_eq!(machine.asked(), 1);
    machine.sending.send(1, Err("no registry answers".into()));
    let reason = machine.broken.recv_timeout(LIMIT).unwrap();
    assert_eq!(reason, "memory chunk 1: no registry answers");
}

#[test]
fn next_server_serves_faults_that_an_earlier_one_has_read() {
    let Some(machine) = LateMachine::new() else { return };
    let data = machine.read_beside(REGIONS[1] + 5 * PAGE);
    assert_eq!(machine.asked(), 0);
    drop(machine.server);
    assert!(!data.is_finished());
    let (server, broken) = serve(&machine.watched, machine.kept);
    assert_eq!(data.join().unwrap(), 7);
    assert!(broken.try_recv().is_err());
    drop(server);
}

#[test]
fn descriptors_that_are_no_userfaultfd_are_refused() {
    let (reading, _writing) = rustix::pipe::pipe().unwrap();
    let event = rustix::event::eventfd(1, EventfdFlags::CLOEXEC).unwrap();
    let zeros = File::open("/dev/zero").unwrap().into();
    for lie in [reading, event, zeros] {
        let (file, expected) = memory();
        let source = FileSource::new(file, &expected);
        let refused = PageServer::start(lie, &[], source, |_| ()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }
}

#[test]
fn regions_that_overflow_are_refused() {
    let region = |host_address, size| MappedRegion {
        host_address,
        size,
        guest_address: 0,
    };
    check_regions(&[region(PAGE, PAGE), region(1 << 40, 1 << 30)]).unwrap();
    for lie in [
        vec![region(u64::MAX - PAGE, 2 * PAGE)],
        vec![region(0, u64::MAX), region(PAGE, PAGE)],
    ] {
        let refused = check_regions(&lie).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData, "{lie:?}");
    }
}

#[test]
fn addresses_and_offsets_are_each_others_inverse() {
    let regions = [
        MappedRegion {
            host_address: 0x7000_0000,
            size: 3 * PAGE,
            guest_address: 0,
        },
        MappedRegion {
            host_address: 0x1000_0000,
            size: 2 * PAGE,
            guest_address: 1 << 32,
        },
    ];
    for page in 0..5 {
        let address = host_address(&regions, page * PAGE).unwrap();
        assert_eq!(file_offset(&regions, address), Some(page * PAGE));
    }
    assert_eq!(host_address(&regions, 5 * PAGE), None);
    for outside in [
        0,
        0x1000_0000 - 1,
        0x1000_0000 + 2 * PAGE,
        0x7000_0000 + 3 * PAGE,
        u64::MAX,
    ] {
        assert_eq!(file_offset(&regions, outside), None, "{outside:#x}");
    }
}
