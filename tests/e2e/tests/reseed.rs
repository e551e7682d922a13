//! The servers of docs/examples/reseed: of two clones and the original none makes a key of another, and each clone has a connection of its
//! own to the upstream. A server that nothing renews shows that equal numbers would be seen.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::thread;

use thaw_e2e::home::{Home, stop};
use thaw_e2e::outside::{OUTSIDE, World};
use thaw_e2e::page::fetch_path;
use thaw_e2e::{image, run};

/// Where the servers listen.
const PORT: u16 = 8000;
/// Where their upstream does, outside.
const UPSTREAM_PORT: u16 = 7000;
/// Longer than Java takes to compile its program and start on an emulated machine, seconds.
const READY_S: u32 = 240;
/// Longer than a hook takes there.
const HOOK_TIMEOUT: &str = "60s";
/// How often each page is asked for.
const ROUNDS: usize = 4;

struct Example {
    image: &'static str,
    /// The name of its program in the container.
    file: &'static str,
    program: &'static str,
    /// What runs the program.
    runs: &'static str,
    /// Of `--after-thaw`.
    hook: Option<&'static str>,
    /// The pages that are random numbers.
    random: &'static [&'static str],
}

const PYTHON: Example = Example {
    image: "python3",
    file: "server.py",
    program: include_str!("../../../docs/examples/reseed/server.py"),
    runs: "python3",
    hook: Some("kill -HUP 1"),
    random: &["/key", "/id"],
};
const NODE: Example = Example {
    image: "node",
    file: "server.js",
    program: include_str!("../../../docs/examples/reseed/server.js"),
    runs: "node",
    hook: Some("http:9000/thawed"),
    random: &["/key", "/id"],
};
const JAVA: Example = Example {
    image: "java",
    file: "Server.java",
    program: include_str!("../../../docs/examples/reseed/Server.java"),
    runs: "java -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Djava.net.preferIPv4Stack=true",
    hook: None,
    random: &["/key", "/id"],
};
const OPENSSL: Example = Example {
    image: "openssl",
    file: "server.c",
    program: include_str!("../../../docs/examples/reseed/server.c"),
    runs: "tcc -run -lcrypto",
    hook: None,
    random: &["/key"],
};

fn done(home: &Home, arguments: &[&str]) -> String {
    let printed = run(&mut home.thaw(arguments)).ok();
    printed.trim_end().to_owned()
}

/// A page of a server, without its head.
fn page(at: SocketAddr, path: &str) -> String {
    let answer = fetch_path(at, path);
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    assert!(
        head.starts_with("HTTP/1.") && head.get(8..13) == Some(" 200 "),
        "{path}: {answer}"
    );
    body.trim_end().to_owned()
}

/// Random numbers of a server, in the order in which it makes them.
fn numbers(at: SocketAddr, pages: &[&str]) -> Vec<String> {
    let rounds = (0..ROUNDS).flat_map(|_| pages);
    rounds.map(|path| page(at, path)).collect()
}

/// Answers each line by the number of its connection, until the test program ends.
fn serve(listener: TcpListener) {
    thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let Ok(stream) = stream else { return };
            let mut answers = stream.try_clone().unwrap();
            thread::spawn(move || {
                for _ in BufReader::new(stream).lines().map_while(Result::ok) {
                    let answer = format!("connection {number}\n");
                    let _ = answers.write_all(answer.as_bytes());
                }
            });
        }
    });
}

/// Starts an example as the sandbox `web`.
fn start(home: &Home, example: &Example) {
    let image = image(example.image);
    done(home, &["-q", "image", "pull", &image]);
    let publish = format!("0:{PORT}");
    let (port, ready_s) = (PORT.to_string(), READY_S.to_string());
    let upstream = format!("UPSTREAM={OUTSIDE}:{UPSTREAM_PORT}");
    let script = format!(
        "printf %s \"$1\" >/tmp/{file} && exec {runs} /tmp/{file}",
        file = example.file,
        runs = example.runs
    );
    let mut line = vec!["run", "-d", "--name", "web", "-p", &publish, "-e", &upstream];
    line.extend(["--ready-tcp", &port, "--ready-timeout", &ready_s]);
    if let Some(hook) = example.hook {
        line.extend(["--after-thaw", hook, "--hook-timeout", HOOK_TIMEOUT]);
    }
    line.extend([&*image, "sh", "-c", &script, "sh", example.program]);
    done(home, &line);
}

/// Starts an example, asks it, freezes it, thaws it twice, and asks the original and each clone. The first answer is from before the freeze.
fn ask_copies<T>(example: &Example, ask: impl Fn(SocketAddr) -> T) -> [T; 4] {
    let world = World::new();
    world.within(|| serve(TcpListener::bind((OUTSIDE, UPSTREAM_PORT)).unwrap()));
    let home = Home::new();
    let thawd = home.thawd(&[]);
    let ask = |sandbox: &str| {
        let published = done(&home, &["port", sandbox, &PORT.to_string()]);
        let port: u16 = published.rsplit_once(':').unwrap().1.parse().unwrap();
        ask((Ipv4Addr::LOCALHOST, port).into())
    };
    start(&home, example);
    let before = ask("web");
    done(&home, &["freeze", "web", "--name", "ready"]);
    let publish = format!("0:{PORT}");
    for clone in ["one", "two"] {
        let mut line = vec!["thaw", "-d", "--name", clone, "-p", &publish];
        line.extend(example.hook.map(|_| "--require-hook"));
        line.push("ready");
        done(&home, &line);
    }
    let [original, one, two] = ["web", "one", "two"].map(ask);
    done(&home, &["rm", "web", "one", "two"]);
    stop(thawd);
    [before, original, one, two]
}

/// Fails if a random number of an example is made twice, or a clone uses a connection of the original.
fn assert_renewed(example: &Example) {
    let asked = ask_copies(example, |at| (page(at, "/upstream"), numbers(at, example.random)));
    let mut seen = BTreeSet::new();
    for number in asked.iter().flat_map(|(_, numbers)| numbers) {
        assert!(seen.insert(number), "{number} is there twice: {asked:?}");
    }
    let [before, copies @ ..] = &asked;
    assert_eq!(before.0, copies[0].0, "the original keeps its connection");
    let connections: BTreeSet<_> = copies.iter().map(|(upstream, _)| upstream).collect();
    assert_eq!(connections.len(), copies.len(), "{asked:?}");
}

#[test]
#[ignore = "long"]
fn python_clones_make_no_equal_key() {
    assert_renewed(&PYTHON);
}

#[test]
#[ignore = "long"]
fn node_clones_make_no_equal_key() {
    assert_renewed(&NODE);
}

#[test]
#[ignore = "long"]
fn java_clones_make_no_equal_key() {
    assert_renewed(&JAVA);
}

#[test]
#[ignore = "long"]
fn openssl_clones_make_no_equal_key() {
    assert_renewed(&OPENSSL);
}

/// The same server and the same comparison, without the hook.
#[test]
#[ignore = "long"]
fn python_clones_without_their_hook_make_equal_numbers() {
    let unrenewed = Example { hook: None, ..PYTHON };
    let [before, original, one, two] = ask_copies(&unrenewed, |at| numbers(at, &["/id"]));
    assert_ne!(before, original);
    assert_eq!(original, one);
    assert_eq!(original, two);
}
