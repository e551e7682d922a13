use hickory_resolver::proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_resolver::proto::rr::{Name, RData, RecordType};

use super::*;

const PUBLIC: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 7);
const PRIVATE: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);

/// Allows names below allowed.org, and withholds private addresses. Notes what is admitted.
#[derive(Default)]
struct FakeGate(std::sync::Mutex<Vec<(String, Vec<Ipv4Addr>, Duration)>>);

#[async_trait]
impl Gate for Arc<FakeGate> {
    async fn allows(&self, name: &str) -> Result<bool, Error> {
        Ok(name.ends_with("allowed.org"))
    }

    async fn admit(
        &self,
        name: &str,
        addresses: Vec<Ipv4Addr>,
        ttl: Duration,
    ) -> Result<Vec<Ipv4Addr>, Error> {
        if name.starts_with("broken.") {
            return Err(Error::new(ErrorKind::Runtime, "no netlink"));
        }
        let told: Vec<_> = addresses.into_iter().filter(|a| !a.is_private()).collect();
        self.0.lock().unwrap().push((name.to_owned(), told.clone(), ttl));
        Ok(told)
    }
}

/// Answers by the first label of a name. Notes what is asked.
#[derive(Default)]
struct FakeUpstream(std::sync::Mutex<Vec<String>>);

#[async_trait]
impl Upstream for Arc<FakeUpstream> {
    async fn lookup(&self, name: &str) -> Result<Answer, NoAnswer> {
        self.0.lock().unwrap().push(name.to_owned());
        let addresses = match name.split('.').next().unwrap() {
            "gone" => return Err(NoAnswer::NoName),
            "empty" => return Err(NoAnswer::NoAddress),
            "down" => return Err(NoAnswer::Failed),
            "rebound" => vec![PRIVATE],
            "both" => vec![PRIVATE, PUBLIC],
            "many" => vec![PUBLIC; 200],
            _ => vec![PUBLIC],
        };
        let ttl = Duration::from_secs(if name.starts_with("long.") { 1 << 30 } else { 0 });
        Ok(Answer { addresses, ttl })
    }
}

struct Fakes {
    gate: Arc<FakeGate>,
    upstream: Arc<FakeUpstream>,
    answering: Answering,
}

async fn fakes() -> Fakes {
    let (gate, upstream) = (Arc::<FakeGate>::default(), Arc::<FakeUpstream>::default());
    let answering = Answering {
        socket: Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap()),
        gate: Arc::new(gate.clone()),
        upstream: Arc::new(upstream.clone()),
        gate_turn: Arc::default(),
    };
    Fakes {
        gate,
        upstream,
        answering,
    }
}

fn query(name: &str, kind: RecordType) -> Message {
    let mut message = Message::new(7, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(format!("{name}.")).unwrap(), kind));
    message
}

impl Fakes {
    async fn asks(&self, message: &Message) -> Option<Message> {
        let answer = self.answering.answer_to(&message.to_vec().unwrap()).await?;
        assert!(answer.len() <= 512, "{} bytes", answer.len());
        Some(Message::from_vec(&answer).unwrap())
    }

    async fn resolves(&self, name: &str) -> (ResponseCode, Vec<Ipv4Addr>, Option<u32>) {
        let answer = self.asks(&query(name, RecordType::A)).await.unwrap();
        assert_eq!(
            (answer.metadata.id, answer.metadata.message_type),
            (7, MessageType::Response)
        );
        assert_eq!(answer.queries, query(name, RecordType::A).queries);
        let addresses = answer.answers.iter().map(|record| match &record.data {
            RData::A(address) => address.0,
            other => panic!("{other}"),
        });
        let ttl = answer.answers.first().map(|record| record.ttl);
        (answer.metadata.response_code, addresses.collect(), ttl)
    }

    fn asked(&self) -> Vec<String> {
        self.upstream.0.lock().unwrap().clone()
    }
}

#[tokio::test]
async fn allowed_name_is_answered_once_its_addresses_are_open() {
    let fakes = fakes().await;
    let answer = fakes.resolves("WWW.allowed.org").await;
    assert_eq!(answer, (ResponseCode::NoError, vec![PUBLIC], Some(10)));
    let admitted = fakes.gate.0.lock().unwrap().clone();
    assert_eq!(admitted, [("www.allowed.org".into(), vec![PUBLIC], SHORTEST)]);
    assert_eq!(fakes.resolves("long.allowed.org").await.2, Some(3600));
}

#[tokio::test]
async fn refused_name_is_never_asked_for() {
    let fakes = fakes().await;
    for name in ["evil.com", "allowed.org.evil.com", "org"] {
        assert_eq!(
            fakes.resolves(name).await,
            (ResponseCode::Refused, vec![], None),
            "{name}"
        );
        let text = fakes.asks(&query(name, RecordType::TXT)).await.unwrap();
        assert_eq!(text.metadata.response_code, ResponseCode::Refused);
    }
    assert!(fakes.asked().is_empty());
}

