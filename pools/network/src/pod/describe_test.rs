use super::*;

fn link(index: u32, name: &str) -> Link {
    Link {
        index,
        name: name.into(),
        kind: Some("veth".into()),
        mac: Some([2, 0, 0, 0, 0, index as u8]),
        mtu: 1450,
        flags: libc::IFF_UP as u32,
        ethernet: true,
        enslaved: false,
    }
}

fn route(to: Option<(IpAddr, u8)>, by: u32) -> Route {
    Route {
        v6: false,
        table: RT_TABLE_MAIN,
        to,
        gateway: None,
        source: None,
        by: Some(by),
        priority: 0,
        scope: 0,
        flags: 0,
        kernel: false,
        complex: false,
    }
}

fn ip(last: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, last))
}

#[test]
fn unusable_routes_are_left_out() {
    let gateway = Route {
        gateway: Some(ip(1)),
        flags: ONLINK | 0x10,
        ..route(None, 2)
    };
    let near = Route {
        scope: 253,
        source: Some(ip(5)),
        ..route(Some((ip(1), 32)), 2)
    };
    let not = [
        Route {
            kernel: true,
            ..route(Some((ip(0), 24)), 2)
        },
        Route {
            complex: true,
            ..route(Some((ip(0), 25)), 2)
        },
        Route {
            table: 255,
            ..route(Some((ip(5), 32)), 2)
        },
        Route {
            priority: 100,
            gateway: Some(ip(3)),
            ..route(None, 2)
        },
        route(Some((ip(0), 26)), 7),
    ];
    let six = Route {
        v6: true,
        gateway: Some("fd00::1".parse().unwrap()),
        ..route(None, 2)
    };
    let surveyed = Surveyed {
        routes: not.into_iter().chain([gateway, near, six]).collect(),
        ..Surveyed::default()
    };
    let text = |route: &handshake::Route| {
        format!(
            "{}/{} via {:?} src {:?} {} {}",
            route.to, route.prefix, route.gateway, route.source, route.scope, route.gateway_on_link
        )
    };
    let told = surveyed.describe(&link(2, "eth0")).routes;
    assert_eq!(
        told.iter().map(text).collect::<Vec<_>>(),
        [
            "0.0.0.0/0 via Some(192.0.2.1) src None 0 true",
            "192.0.2.1/32 via None src Some(192.0.2.5) 253 false",
            "::/0 via Some(fd00::1) src None 0 false",
        ]
    );
}

#[test]
fn automatic_addresses_and_neighbours_are_left_out() {
    let address = |ip, peer, flags| Address {
        link: 2,
        ip,
        prefix: 32,
        peer,
        flags,
    };
    let addresses = vec![
        address(ip(5), Some(ip(6)), 0x80),
        address(ip(7), None, IFA_F_TEMPORARY),
        address(ip(8), None, IFA_F_DADFAILED),
        Address {
            link: 1,
            ..address(ip(9), None, 0)
        },
    ];
    let neighbour = |last, state| Neighbour {
        link: 2,
        ip: ip(last),
        mac: [2; 6],
        state,
        flags: 0,
    };
    let surveyed = Surveyed {
        addresses,
        // A reachable neighbour is one that the kernel has learnt.
        neighbours: vec![neighbour(1, NUD_PERMANENT), neighbour(2, 2)],
        ..Surveyed::default()
    };
    let told = surveyed.describe(&link(2, "eth0"));
    assert_eq!(
        (told.name.as_str(), told.mac, told.mtu, told.arp),
        ("eth0", [2, 0, 0, 0, 0, 2], 1450, true)
    );
    let [only] = &told.addresses[..] else {
        panic!("{:?}", told.addresses);
    };
    assert_eq!((only.ip, only.prefix, only.on_link), (ip(5), 32, false));
    let [peer] = &told.routes[..] else {
        panic!("{:?}", told.routes);
    };
    assert_eq!(
        (peer.to, peer.scope, peer.source),
        (ip(6), RT_SCOPE_LINK, Some(ip(5)))
    );
    assert_eq!(
        told.neighbours,
        [handshake::Neighbour {
            ip: ip(1),
            mac: [2; 6]
        }]
    );
}

#[test]
fn prefix_is_on_link_if_the_kernel_says_so() {
    let addresses = |ips: [(&str, u8); 4]| {
        let address = |(ip, prefix): (&str, u8)| Address {
            link: 2,
            ip: ip.parse().unwrap(),
            prefix,
            peer: None,
            flags: 0,
        };
        ips.map(address).to_vec()
    };
    let kernels = |to: &str, prefix, by| Route {
        kernel: true,
        ..route(Some((to.parse().unwrap(), prefix)), by)
    };
    let surveyed = Surveyed {
        addresses: addresses([
            ("10.1.2.3", 16),
            ("10.9.2.3", 24),
            ("fd00::2:3", 64),
            ("fd01::3", 64),
        ]),
        routes: vec![
            kernels("10.1.0.0", 16, 2),
            // A route of another interface, as with a plugin that deletes the route of an address.
            kernels("10.9.2.0", 24, 3),
            kernels("fd00::", 64, 2),
        ],
        ..Surveyed::default()
    };
    let told = surveyed.describe(&link(2, "eth0")).addresses;
    assert_eq!(
        told.iter().map(|a| a.on_link).collect::<Vec<_>>(),
        [true, false, true, false]
    );
}

#[test]
fn only_ethernet_interfaces_that_are_up_are_for_guests() {
    let good = link(2, "eth0");
    assert!(is_for_a_guest(&good));
    for not in [
        Link {
            flags: 0,
            ..good.clone()
        },
        Link {
            ethernet: false,
            ..good.clone()
        },
        Link {
            enslaved: true,
            ..good.clone()
        },
        Link {
            mac: None,
            ..good.clone()
        },
        Link {
            mac: Some([0; 6]),
            ..good.clone()
        },
        Link {
            mac: Some([1; 6]),
            ..good.clone()
        },
    ] {
        assert!(!is_for_a_guest(&not), "{not:?}");
    }
    let loopback = Link {
        flags: good.flags | libc::IFF_LOOPBACK as u32,
        ..link(1, "lo")
    };
    assert_eq!(for_a_guest(vec![loopback, good.clone()]), [good]);
}

proptest::proptest! {
    #[test]
    fn prefix_begins_before_all_its_addresses(bits: u128, prefix in 0u8..=255) {
        let ip = Ipv6Addr::from(bits);
        let first = masked(ip.into(), prefix);
        proptest::prop_assert!(first <= IpAddr::V6(ip));
        proptest::prop_assert_eq!(masked(first, prefix), first);
        let v4 = Ipv4Addr::from(bits as u32);
        proptest::prop_assert!(masked(v4.into(), prefix) <= IpAddr::V4(v4));
    }
}
