//! A guest's identity, and the effects of a freeze and of another identity on its containers.

use super::*;

#[test]
fn handshake_sets_the_guests_identity() {
    with_guest(|g| async move {
        let interfaces = g.interfaces().await;
        let eth = interfaces
            .iter()
            .find(|i| i.hwAddr == "02:00:00:00:00:07")
            .expect("the MAC of the handshake");
        assert_eq!((eth.name.as_str(), eth.mtu), ("pod7", 1400));
        let addresses: Vec<String> = eth
            .IPAddresses
            .iter()
            .map(|a| format!("{}/{}", a.address, a.mask))
            .filter(|a| !a.starts_with("fe80"))
            .collect();
        assert_eq!(addresses, ["10.7.0.2/24", "fd07::2/64"]);
        let routes = g.routes().await;
        let defaults: Vec<&str> = routes
            .iter()
            .filter(|r| r.dest.is_empty())
            .map(|r| r.gateway.as_str())
            .collect();
        assert_eq!(defaults, ["10.7.0.1", "fd07::1"]);
        let mut s = spec(
            &g,
            &[
                "sh",
                "-c",
                "hostname; cat /etc/resolv.conf; grep guest-7 /etc/hosts; cat /run/id; \
                 grep -o '02:00:00:00:09:07.*' /proc/net/arp",
            ],
        );
        s.Mounts
            .push(bind("/run/thaw/etc/resolv.conf", "/etc/resolv.conf", &["rbind"]));
        s.Mounts
            .push(bind("/run/thaw/etc/hosts", "/etc/hosts", &["rbind"]));
        s.Mounts
            .push(bind("/run/machine-id", "/run/id", &["rbind", "ro"]));
        s.Linux.as_mut().unwrap().Namespaces.retain(|n| n.Type != "uts");
        g.create("c", s).await.unwrap();
        g.start("c").await.unwrap();
        let out = String::from_utf8(g.read_all("c", "c", false).await).unwrap();
        let expected = "guest-7\nnameserver 10.7.0.1\n10.7.0.2\tguest-7\nfd07::2\tguest-7\n07070707070707070707070707070707\n\
            02:00:00:00:09:07     *        pod7\n";
        assert_eq!(out, expected);
        g.remove("c").await.unwrap();
    });
}

#[test]
fn freeze_stops_all_and_paused_containers_stay_paused() {
    with_guest(|mut g| async move {
        for id in ["runs", "paused"] {
            g.create(id, spec(&g, TICKS)).await.unwrap();
            g.start(id).await.unwrap();
        }
        g.create("ended", spec(&g, &["true"])).await.unwrap();
        g.start("ended").await.unwrap();
        assert_eq!(g.wait("ended", "ended").await, 0);
        g.create("waiting", spec(&g, &["echo", "started"])).await.unwrap();
        g.exec("runs", "beside", TICKS, false).await.unwrap();
        g.pause("paused").await.unwrap();

        for stop in 0..2 {
            g.greet(&Greeting::Quiesce);
            g.greet(&Greeting::Quiesce);
            assert!(["runs", "paused", "waiting"].iter().all(|id| g.is_frozen(id)));
            for exec in ["runs", "beside"] {
                falls_silent(&g, "runs", exec).await;
            }
            // A new call waits meanwhile, and is then executed once.
            let (again, exec) = (g.connect_again().await, format!("late-{stop}"));
            let request = support::exec_request("runs", &exec, &["echo", "late"]);
            let late = tokio::spawn(async move { again.exec_process(support::context(), &request).await });
            let resumed = tokio::time::timeout(Duration::from_millis(200), g.resume("paused")).await;
            assert!(resumed.is_err(), "nothing is set in motion");
            assert!(!late.is_finished());
            if stop == 0 {
                g.greet(&Greeting::Continue);
            } else {
                assert_eq!(g.becomes(identity(8)).failure, None);
            }
            late.await.unwrap().unwrap();
            assert_eq!(g.read_all("runs", &exec, false).await, b"late\n");
            for exec in ["runs", "beside"] {
                g.read_until("runs", exec, "tick\n").await;
            }
            assert!(!g.is_frozen("runs"));
            // The call that was given up after 200 ms may have been executed since, as any call may.
            g.reconnect().await;
            g.pause("paused").await.unwrap();
        }
        g.greet(&Greeting::Quiesce);
        g.greet(&Greeting::Continue);
        g.greet(&Greeting::Continue);
        assert!(g.is_frozen("paused") && !g.is_frozen("runs"));
        g.resume("paused").await.unwrap();
        g.read_until("paused", "paused", "tick\n").await;
        g.start("waiting").await.unwrap();
        assert_eq!(g.read_all("waiting", "waiting", false).await, b"started\n");
        for id in ["runs", "paused", "ended", "waiting"] {
            g.remove(id).await.unwrap();
        }
        g.assert_clean().await;
    });
}

