use std::net::Ipv4Addr;

use rustix::thread::UnshareFlags;

use super::rule::{Interface, TCP};
use super::*;
use crate::prefix::Prefix;

/// Runs a test in a namespace of its own, if this host allows it.
fn alone(test: impl FnOnce(&mut Socket) + Send) {
    thaw_test_skip::beside(|| {
        // SAFETY: the flag does not unshare the file descriptor table.
        match unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) } {
            Ok(()) => test(&mut Socket::netfilter().unwrap()),
            Err(e) => thaw_test_skip::skip(format!("no network namespace: {e}")),
        }
    });
}

fn key(port: u16) -> [Field; 2] {
    [Field::Protocol(TCP), Field::Port(port)]
}

const TO: Target = Target {
    address: Ipv4Addr::new(10, 0, 0, 1),
    port: 80,
};

fn code(done: io::Result<()>) -> Option<i32> {
    done.err().and_then(|e| e.raw_os_error())
}

#[test]
fn transaction_is_atomic() {
    alone(|socket| {
        let make = |socket: &mut Socket| {
            let mut t = Transaction::new("t");
            t.map("m", &key(0));
            t.chain("c");
            t.rule("c", Rule::new().dnat_by("m", false));
            t.commit(socket)
        };
        make(socket).unwrap();
        // A second time nothing changes.
        make(socket).unwrap();
        let insert = |socket: &mut Socket, ports: &[u16]| {
            let mut t = Transaction::new("t");
            ports.iter().for_each(|port| t.insert("m", &key(*port), TO));
            t.commit(socket)
        };
        insert(socket, &[1, 2]).unwrap();
        assert_eq!(code(insert(socket, &[3, 2, 4])), Some(libc::EEXIST));
        let mut found = elements(socket, "t", "m").unwrap();
        found.sort_by(|a, b| a.0.cmp(&b.0));
        assert_eq!(found, [(concatenated(&key(1)), TO), (concatenated(&key(2)), TO)]);
        remove_raw(socket, "t", "m", &found[0].0).unwrap();
        remove_raw(socket, "t", "m", &found[0].0).unwrap();
        let mut t = Transaction::new("t");
        t.remove("m", &key(1));
        assert_eq!(code(t.commit(socket)), Some(libc::ENOENT));
        assert_eq!(elements(socket, "t", "m").unwrap().len(), 1);
        assert!(elements(socket, "nothing", "m").unwrap().is_empty());
    });
}

/// Rules, and the line of `nft list ruleset` for each.
fn rules() -> Vec<(Rule, &'static str)> {
    let prefix = |text: &str| text.parse::<Prefix>().unwrap();
    vec![
        (
            Rule::new().protocol(TCP).reset(),
            "meta l4proto tcp reject with tcp reset",
        ),
        (Rule::new().prohibit(), "reject with icmp admin-prohibited"),
        (
            Rule::new()
                .arriving(Interface::Named("up"))
                .to(prefix("10.0.0.0/9"))
                .drop(),
            "iifname \"up\" ip daddr 10.0.0.0/9 drop",
        ),
        (
            Rule::new()
                .leaving(Interface::Beginning("thaw-n"))
                .redirected()
                .accept(),
            "oifname \"thaw-n*\" ct status dnat accept",
        ),
        (
            Rule::new()
                .not_from(prefix("10.0.0.1"))
                .state(rule::ESTABLISHED | rule::RELATED)
                .jump("d"),
            "ip saddr != 10.0.0.1 ct state established,related jump d",
        ),
        (
            Rule::new().protocol(TCP).port(&(80..=90)).goto("d"),
            "tcp dport 80-90 goto d",
        ),
        (
            Rule::new().protocol(17).port(&(53..=53)).accept(),
            "udp dport 53 accept",
        ),
        (
            Rule::new().for_this_host().replying().accept(),
            "fib daddr type local ct direction reply accept",
        ),
    ]
}

#[test]
fn rules_are_listed_by_nft_as_written() {
    alone(|socket| {
        let mut t = Transaction::new("t");
        t.map(
            "m",
            &[Field::Address(TO.address), Field::Protocol(0), Field::Port(0)],
        );
        t.insert(
            "m",
            &[
                Field::Address(TO.address),
                Field::Protocol(TCP),
                Field::Port(8080),
            ],
            TO,
        );
        t.chain("d");
        let rules = rules();
        let mut nat = Transaction::new("n");
        nat.hooked("p", Hook::NatAfter, true);
        nat.rule(
            "p",
            Rule::new()
                .leaving_elsewhere(Interface::Beginning("thaw-n"))
                .masquerade(),
        );
        nat.rule("p", Rule::new().snat(TO.address));
        nat.commit(socket).unwrap();
        t.hooked("f", Hook::Forward, false);
        for (rule, _) in &rules {
            t.rule("f", rule.clone());
        }
        t.hooked("q", Hook::NatBefore, true);
        t.rule("q", Rule::new().dnat_by("m", true));
        t.commit(socket).unwrap();
        let Ok(listed) = std::process::Command::new("nft")
            .args(["list", "ruleset"])
            .output()
        else {
            return thaw_test_skip::skip("the tool's view: there is no nft here to show the rules");
        };
        let listed = String::from_utf8(listed.stdout).unwrap();
        let others = [
            "type filter hook forward priority filter; policy drop;",
            "10.0.0.1 . tcp . 8080 : 10.0.0.1 . 80",
            "dnat ip to ip daddr . meta l4proto . th dport map @m",
            "type nat hook postrouting priority srcnat; policy accept;",
            "oifname != \"thaw-n*\" masquerade",
            "snat to 10.0.0.1",
        ];
        for text in rules.iter().map(|(_, text)| *text).chain(others) {
            // The tool leaves out implied parts.
            let text = text
                .strip_prefix("meta l4proto tcp reject")
                .map_or(text, |_| "reject with tcp reset");
            assert!(listed.contains(text), "{text}: {listed}");
        }
    });
}