#[tokio::test]
async fn rebound_name_tells_no_private_address() {
    let fakes = fakes().await;
    assert_eq!(
        fakes.resolves("rebound.allowed.org").await,
        (ResponseCode::NoError, vec![], None)
    );
    assert_eq!(fakes.resolves("both.allowed.org").await.1, [PUBLIC]);
}

#[tokio::test]
async fn failures_have_their_codes() {
    let fakes = fakes().await;
    for (name, code) in [
        ("gone.allowed.org", ResponseCode::NXDomain),
        ("empty.allowed.org", ResponseCode::NoError),
        ("down.allowed.org", ResponseCode::ServFail),
        ("broken.allowed.org", ResponseCode::ServFail),
    ] {
        assert_eq!(fakes.resolves(name).await, (code, vec![], None), "{name}");
    }
}

#[tokio::test]
async fn other_records_are_not_asked_for() {
    let fakes = fakes().await;
    for kind in [
        RecordType::AAAA,
        RecordType::HTTPS,
        RecordType::TXT,
        RecordType::ANY,
    ] {
        let mut asked = query("www.allowed.org", kind);
        asked.set_edns(Edns::new());
        let answer = fakes.asks(&asked).await.unwrap();
        assert_eq!(answer.metadata.response_code, ResponseCode::NoError);
        assert!(answer.answers.is_empty() && answer.edns.is_some(), "{kind}");
    }
    assert!(fakes.asked().is_empty());
}

#[tokio::test]
async fn many_addresses_of_a_long_name_fit() {
    let fakes = fakes().await;
    let label = "a".repeat(58);
    let name = format!("many.{label}.{label}.{label}.{label}.allowed.org");
    let (code, addresses, _) = fakes.resolves(&name).await;
    assert_eq!((code, addresses.len()), (ResponseCode::NoError, MOST_ADDRESSES));
}

#[tokio::test]
async fn malformed_messages_get_no_addresses() {
    let fakes = fakes().await;
    for bytes in [&b""[..], b"\0", &[0xff; 12], &[0; 11], &[0xc0; 64]] {
        assert_eq!(fakes.answering.answer_to(bytes).await, None, "{bytes:?}");
    }
    let mut answer = query("www.allowed.org", RecordType::A);
    answer.metadata.message_type = MessageType::Response;
    assert!(
        fakes.asks(&answer).await.is_none(),
        "two proxies would answer each other"
    );
    let mut two = query("www.allowed.org", RecordType::A);
    two.add_query(two.queries[0].clone());
    assert_eq!(
        fakes.asks(&two).await.unwrap().metadata.response_code,
        ResponseCode::FormErr
    );
    let mut update = query("www.allowed.org", RecordType::A);
    update.metadata.op_code = OpCode::Notify;
    assert_eq!(
        fakes.asks(&update).await.unwrap().metadata.response_code,
        ResponseCode::NotImp
    );
    // A dot within a label makes no other name of it.
    let label: &[u8] = b"x.allowed";
    let mut odd = query("a.b", RecordType::A);
    odd.queries[0].name = Name::from_labels([label, &b"org"[..]]).unwrap();
    assert_eq!(
        fakes.asks(&odd).await.unwrap().metadata.response_code,
        ResponseCode::Refused
    );
    assert!(fakes.asked().is_empty());
}

#[tokio::test]
async fn proxy_answers_at_its_socket_until_it_is_dropped() {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_nonblocking(true).unwrap();
    let address = socket.local_addr().unwrap();
    let proxy = Proxy::start(socket, Arc::<FakeGate>::default(), Arc::<FakeUpstream>::default()).unwrap();
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    client.connect(address).await.unwrap();
    let asked = query("www.allowed.org", RecordType::A).to_vec().unwrap();
    client.send(&asked).await.unwrap();
    let mut answer = [0; 512];
    let length = client.recv(&mut answer).await.unwrap();
    assert_eq!(Message::from_vec(&answer[..length]).unwrap().answers.len(), 1);
    drop(proxy);
    // The port is free once the task has ended.
    while UdpSocket::bind(address).await.is_err() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn queries_beyond_the_rate_wait_for_the_next_second() {
    let (began, mut pace) = (Instant::now(), Pace::new());
    for _ in 0..MOST_A_SECOND {
        pace.keep().await;
    }
    assert_eq!(began.elapsed(), Duration::ZERO);
    pace.keep().await;
    assert_eq!(began.elapsed(), Duration::from_secs(1));
    pace.keep().await;
    assert_eq!(began.elapsed(), Duration::from_secs(1));
}

#[tokio::test]
async fn node_without_name_servers_resolves_nothing() {
    let answer = NameServers::new(&[]).lookup("www.allowed.org").await;
    assert_eq!(answer, Err(NoAnswer::Failed));
}