#[test]
fn second_identity_replaces_the_first_with_containers() {
    with_guest(|g| async move {
        let script = "cat; hostname; cat /etc/hostname /run/id";
        let mut s = spec(&g, &["sh", "-c", script]);
        for (source, destination) in [
            ("/run/thaw/etc/hostname", "/etc/hostname"),
            ("/run/machine-id", "/run/id"),
        ] {
            s.Mounts.push(bind(source, destination, &["rbind"]));
        }
        s.Linux.as_mut().unwrap().Namespaces.retain(|n| n.Type != "uts");
        g.create("c", s).await.unwrap();
        g.start("c").await.unwrap();
        for n in [8, 9] {
            let ack = g.becomes(identity(n));
            assert_eq!(ack.failure, None);
            assert!(ack.received <= ack.applied && !ack.test_hooks);
        }
        let eth = g
            .interfaces()
            .await
            .into_iter()
            .find(|i| i.hwAddr.starts_with("02:00"));
        let eth = eth.expect("the interface of the handshake");
        let mut addresses: Vec<String> = eth
            .IPAddresses
            .iter()
            .map(|a| format!("{}/{}", a.address, a.mask))
            .filter(|a| !a.starts_with("fe80"))
            .collect();
        addresses.sort();
        assert_eq!(
            (eth.hwAddr.as_str(), addresses.join(" ")),
            ("02:00:00:00:00:09", "10.9.0.2/24 fd09::2/64".into())
        );
        let routes = g.routes().await;
        let gateways: Vec<&str> = routes
            .iter()
            .map(|r| r.gateway.as_str())
            .filter(|g| !g.is_empty())
            .collect();
        assert_eq!(gateways, ["10.9.0.1", "fd09::1"], "nothing is left of the others");
        g.close_stdin("c", "c").await.unwrap();
        let out = String::from_utf8(g.read_all("c", "c", false).await).unwrap();
        assert_eq!(out, format!("guest-9\nguest-9\n{}\n", "09".repeat(16)));

        // An identity that cannot be applied is refused by name, and the API continues.
        let mut bad = identity(10);
        bad.hostname = "not a name".into();
        let failure = g.becomes(bad).failure.unwrap();
        assert!(failure.contains("not a name"), "{failure}");
        let mut bad = identity(10);
        bad.cpus = 255;
        let failure = g.becomes(bad).failure.unwrap();
        assert!(
            failure.contains("of 255 CPUs") && failure.contains("cpu254"),
            "{failure}"
        );
        let mut alone = identity(10);
        alone.network = None;
        assert_eq!(g.becomes(alone).failure, None);
        assert!(g.routes().await.iter().all(|r| r.gateway.is_empty()));
        g.remove("c").await.unwrap();
        g.assert_clean().await;
    });
}

#[test]
fn containers_with_the_guests_hostname_are_renamed_with_it() {
    with_guest(|g| async move {
        assert_eq!(g.becomes(identity(8)).failure, None);
        for (id, hostname) in [("same", "guest-8"), ("other", "its-own")] {
            let mut s = spec(&g, &["sh", "-c", "cat; hostname"]);
            s.Hostname = hostname.into();
            g.create(id, s).await.unwrap();
            g.start(id).await.unwrap();
        }
        assert_eq!(g.becomes(identity(9)).failure, None);
        for (id, hostname) in [("same", "guest-9\n"), ("other", "its-own\n")] {
            g.close_stdin(id, id).await.unwrap();
            let out = String::from_utf8(g.read_all(id, id, false).await).unwrap();
            assert_eq!(out, hostname, "{id}");
        }
    });
}
