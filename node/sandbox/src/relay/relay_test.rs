use std::sync::atomic::{AtomicUsize, Ordering};

use super::test_hello::client_hello;
use super::*;

/// Allows one host, and leads to any address.
#[derive(Default)]
struct FakeGate(AtomicUsize);

#[async_trait]
impl Gate for Arc<FakeGate> {
    fn reaches(&self, address: Ipv4Addr) -> bool {
        address.is_loopback()
    }

    async fn allows(&self, name: &str) -> Result<bool, Error> {
        Ok(name == "allowed.org")
    }

    async fn socket(&self) -> Result<TcpSocket, Error> {
        Ok(TcpSocket::new_v4().unwrap())
    }

    fn count_refused(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A connection of a guest, which a relay carries to a server.
struct Carried {
    guest: TcpStream,
    server: TcpListener,
    gate: Arc<FakeGate>,
}

impl Carried {
    async fn begin() -> Carried {
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = server.local_addr().unwrap().port();
        Carried::begin_to(server, SocketAddrV4::new(Ipv4Addr::LOCALHOST, to)).await
    }

    async fn begin_to(server: TcpListener, to: SocketAddrV4) -> Carried {
        let between = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let guest = TcpStream::connect(between.local_addr().unwrap()).await.unwrap();
        let (client, _) = between.accept().await.unwrap();
        let gate = Arc::<FakeGate>::default();
        let carrying = Carrying {
            gate: Arc::new(gate.clone()),
            places: Arc::new(Places::among(&ALL)),
            gate_turn: Arc::default(),
        };
        tokio::spawn(async move { carrying.carry_to(client, to).await });
        Carried { guest, server, gate }
    }

    /// Sends this, and returns what the server gets of it, until the guest ends.
    async fn sends(mut self, bytes: &[u8]) -> Vec<u8> {
        let (mut served, _) = self.server.accept().await.unwrap();
        self.guest.write_all(bytes).await.unwrap();
        self.guest.shutdown().await.unwrap();
        let mut got = Vec::new();
        served.read_to_end(&mut got).await.unwrap();
        served.write_all(b"answer").await.unwrap();
        drop(served);
        let mut answer = Vec::new();
        self.guest.read_to_end(&mut answer).await.unwrap();
        assert_eq!(answer, b"answer");
        got
    }

    /// Sends this, and checks that the connection ends with a reset, that the server gets nothing, and that it is counted.
    async fn expect_refusal(mut self, bytes: &[u8]) {
        let (mut served, _) = self.server.accept().await.unwrap();
        self.guest.write_all(bytes).await.unwrap();
        let mut got = Vec::new();
        let ended = self.guest.read_to_end(&mut got).await.unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::ConnectionReset);
        served.read_to_end(&mut got).await.unwrap_err();
        assert!(got.is_empty(), "{got:?}");
        assert_eq!(self.gate.0.load(Ordering::Relaxed), 1);
    }
}

#[tokio::test]
async fn allowed_host_is_carried_both_ways() {
    let hello = client_hello("allowed.org", true);
    assert_eq!(Carried::begin().await.sends(&hello).await, hello);
    let request = b"GET / HTTP/1.1\r\nHost: allowed.org\r\nConnection: close\r\n\r\n";
    assert_eq!(Carried::begin().await.sends(request).await, request);
    let other = b"SSH-2.0-client\r\n";
    assert_eq!(Carried::begin().await.sends(other).await, other);
}

#[tokio::test]
async fn other_host_on_an_allowed_address_is_refused() {
    for bytes in [
        client_hello("evil.org", true),
        client_hello("allowed.org", false),
        b"GET / HTTP/1.1\r\nHost: evil.org\r\n\r\n".to_vec(),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
    ] {
        Carried::begin().await.expect_refusal(&bytes).await;
    }
}

#[tokio::test]
async fn opening_in_many_pieces_is_refused() {
    let mut carried = Carried::begin().await;
    let (_served, _) = carried.server.accept().await.unwrap();
    carried.guest.set_nodelay(true).unwrap();
    let mut ended = Ok(());
    for _ in 0..10_000 {
        ended = carried.guest.write_all(b"G").await;
        if ended.is_err() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(ended.is_err());
    assert_eq!(carried.gate.0.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn server_that_speaks_first_is_carried() {
    let mut carried = Carried::begin().await;
    let (mut served, _) = carried.server.accept().await.unwrap();
    served.write_all(b"220 mail").await.unwrap();
    let mut said = [0; 8];
    carried.guest.read_exact(&mut said).await.unwrap();
    assert_eq!(&said, b"220 mail");
}

#[tokio::test]
async fn address_to_which_no_name_leads_is_refused() {
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let elsewhere = SocketAddrV4::new(Ipv4Addr::new(169, 254, 169, 254), 80);
    let mut carried = Carried::begin_to(server, elsewhere).await;
    carried.guest.read(&mut [0]).await.unwrap_err();
    assert_eq!(carried.gate.0.load(Ordering::Relaxed), 1);
}
