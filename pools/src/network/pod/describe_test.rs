use std::net::Ipv4Addr;

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
        odd: false,
    }
}

fn ip(last: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, last))
}

#[test]
fn routes_are_those_a_guest_can_have_gateways_last() {
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
            odd: true,
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
    let routes = not.into_iter().chain([gateway, near]).collect();
    let surveyed = Surveyed::chosen(vec![link(2, "eth0")], Vec::new(), routes, Vec::new());
    let told = surveyed.routes();
    let text = |route: &types::Route| {
        format!(
            "{} via {:?} dev {} src {:?} {} {}",
            route.dest, route.gateway, route.device, route.source, route.scope, route.flags
        )
    };
    let told: Vec<String> = told.iter().map(text).collect();
    assert_eq!(
        told,
        [
            r#"192.0.2.1/32 via "" dev eth0 src "192.0.2.5" 253 0"#,
            r#" via "192.0.2.1" dev eth0 src "" 0 4"#,
        ]
    );
    assert_eq!(surveyed.config(&surveyed.links[0]).gateways, [ip(1)]);
}

#[test]
fn addresses_and_neighbours_are_those_somebody_set() {
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
    // Reachable is what the kernel has learnt.
    let neighbours = vec![neighbour(1, NUD_PERMANENT), neighbour(2, 2)];
    let surveyed = Surveyed::chosen(vec![link(2, "eth0")], addresses, Vec::new(), neighbours);
    let interface = surveyed.interface(&surveyed.links[0]);
    assert_eq!(interface.hwAddr, "02:00:00:00:00:02");
    let [only] = interface.IPAddresses.as_slice() else {
        panic!("{:?}", interface.IPAddresses);
    };
    assert_eq!((only.address.as_str(), only.mask.as_str()), ("192.0.2.5", "32"));
    let [peer] = &surveyed.routes()[..] else {
        panic!("{:?}", surveyed.routes());
    };
    assert_eq!((peer.dest.as_str(), peer.scope), ("192.0.2.6/32", RT_SCOPE_LINK));
    let [told] = &surveyed.neighbours()[..] else {
        panic!("{:?}", surveyed.neighbours());
    };
    assert_eq!((told.device.as_str(), told.state), ("eth0", 0x80));
}

#[test]
fn only_ethernet_that_is_up_and_its_own_is_for_a_guest() {
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
}
