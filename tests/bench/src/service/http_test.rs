use std::net::Ipv4Addr;

use super::*;

async fn listening() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// The answer that a client sees of this text.
async fn answer(text: &'static str) -> io::Result<(u16, Vec<u8>)> {
    let (listener, address) = listening().await;
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(text.as_bytes()).await.unwrap();
    });
    let answer = Connection::open(address).await.unwrap().answer().await;
    server.await.unwrap();
    answer
}

#[tokio::test]
async fn connection_is_used_again_and_a_body_is_awaited() {
    let (listener, address) = listening().await;
    tokio::spawn(serve(listener));
    let mut connection = Connection::open(address).await.unwrap();
    for _ in 0..2 {
        let answer = connection
            .ask(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            .await
            .unwrap();
        assert_eq!(answer, (200, SMALL.to_vec()));
    }
    let head = b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n";
    connection.send(head).await.unwrap();
    let early = tokio::time::timeout(std::time::Duration::from_millis(50), connection.answer()).await;
    assert!(early.is_err(), "{early:?}");
    connection.send(b"ab").await.unwrap();
    assert_eq!(connection.answer().await.unwrap().0, 200);
}

#[tokio::test]
async fn answer_that_ends_or_breaks_the_connection_is_an_error() {
    let good = answer("HTTP/1.1 502 Bad Gateway\r\ncontent-length: 2\r\n\r\nno").await;
    assert_eq!(good.unwrap(), (502, b"no".to_vec()));
    for bad in [
        "",
        "HTTP/1.1 200 OK\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nn",
        "HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nConnection: close\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1\r\n\r\n",
    ] {
        assert!(answer(bad).await.is_err(), "{bad:?}");
    }
}
